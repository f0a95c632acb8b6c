"""Notes on communication that is compressed: which step of a run the numbers are of, and what they leave out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcalc.engines.base.holdings import trained_dtype
from memcalc.units import show_bytes

if TYPE_CHECKING:
    from memcalc.estimation.report import Report


def compression_notes(report: Report) -> list[str]:
    """Return the notes on a DDP hook."""
    hook = report.setup.comm_hook
    if hook is None:
        return []
    if hook in ("fp16", "bf16"):
        return _of_casts(report, hook)
    if report.setup.compression_phase == "warmup":
        return [
            f"{hook}: the step is one of the warm-up (start_powerSGD_iter, 1,000 steps by default): buckets are all-reduced "
            "whole, and nothing of PowerSGD's exists yet"
        ]
    out = [
        f"{hook}: the step is one after the warm-up (start_powerSGD_iter, 1,000 steps by default), which sends and holds what "
        "plain DDP does (--compression-phase warmup)"
    ]
    if hook == "batched-powersgd":
        out.insert(
            0,
            "batched-powersgd: torch 2.13.0's hook stops with an AssertionError at its first compressed step: _orthogonalize "
            "takes a batch of matrices and is given one; the numbers are those of the hook without that assertion",
        )
    return [*out, *_of_time(report, f"{hook}: the time has no kernels that compress, and nothing hides what is sent")]


def _of_casts(report: Report, hook: str) -> list[str]:
    whole = sum(c.payload for c in report.collectives if c.name.startswith("gradient buckets"))
    if report.setup.dp == 1 or trained_dtype(report.model, report.setup).name == hook:
        return []
    waiting = (
        f"{hook}: one bucket's copy exists at a time, as if each were sent before the next one is ready; on a slow network "
        f"several wait, {show_bytes(whole)} if all of them do"
    )
    return [waiting, *_of_time(report, f"{hook}: the time has no kernels that cast")]


def _of_time(report: Report, sentence: str) -> list[str]:
    return [sentence] if report.setup.gpu is not None else []
