"""Records of suites, read again: today's prediction beside every measured row, and the error that is stated for it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any, Final, NamedTuple

from memcalc.device.verdict import verdict_of
from memcalc.errors import InputError
from memcalc.estimation.estimate import estimate
from memcalc.estimation.report import Report
from memcalc.timing.step import StepTime
from memcalc.validate.comparison import Compared, predicted_communication, predicted_memory
from memcalc.validate.recording import name_of
from memcalc.validate.run import on_gpu
from memcalc.validate.suites import model_of, options_of

STATED: Final[Mapping[str, float]] = {
    "parameters": 0.0, "gradients": 0.0, "gradients in step": 0.0, "optimizer_states": 0.0,
    "saved_activations": 0.01, "saved_activations by hooks": 0.01,
    "peak in forward": 0.015, "peak in backward": 0.015, "peak in step": 0.015, "peak": 0.015, "allocated": 0.015,
    "reserved": 0.08, "device": 0.07,
}  # fmt: skip
"""The largest error of a row of a GPU, relative to the measurement.

Rows that are not listed have no stated error: the context differs by GPU and driver, and a workspace that cuBLASLt had of its
own up to torch 2.11 is cuBLAS's since. Rows of collectives are exact, on a GPU too, and so are all rows of torch's fake
tensors.

Which cached block a request takes decides about `reserved`, by logits or nothing: one block of another size, and the next step
reserves one more block of logits. Most recorded runs are within 0.1 %. What is not played of the others: the partial sums of
reductions over rows, up to 138 MB for a moment, and segments that the driver has put above an earlier one. ZeRO-2 over 8 GPUs
is 7 % too high, for a reason that is not known.
"""

_NOT_HELD: Final = (
    ("saved_activations by hooks", {"dora": True}),
    ("peak in step", {"engine": "deepspeed", "zero": 3, "lora_rank": 16}),
    ("reserved", {"model": "resnet-50"}),
    ("device", {"model": "resnet-50"}),
)
"""Rows that are not held to their stated error in cases with these options.

The first records measured something else: hooks also saw what DoRA computes for its norms and drops within forward, and at the
start of a step of ZeRO-3 the allocator still counted a gathered weight that another stream had used. Both are measured
differently now (memcalc/validate/reference.py, cuda.py). And cuDNN's convolutions take workspaces that it chooses itself:
copies of their operands in another layout, up to 160 MB for a moment.
"""


class Row(NamedTuple):
    """A measured row of a record with today's prediction."""

    case: str
    backend: str
    compared: Compared
    is_held: bool = True

    @property
    def stated(self) -> float | None:
        """Return the stated error; None if there is none."""
        if not self.is_held:
            return None
        return 0.0 if self.backend == "fake" or " over " in self.compared.name else STATED.get(self.compared.name)

    @property
    def drifted(self) -> bool:
        return self.stated is not None and abs(self.compared.error) > self.stated


def rows_of(made: Mapping[str, Any]) -> list[Row]:
    """Return the rows of one case of a record; none if it was not measured. Raises InputError if it can no longer be
    estimated."""
    if made["outcome"] != "measured":
        return []
    report = _report(made)
    sent = predicted_communication(report)
    predicted = _memory(report, made) | sent
    measured = {row["name"]: row["measured"] for part in ("memory", "communication") for row in made[part]}
    return [
        Row(
            name_of(made["case"]),
            made["backend"],
            Compared(name, predicted.get(name, 0), measured.get(name, 0)),
            _is_held(made["case"], name),
        )
        for name in dict.fromkeys([*measured, *sent])
    ]


def time_error_of(made: Mapping[str, Any]) -> float | None:
    """Return the error of the predicted time of a step, relative to the measured one. None with an engine, as one GPU of many
    waits for no other; without a measured time; and for a GPU whose speed is not known."""
    if made["outcome"] != "measured" or made["seconds"] is None or made["case"].get("engine", "none") != "none":
        return None
    time = _report(made).time
    return time.seconds / made["seconds"] - 1 if isinstance(time, StepTime) else None


def _is_held(case: Mapping[str, Any], row: str) -> bool:
    return not any(row == name and options.items() <= case.items() for name, options in _NOT_HELD)


def _report(made: Mapping[str, Any]) -> Report:
    model, options = model_of(made["case"]), options_of(made["case"])
    return (
        estimate(model, **options) if made["backend"] == "fake" else on_gpu(model, options, made["environment"]["gpu"])
    )


def _memory(report: Report, made: Mapping[str, Any]) -> dict[str, int]:
    return predicted_memory(report, made["backend"], made["environment"], real_ranks=made.get("real_ranks", False))


def drifted(cases: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return a line for every row with more than the stated error, and for every case that is refused now."""
    out: list[str] = []
    for made in cases:
        try:
            rows = rows_of(made)
        except InputError as error:
            out.append(f"{name_of(made['case'])}: {error}")
            continue
        out += [
            f"{row.case}: {row.compared.name} predicted {row.compared.predicted}, measured {row.compared.measured} "
            f"({row.compared.error:+.2%}, stated {row.stated:.2%})"
            for row in rows
            if row.drifted
        ]
    return out


class Errors(NamedTuple):
    """The relative errors of one kind of row over all cases."""

    cases: int
    median: float
    """The median of the absolute values."""
    worst: float
    where: str
    over: int
    under: int


def errors_of(rows: Sequence[Row]) -> dict[str, Errors]:
    """Return the errors by the row's name."""
    by_name: dict[str, list[Row]] = {}
    for row in rows:
        by_name.setdefault(row.compared.name, []).append(row)
    out: dict[str, Errors] = {}
    for name, same in by_name.items():
        worst = max(same, key=lambda row: abs(row.compared.error))
        errors = [row.compared.error for row in same]
        out[name] = Errors(
            len(same),
            median(map(abs, errors)),
            worst.compared.error,
            worst.case,
            sum(error > 0 for error in errors),
            sum(error < 0 for error in errors),
        )
    return out


class Verdicts(NamedTuple):
    """The cases by whether they were predicted to fit, and whether they did."""

    right: int
    wrongly_fits: list[str]
    """The cases predicted to fit that ran out of memory."""
    wrongly_does_not_fit: list[str]
    """The cases predicted not to fit that ran."""


def verdicts_of(cases: Iterable[Mapping[str, Any]]) -> Verdicts:
    """Return the verdicts on cases on a GPU that ran or were out of memory: whether the run fits in the memory that torch
    saw."""
    right, fits, does_not = 0, list[str](), list[str]()
    for made in cases:
        if made["backend"] != "cuda" or made["outcome"] not in ("measured", "out of memory"):
            continue
        ran = made["outcome"] == "measured"
        said = verdict_of([_report(made)], int(made["environment"]["memory"])).fits
        if ran == said:
            right += 1
        else:
            (fits if said else does_not).append(name_of(made["case"]))
    return Verdicts(right, fits, does_not)
