"""Quantized checkpoints: training starts from 16-bit weights, whose shapes are those of the model without quantization."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, cast

from memcalc.errors import quoted

FIELDS: Final = ("quantization_config", "compression_config")
"""The fields that describe quantization in a config.json; compressed-tensors used the second name earlier
(quantizers/auto.py)."""

METHODS: Final = frozenset(
    {
        "aqlm", "auto-round", "awq", "bitsandbytes", "compressed-tensors", "eetq", "fbgemm_fp8", "fouroversix", "fp8",
        "fp_quant", "gemma", "gguf", "gptq", "higgs", "hqq", "metal", "mxfp4", "mxfp8", "nvfp4", "quanto", "quark",
        "sinq", "spqr", "torchao", "vptq",
    }
)  # fmt: skip
"""transformers' `QuantizationMethod` without bitnet. bitnet's layers quantize while they train, which is not
modelled."""
_OF_OTHER_TOOLS: Final = frozenset({"modelopt", "intel/auto-round"})
"""Methods written by NVIDIA's and Intel's tools. transformers skips them with a warning."""


def without_quantization(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], tuple[str, ...]]:
    """Return the fields of the 16-bit model, and a note if the configuration describes quantized weights.

    Raises ValueError for an unknown method, or one that trains differently.
    """
    methods = [method_of(field, config[field]) for field in FIELDS if config.get(field) is not None]
    if not methods:
        return config, ()
    note = f"quantization_config: the checkpoint has {methods[0]} weights; the estimate is for training from their "
    return {name: value for name, value in config.items() if name not in FIELDS}, (note + "16-bit base",)


def method_of(field: str, given: object) -> str:
    """Return the quantization method of the field's object. Raises ValueError if it has no known method."""
    if not isinstance(given, Mapping):
        raise ValueError(f"field `{field}` is {quoted(given)}; it should be an object or null")
    said = cast("Mapping[str, Any]", given)
    by_flag = "bitsandbytes" if said.get("load_in_4bit") or said.get("load_in_8bit") else None
    method = said.get("quant_method", by_flag)
    known = METHODS | _OF_OTHER_TOOLS
    if not isinstance(method, str) or method.lower() not in known:
        named = "has no `quant_method`" if method is None else f"has the quant_method {quoted(method)}"
        raise ValueError(f"field `{field}` {named}; allowed: null, or one of {', '.join(sorted(known))}")
    return method.lower()
