"""What was predicted beside what was measured, row by row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from memcalc.device import HANDLES, cublas_workspace

if TYPE_CHECKING:
    from memcalc.estimation import Report

Calls = Mapping[tuple[str, int], tuple[int, int]]
"""(collective, ranks of its group) -> calls and payload of a step."""


class Measured(NamedTuple):
    """Bytes of one rank in a steady-state step; None where a backend cannot tell."""

    parameters: int
    gradients: int | None
    optimizer_states: int
    saved_activations: int | None
    forward: int
    backward: int
    step: int
    calls: Calls | None
    """None without an engine that sends something."""
    environment: dict[str, str]
    """Versions and, on a GPU, what it is."""
    seconds: float | None = None
    """Of the step; None without a GPU."""
    allocated: int | None = None
    reserved: int | None = None
    device: int | None = None
    real_ranks: bool = False
    """Whether the other ranks were there: then NCCL was."""


class Compared(NamedTuple):
    """One row. `predicted` and `measured` are bytes, but calls of a collective."""

    name: str
    predicted: int
    measured: int

    @property
    def difference(self) -> int:
        return self.predicted - self.measured

    @property
    def error(self) -> float:
        """The prediction's, relative to what was measured."""
        if self.measured:
            return self.difference / self.measured
        return 0.0 if not self.predicted else float("inf")


class Comparison(NamedTuple):
    """A prediction and a measurement of the same setup."""

    report: Report
    measured: Measured
    backend: str

    @property
    def memory(self) -> list[Compared]:
        """Components, the peak of each phase and of all; on a GPU what its tools show besides."""
        report, measured = self.report, self.measured
        components = ("parameters", "gradients", "optimizer_states", "saved_activations")
        pairs: list[tuple[str, int, int | None]] = [
            (name, report.total(name), getattr(measured, name)) for name in components
        ]
        phases = [measured.forward, measured.backward, measured.step]
        besides = self._workspaces
        pairs += [
            (f"peak in {name}", report.phases[name] + besides, size) for name, size in zip(_PHASES, phases, strict=True)
        ]
        pairs.append(("peak", report.peak + besides, max(phases)))
        pairs += [(name, getattr(report, name), getattr(measured, name)) for name in ("allocated", "reserved")]
        nccl = sum(item.nbytes for item in report.overheads if item.name.startswith("NCCL"))
        pairs.append(("device", report.device - (0 if measured.real_ranks else nccl), measured.device))
        return [Compared(name, predicted, size) for name, predicted, size in pairs if size is not None]

    @property
    def _workspaces(self) -> int:
        """What a GPU's allocator is asked for besides tensors."""
        if self.backend == "fake":
            return 0
        return HANDLES * cublas_workspace(self.measured.environment["compute_capability"])

    @property
    def communication(self) -> list[Compared]:
        """Calls and payload of every collective, by the size of its group; a kind that only one of both has is there too."""
        if self.measured.calls is None:
            return []
        ours: Counter[tuple[str, int, str]] = Counter()
        for c in self.report.collectives:
            if c.group_size == 1:
                continue  # torch calls them on one rank, too, and nothing is sent
            ours[c.collective, c.group_size, "calls"] += c.calls
            ours[c.collective, c.group_size, "payload"] += c.payload
        theirs: Counter[tuple[str, int, str]] = Counter()
        for (kind, ranks), (calls, payload) in self.measured.calls.items():
            if ranks > 1:
                theirs[kind, ranks, "calls"], theirs[kind, ranks, "payload"] = calls, payload
        keys = dict.fromkeys([*ours, *theirs])
        return [
            Compared(f"{kind} over {ranks}: {what}", ours[key], theirs[key])
            for key in keys
            for kind, ranks, what in (key,)
        ]

    @property
    def worst(self) -> Compared:
        """The row of memory that is off by most, relative to what was measured."""
        return max(self.memory, key=lambda row: abs(row.error))

    def to_dict(self) -> dict[str, Any]:
        """The JSON document, a case of a record."""
        setup = self.report.setup._asdict()
        rows = {"memory": self.memory, "communication": self.communication}
        return {
            "schema_version": 1,
            "model": {"name": self.report.model.name, "model_type": self.report.model.model_type},
            "setup": setup,
            "backend": self.backend,
            "environment": self.measured.environment,
            "seconds": self.measured.seconds,
            **{
                part: [{"name": r.name, "predicted": r.predicted, "measured": r.measured} for r in made]
                for part, made in rows.items()
            },
        }


_PHASES: Final = ("forward", "backward", "step")
