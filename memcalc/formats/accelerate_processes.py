"""The processes that accelerate starts, one for each GPU.

Source: accelerate/commands/launch.py (_validate_launch_command), utils/launch.py (prepare_multi_gpu_env).
"""

from __future__ import annotations

from typing import Final, NamedTuple

from memcalc.formats.found import Value
from memcalc.formats.section import Section

_MOST: Final = 10**6


class Processes(NamedTuple):
    """The processes of all machines, as many as GPUs. None if the file leaves their number to the command line."""

    total: int | None
    per_machine: int | None
    are_machines_given: bool = False
    notes: tuple[str, ...] = ()
    key: str = "num_processes"
    """The key that says how many there are."""

    def options(self, top: Section) -> dict[str, Value]:
        """Return the options that the processes mean."""
        if self.total is None or self.per_machine is None:
            return {}
        out = {"gpus": top.value(self.key, self.total)}
        if self.total > 1:
            say = top.value if self.are_machines_given else top.default
            out["gpus_per_node"] = say("num_machines", self.per_machine)
        return out


def read_processes(top: Section, kind: str) -> Processes:
    """Return the processes of a distributed_type. Raises InputError for numbers that accelerate cannot start."""
    machines = top.whole("num_machines", 1, _MOST) or 1
    given = _number(top)
    if kind == "NO":
        notes = () if given in (None, 1) else (f"num_processes {given}: distributed_type NO runs one process.",)
        return Processes(1, 1, notes=notes, key="distributed_type")
    _check_ids(top, kind, machines)
    if given is None:
        shown = "-1" if "num_processes" in top else "is not given"
        return Processes(None, None, notes=(f"num_processes {shown}: accelerate takes it from the command line.",))
    per_machine = given // machines
    if not per_machine:
        top.refuse("num_processes", f"allowed: {machines} or more, one for each of num_machines {machines}")
    total = per_machine * machines
    notes = ()
    if total != given:
        notes = (f"num_processes {given}: {per_machine} on each of {machines} machines, so {total} are estimated.",)
    return Processes(total, per_machine, "num_machines" in top, notes)


def _number(top: Section) -> int | None:
    """Return num_processes; None for -1, which stands for a number that is given when the training is started."""
    if top.raw("num_processes") in (-1, "-1"):
        return None
    return top.whole("num_processes", 1, _MOST)


def _check_ids(top: Section, kind: str, machines: int) -> None:
    """Raise InputError for fewer than two GPUs by their ids, which accelerate refuses for several GPUs."""
    ids = top.raw("gpu_ids")
    if ids is None or ids == "all" or not kind.startswith("MULTI_") or machines > 1:
        return
    if len(str(ids).split(",")) < 2:
        top.refuse("gpu_ids", f"accelerate wants at least two with {kind}; allowed: all, or ids with commas")
