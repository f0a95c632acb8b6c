"""Notes on quantised bases whose codes an engine shards."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcalc.core.dims import numel
from memcalc.units import show_bytes

if TYPE_CHECKING:
    from memcalc.estimation.report import Report


def shards_notes(report: Report) -> list[str]:
    """Return notes on the scales, which are whole on every rank, and on codes that are."""
    s = report.setup
    if s.engine == "deepspeed" and s.zero == 3:
        return _of_zero_3(report)
    if s.engine != "fsdp2":
        return []
    if s.quantize_storage == "uint8":
        return [
            f"{s.quantize}: codes in uint8 are whole on every GPU: accelerate leaves them out of FSDP's units; with "
            f"--quantize-storage {s.compute_dtype.name} (bnb_4bit_quant_storage) they are sharded"
        ]
    return [
        f"{s.quantize}: codes are sharded as {s.quantize_storage} (bnb_4bit_quant_storage), which has to be set where the model "
        f"is loaded; their scales ({show_bytes(_scales(report))}) are whole on every GPU"
    ]


def _of_zero_3(report: Report) -> list[str]:
    from memcalc.engines.deepspeed.zero3_codes import KEPT

    s = report.setup
    before = show_bytes(sum(row.nbytes for row in report.rows_at("forward") if row.name.startswith(KEPT)))
    return [
        f"{s.quantize}: codes are partitioned as {s.quantize_storage} (bnb_4bit_quant_storage); their scales "
        f"({show_bytes(_scales(report))}) are whole on every GPU",
        f"{s.quantize}: the graph keeps the codes that ZeRO-3 has gathered as long as the loss is alive, {before} of the step "
        "before too; a loop that drops the loss before the next forward, as transformers' Trainer does, keeps them once, "
        "and checkpoints that re-enter (TRL's, with ZeRO-3) keep none",
    ]


def _scales(report: Report) -> int:
    """Return the bytes of what holds quantised weights beside their codes."""
    model = report.model
    return sum(
        one.dtype.itemsize * numel(one.shape)[0] * model.copies(w)
        for w in model.weight_classes
        if w.packing is not None
        for one in w.packing.stored(w.shape)[1:]
    )
