"""Notes on what a trainer of fine-tuning adds to a step: packed rows, padding, activations on the host."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memcalc.estimation.report import Report


def trainer_notes(report: Report) -> list[str]:
    """Return a sentence for each note; none without these options."""
    return [*_of_packing(report), *_of_padding(report), *_of_activations(report)]


def _of_padding(report: Report) -> list[str]:
    if not (report.setup.padded and report.setup.has_flash_attn):
        return []
    return [
        "padded: flash-attn drops padding in each layer; attention is counted for --seq-len tokens of each sequence, the most "
        "that it can have"
    ]


def _of_packing(report: Report) -> list[str]:
    setup = report.setup
    if not setup.packing:
        return []
    of_rows = (
        "packing: each row is counted as one sequence of --seq-len tokens; more and shorter ones take 8 bytes of cu_seq_lens "
        "and 128 rows of the backward's sums each, and have fewer scores"
    )
    if setup.lengths is not None:
        from memcalc.tasks.fine_tuned import packing_of

        how = packing_of(setup)
        return [
            f"packing: rows are counted as full, with {how.of_each} sequences each (rounded up); a token is in a sequence of "
            f"{how.attended} tokens in the mean, which its scores are counted for"
        ]
    if setup.attention == "flash":
        return [of_rows]
    return [
        "packing: with sdpa the rows of a micro-batch are one sequence, and the mask is a square of all its tokens; flash-attn "
        "(--attention flash) has none"
    ]


def _of_activations(report: Report) -> list[str]:
    if report.setup.offload_modules is not None:
        return [
            "activations on the host: a copy to the host is taken to be over when the next kernel allocates; while it is under "
            "way, Megatron's tensor is on the GPU besides"
        ]
    if report.setup.offload_activations == "none":
        return []
    return [
        "activations on the host: a tensor that is saved again while its copy is under way stays on the GPU besides, as in "
        "TRL's class; what comes back is allocated on another stream, whose blocks the first stream's tensors do not share "
        "(not in reserved)"
    ]
