"""Predicted bytes beside measured bytes, row by row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from memcalc.device.shown import HANDLES, cublas_workspace
from memcalc.families.base.program import GRADIENT_LEFT_BEHIND
from memcalc.hardware.figures import CONTEXT, WORKSPACES
from memcalc.validate.emptied import reserved_when_emptied

if TYPE_CHECKING:
    from memcalc.estimation.report import Report

Calls = Mapping[tuple[str, int], tuple[int, int]]
"""(collective, ranks of its group) -> calls and payload of a step."""


class Measured(NamedTuple):
    """The bytes of one rank in a steady-state step; None if a backend cannot tell."""

    parameters: int | None
    gradients: int | None
    optimizer_states: int | None
    saved_activations: int | None
    forward: int
    backward: int
    step: int
    calls: Calls | None
    """The collective calls; None without an engine that sends anything."""
    environment: dict[str, str]
    """The versions and, on a GPU, its properties."""
    seconds: float | None = None
    """The seconds of the step; None without a GPU."""
    allocated: int | None = None
    reserved: int | None = None
    device: int | None = None
    real_ranks: bool = False
    """True if the other ranks were running, and NCCL with them."""
    saved_by_hooks: int | None = None
    """The bytes of storages that autograd's saved_tensors_hooks have seen, without weights and inputs."""
    workspaces: int | None = None
    """The bytes that were freed with cuBLAS's workspaces."""
    context: int | None = None
    """The rise of the device's own count when the CUDA context was made."""
    gradients_in_step: int | None = None
    """The gradients that the optimizer gets, if others come and go in backward."""
    history: dict[str, Any] | None = None
    """The allocator's history of a step, by phase."""
    attention: tuple[str, ...] = ()
    """torch's names of the fused attention kernels that ran on a GPU."""


class Compared(NamedTuple):
    """One row. `predicted` and `measured` are bytes, or the number of a collective's calls."""

    name: str
    predicted: int
    measured: int

    @property
    def difference(self) -> int:
        return self.predicted - self.measured

    @property
    def error(self) -> float:
        """Return the prediction's error, relative to the measurement."""
        if self.measured:
            return self.difference / self.measured
        return 0.0 if not self.predicted else float("inf")


def rank_of(report: Report) -> int:
    """Return the reported rank of the job: the first of its pipeline stage, or one of those that share sequences."""
    s = report.setup
    return report.rank.number * (s.gpus // s.pp) + (report.rank.cp or 0) * s.tp


class Comparison(NamedTuple):
    """A prediction and a measurement of the same setup."""

    report: Report
    measured: Measured
    backend: str

    @property
    def memory(self) -> list[Compared]:
        """Return the rows of components, of each phase's peak and the highest, and on a GPU those of its tools."""
        m = self.measured
        sizes: dict[str, int | None] = {
            "parameters": m.parameters, "gradients": m.gradients, "gradients in step": m.gradients_in_step,
            "optimizer_states": m.optimizer_states,
            "saved_activations": m.saved_activations, "saved_activations by hooks": m.saved_by_hooks,
            "peak in forward": m.forward, "peak in backward": m.backward, "peak in step": m.step,
            "peak": max(m.forward, m.backward, m.step), "allocated": m.allocated, "reserved": m.reserved,
            WORKSPACES: m.workspaces, "context": m.context, "device": m.device,
        }  # fmt: skip
        predicted = predicted_memory(self.report, self.backend, m.environment, real_ranks=m.real_ranks)
        return [Compared(name, predicted[name], size) for name, size in sizes.items() if size is not None]

    @property
    def communication(self) -> list[Compared]:
        """Return the calls and payload of every collective, by the size of its group. A kind that only one side has is
        included."""
        if self.measured.calls is None:
            return []
        ours, theirs = predicted_communication(self.report), dict[str, int]()
        for (kind, ranks), (calls, payload) in self.measured.calls.items():
            if ranks > 1:
                theirs[f"{kind} over {ranks}: calls"], theirs[f"{kind} over {ranks}: payload"] = calls, payload
        return [Compared(name, ours.get(name, 0), theirs.get(name, 0)) for name in dict.fromkeys([*ours, *theirs])]

    @property
    def worst(self) -> Compared:
        """Return the memory row with the largest error, relative to the measurement."""
        return max(self.memory, key=lambda row: abs(row.error))

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON document, a case of a record."""
        setup = self.report.setup._asdict()
        rows = {"memory": self.memory, "communication": self.communication}
        return {
            "schema_version": 1,
            "model": {"name": self.report.model.name, "model_type": self.report.model.model_type},
            "setup": setup,
            "backend": self.backend,
            "environment": self.measured.environment,
            "real_ranks": self.measured.real_ranks,
            "seconds": self.measured.seconds,
            "attention": list(self.measured.attention),
            **{
                part: [{"name": r.name, "predicted": r.predicted, "measured": r.measured} for r in made]
                for part, made in rows.items()
            },
            "history": self.measured.history,
        }


def predicted_memory(
    report: Report, backend: str, environment: Mapping[str, str], *, real_ranks: bool
) -> dict[str, int]:
    """Return every row that a backend may measure, as the report predicts it. `environment` names the GPU."""
    assumed = sum(item.nbytes for item in report.overheads if item.name == WORKSPACES)
    besides = 0 if backend == "fake" else assumed
    if besides and report.gpu is None:  # a GPU that memcalc does not know
        besides = HANDLES * cublas_workspace(environment["compute_capability"])
    sizes = {name: report.total(name) for name in _COMPONENTS}
    batch, seq = report.setup.micro_batch_size, report.setup.tokens_per_part
    in_step = (row for row in report.rows_at("step") if row.component == "gradients")
    sizes["gradients in step"] = sum(row.bytes_at(batch, seq) for row in in_step)
    sizes["saved_activations by hooks"] = sizes["saved_activations"]
    sizes |= {f"peak in {phase}": size + besides for phase, size in report.phases.items()}
    sizes["peak"] = report.peak + besides
    other = besides - assumed if besides else 0
    if backend == "fake":
        return sizes
    sizes["saved_activations"] -= sum(
        row.bytes_at(batch, seq) for row in report.rows_at("forward") if row.name == GRADIENT_LEFT_BEHIND
    )  # what a GPU counts is the end of forward less its beginning
    of_device = {item.name: item.nbytes for item in report.overheads if item.component == "device"}
    nccl = sum(size for name, size in of_device.items() if name.startswith("NCCL"))
    outside = report.device - report.reserved - (0 if real_ranks else nccl)
    reserved = reserved_when_emptied(report, int(environment["memory"]) - outside) + other
    return sizes | {
        "allocated": report.allocated + other,
        "reserved": reserved,
        WORKSPACES: besides,
        "context": of_device[CONTEXT],
        "device": reserved + outside,
    }


def predicted_communication(report: Report) -> dict[str, int]:
    """Return the calls and payload of a step by the collective and its group's size."""
    out: Counter[str] = Counter()
    for c in report.collectives:
        if c.group_size > 1:  # torch calls them on one rank, too, and nothing is sent
            out[f"{c.collective} over {c.group_size}: calls"] += c.calls
            out[f"{c.collective} over {c.group_size}: payload"] += c.payload
    return dict(out)


_COMPONENTS: Final = ("parameters", "gradients", "optimizer_states", "saved_activations")
