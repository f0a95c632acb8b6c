"""Notes on a report of ranks that Colossal-AI's layers or DeepSpeed's AutoTP cut: what their user does, what is not theirs."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memcalc.estimation.report import Report


def grid_notes(report: Report) -> list[str]:
    """Return a sentence for each note on Colossal-AI's layers or AutoTP's; none with other parts."""
    if report.setup.autotp:
        return [
            "autotp: the layers are DeepSpeed's byte by byte; ZeRO's blocks over a rank's part are those of a slice of "
            "Megatron-DeepSpeed's model, not compared with a run; the check of the first batch is left out"
        ]
    if report.setup.engine != "colossalai":
        return []
    from memcalc.engines.colossalai.part import part_of

    out = [
        "colossalai: attention, activation and loss are those of titans' GPT; the optimizer's step is torch's over a rank's "
        "part, and the frame of the training loop holds the logits until backward is over"
    ]
    program = part_of(report.model, report.setup).program
    rows, tokens = program.vocab.size, program.a.vocab  # type: ignore[attr-defined]
    if rows != tokens:
        out.append(
            f"colossalai: a vocabulary of {tokens} is padded to {rows}, which ranks can share equally, as its user has to"
        )
    if (report.setup.tp_depth or 1) > 1:
        out.append(
            "2.5D: each of the squares has its own part of the sequences, and gradients are added up over them, as the "
            "Tesseract paper says; Colossal-AI's layers leave both to the training script"
        )
    return out
