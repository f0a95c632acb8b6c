"""What a reader should know of the input: a GPU of which only the memory is known, tokens beyond what a model was made for, and
what was taken in the place of something that was not there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcalc.units import show_bytes

if TYPE_CHECKING:
    from memcalc.estimation.report import Report


def input_notes(report: Report) -> list[str]:
    """A sentence each; mostly none."""
    return [*report.model.notes, *_of_length(report), *_of_gpu(report)]


def _of_length(report: Report) -> list[str]:
    """Rotary and relative positions go on beyond the length that a model was trained with. A table of positions does not: it
    refuses them (memcalc.setup.setup)."""
    tokens = report.setup.seq_len
    most: int | None = None if tokens is None else report.model.program.max_seq_len
    if tokens is None or most is None or tokens <= most:
        return []
    return [
        f"--seq-len {tokens}: {report.model.name} is made for {most} tokens at most; the numbers go on, its quality may not"
    ]


def _of_gpu(report: Report) -> list[str]:
    gpu = report.gpu
    if gpu is None or gpu.compute_capability:
        return []
    return [
        f"--gpu {gpu.name}: {show_bytes(gpu.capacity)}, taken as what a process can use of it (often less than what a card is "
        "sold with); compute capability, links and FLOP/s are not known: no times, cuBLAS's largest workspaces, "
        "attention as on Ampere and later (a V100 or T4 may need more)"
    ]
