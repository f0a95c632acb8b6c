"""GPUs: one JSON file each in `memcalc/hardware/`, every quantity with its unit and source."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from memcalc.errors import InputError, nearest, one_line
from memcalc.inputs.files import hardware_folder, read_bundled
from memcalc.units import to_bytes


class Quantity(NamedTuple):
    """A number with its unit and where it was published."""

    value: float
    unit: str
    source: str

    @property
    def nbytes(self) -> int:
        return to_bytes(self.value, self.unit)


class GPU(NamedTuple):
    """What memcalc knows of one GPU. FLOP/s are dense; links are bidirectional totals."""

    name: str
    full_name: str
    aliases: list[str]
    vendor: str
    architecture: str
    compute_capability: str
    memory: Quantity
    nominal_memory: Quantity
    memory_bandwidth: Quantity
    dense_flops_per_second: dict[str, Quantity]
    links: dict[str, Quantity]
    nvlink_group: Quantity | None = None
    """How many GPUs an NVLink bridge joins; None: all of a node."""
    network: Quantity | None = None
    """Of one GPU, in each direction, in NVIDIA's own node with it; None where there is no such node."""

    @property
    def capacity(self) -> int:
        """Bytes of device memory that a process can see, as cudaMemGetInfo's total: without what the driver reserves."""
        return self.memory.nbytes


def from_file(name: str, content: dict[str, Any]) -> GPU:
    """A GPU from the content of its file (TypeError for a key too many or too few)."""
    made: dict[str, Any] = dict(content)
    for key in ("memory", "nominal_memory", "memory_bandwidth"):
        made[key] = Quantity(**content[key])
    for key in ("dense_flops_per_second", "links"):
        made[key] = {name: Quantity(**quantity) for name, quantity in content[key].items()}
    for key in {"nvlink_group", "network"} & content.keys():
        made[key] = Quantity(**content[key])
    return GPU(name=name, **made)


@cache
def _files() -> dict[str, Path]:
    return {path.stem: path for path in sorted(hardware_folder().glob("*.json"))}


@cache
def _read(name: str) -> GPU:
    return from_file(name, read_bundled(_files()[name]))


def all_gpus() -> list[GPU]:
    """Every GPU, by name."""
    return [_read(name) for name in _files()]


@cache
def load_gpu(name: str) -> GPU:
    """A GPU by name or alias; InputError lists the nearest."""
    wanted = name.strip().lower()
    if wanted in _files():
        return _read(wanted)
    known: dict[str, str] = {}
    for gpu in all_gpus():
        known[gpu.name] = gpu.name
        known.update((alias.lower(), gpu.name) for alias in gpu.aliases)
    if wanted in known:
        return _read(known[wanted])
    close = nearest(wanted, known)
    hint = f"did you mean {', '.join(close)}?" if close else "see `memcalc gpus`"
    raise InputError(f"--gpu {one_line(name)}: unknown GPU; {hint}")
