"""transformers' own modules after a quantiser has replaced them, on the meta device."""

from __future__ import annotations

from typing import Any

import torch
from meta_models import model_of

Tensors = dict[str, tuple[tuple[int, ...], torch.dtype]]


def _kept(model: Any, left_out: list[str] | None) -> list[str]:
    from transformers.quantizers.base import HfQuantizer

    return HfQuantizer.get_modules_to_not_convert(model, left_out, model._keep_in_fp32_modules)


def fp8_tensors(fields: dict[str, Any], **given: Any) -> Tensors:
    """Every parameter of a model in FineGrainedFP8."""
    from transformers import FineGrainedFP8Config
    from transformers.integrations.finegrained_fp8 import replace_with_fp8_linear

    model, config = model_of(fields), FineGrainedFP8Config(**given)
    with torch.device("meta"):
        model = replace_with_fp8_linear(model, _kept(model, config.modules_to_not_convert), config, pre_quantized=True)
    return {name: (tuple(weight.shape), weight.dtype) for name, weight in model.named_parameters()}


def quantised_modules(fields: dict[str, Any], left_out: list[str] | None = None) -> set[str]:
    """The names of the layers that bitsandbytes' int8 quantises."""
    from transformers import BitsAndBytesConfig
    from transformers.integrations.bitsandbytes import replace_with_bnb_linear

    model = model_of(fields)
    config = BitsAndBytesConfig(load_in_8bit=True)
    with torch.device("meta"):
        model = replace_with_bnb_linear(model, _kept(model, left_out), config)
    return {name for name, module in model.named_modules() if type(module).__name__ == "Linear8bitLt"}


def int8_tensors(out: int, fan_in: int) -> Tensors:
    """The tensors of a real weight that bitsandbytes has quantised."""
    import bitsandbytes as bnb

    codes, scales, _ = bnb.functional.int8_vectorwise_quant(torch.randn(out, fan_in, dtype=torch.float16))
    return {"": (tuple(codes.shape), codes.dtype), "SCB": (tuple(scales.shape), scales.dtype)}
