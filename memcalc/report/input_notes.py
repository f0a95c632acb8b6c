"""Notes on the input: a GPU known only by its memory, sequences longer than the model was made for, and the model's own notes,
such as a replacement for something that was missing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcalc.units import show_bytes

if TYPE_CHECKING:
    from memcalc.estimation.report import Report


def input_notes(report: Report) -> list[str]:
    """Return a sentence for each note; usually none."""
    files = () if report.files is None else report.files.notes
    return [*files, *report.model.notes, *_of_length(report), *_of_gpu(report), *_of_flash(report)]


def _of_length(report: Report) -> list[str]:
    """Return a note if sequences are longer than the model was trained with. Rotary and relative positions go on beyond that
    length. For a table of positions, memcalc.setup.resolved refuses such lengths."""
    tokens = report.setup.seq_len
    most: int | None = None if tokens is None else report.model.program.max_seq_len
    if tokens is None or most is None or tokens <= most:
        return []
    return [
        f"--seq-len {tokens}: {report.model.name} was made for at most {most} tokens; the estimate holds, the model's quality "
        "may suffer"
    ]


def _of_gpu(report: Report) -> list[str]:
    gpu = report.gpu
    if gpu is None or gpu.compute_capability:
        return []
    return [
        f"--gpu {gpu.name}: assumes that a process can use all {show_bytes(gpu.capacity)}; a real card has a little more or "
        "less; times are not estimated, cuBLAS's workspaces are the largest of NVIDIA's, and attention runs as on Ampere and "
        "later (a V100 or T4 may need more)"
    ]


def _of_flash(report: Report) -> list[str]:
    """Return what to know of flash-attn: AMD's build, and windows, whose blocks it skips
    (flash-attn 2.8.3 csrc/flash_attn/src/flash_fwd_kernel.h, n_block_min)."""
    setup, gpu, model = report.setup, report.gpu, report.model
    if gpu is None or model is None or setup.attention != "flash":
        return []
    out: list[str] = []
    if gpu.vendor == "amd":
        out.append(
            "attention flash on an AMD GPU: counted by the source of NVIDIA's kernels; what the build for ROCm (Composable "
            "Kernel or Triton) keeps besides is not known"
        )
    windows = model.program.cache_windows()
    narrow = [width for width in windows.values() if setup.seq_len is not None and width < setup.seq_len]
    if narrow:
        out.append(
            f"time and FLOPs of attention are those of all earlier tokens in {len(narrow)} layers that see a window of "
            f"{min(narrow)}: flash-attn skips the blocks outside of it, so these layers are faster"
        )
    return out
