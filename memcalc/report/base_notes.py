"""Notes on a frozen base: what of it is not quantised, what its adapters make whole copies of, and ranks above its widths."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcalc.quantized.targets import OWN_CLASS
from memcalc.tuning.lora import LoraAdapters

if TYPE_CHECKING:
    from memcalc.estimation.report import Report


def base_notes(report: Report) -> list[str]:
    """Return the notes of a setup with adapters."""
    return [*_not_quantised(report), *_merged(report), *_too_wide(report)]


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
    if not isinstance(adapters, LoraAdapters) or not adapters.of_experts:
        return []
    keeps = "keeps a copy of its experts with their adapters added until its backward"
    if report.setup.recompute == "none":
        return [f"adapters of experts: each layer {keeps} (--recompute full keeps that of one layer)"]
    return [f"adapters of experts: a recomputed layer {keeps}, one at a time"]


def _too_wide(report: Report) -> list[str]:
    """Return a note on a rank above what the adapted layers have: peft takes it."""
    adapters, rank = report.model.program.adapters, report.setup.lora_rank
    if not isinstance(adapters, LoraAdapters):
        return []
    calls = (((path, _), (call.fan_in, call.fan_out)) for (path, _), call in adapters.calls.items())
    parameters = ((place, one.shape[-2:]) for place, own in adapters.parameters.items() for one in own)
    widths = {min(dim.size for dim in shape): path.rpartition(".")[2] for (path, _), shape in (*calls, *parameters)}
    if not widths or rank <= min(widths):
        return []
    least = min(widths)
    return [
        f"adapters: rank {rank} is more than the {least} of {widths[least]}, whose weight has no higher rank: peft takes it, "
        f"but a rank of {least} there can learn as much"
    ]
