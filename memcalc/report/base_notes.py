"""Notes on a frozen base: what of it is not quantised, and what its adapters make whole copies of."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcalc.quantized.targets import OWN_CLASS
from memcalc.tuning.lora import LoraAdapters

if TYPE_CHECKING:
    from memcalc.estimation.report import Report


def base_notes(report: Report) -> list[str]:
    """Return the notes of a setup with adapters."""
    return [*_not_quantised(report), *_merged(report)]


def _not_quantised(report: Report) -> list[str]:
    setup, model = report.setup, report.model
    if setup.quantize == "none":
        return []
    own = OWN_CLASS.get(model.model_type)
    if own is not None:
        why = "transformers quantises modules of the class nn.Linear alone, and those of this model are"
        return [f"{setup.quantize}: {why} {own}: all weights stay in 16 bits"]
    if any(weight.component == "experts" and weight.packing is None for weight in model.weight_classes):
        return [
            f"{setup.quantize}: bitsandbytes quantises linear layers alone; experts that are one parameter stay as they are"
        ]
    return []


def _merged(report: Report) -> list[str]:
    adapters = report.model.program.adapters
    if not isinstance(adapters, LoraAdapters) or not adapters.parameters:
        return []
    keeps = "keeps a copy of its experts with their adapters added until its backward"
    if report.setup.recompute == "none":
        return [f"adapters of experts: each layer {keeps} (--recompute full keeps that of one layer)"]
    return [f"adapters of experts: a recomputed layer {keeps}, one at a time"]
