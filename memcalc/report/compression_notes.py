"""Notes on communication that is compressed: which step of a run the numbers are of, and what they leave out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from memcalc.engines.base.holdings import trained_dtype
from memcalc.units import show_bytes

if TYPE_CHECKING:
    from memcalc.estimation.report import Report


_ONE_BIT: Final[Mapping[str, tuple[str, str]]] = {
    "onebit-adam": ("freeze_step", "gradients are all-reduced whole"),
    "onebit-lamb": ("freeze_step", "gradients are all-reduced whole"),
    "zero-one-adam": ("var_freeze_step", "the second moment is updated from gradients that are all-reduced whole"),
}
"""DeepSpeed's 1-bit optimizers: the key with the steps of the warm-up, and its steps in words."""


def compression_notes(report: Report) -> list[str]:
    """Return the notes on a DDP hook, or on one of DeepSpeed's own optimizers."""
    hook = report.setup.comm_hook
    if hook is None:
        return _of_one_bit(report)
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


def _of_one_bit(report: Report) -> list[str]:
    name, phase = report.setup.optimizer, report.setup.compression_phase
    if name not in _ONE_BIT:
        return []
    key, words = _ONE_BIT[name]
    out = [
        f"{name}: DeepSpeed 0.19.6 is the last release that has it, and the numbers are of its engine; 0.19.8 refuses the "
        "optimizer's type"
    ]
    if phase == "warmup":
        out.append(f"{name}: the step is one of the warm-up ({key}, 100,000 steps by default), in which {words}")
    else:
        out.append(
            f"{name}: the step is one after the warm-up ({key}, 100,000 steps by default), in which {words} "
            "(--compression-phase warmup); cupy's arrays of packed signs are counted, though they are in a pool of its own"
        )
    if name == "zero-one-adam":
        out.append(
            "zero-one-adam: the steps between two updates of the second moment send compressed gradients; 32,678 steps after "
            "the last update (local_step_scaler) only every second step sends anything, later fewer; neither is the step shown"
        )
    return out


def _of_time(report: Report, sentence: str) -> list[str]:
    return [sentence] if report.setup.gpu is not None else []
