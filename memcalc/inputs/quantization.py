"""Quantized checkpoints: training starts from 16-bit weights, whose shapes are those of the model without quantization."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, cast

from memcalc.errors import quoted

FIELDS: Final = ("quantization_config", "compression_config")
"""The field of a config.json, and the name that it had for compressed-tensors (quantizers/auto.py)."""

METHODS: Final = frozenset(
    {
        "aqlm", "auto-round", "awq", "bitsandbytes", "compressed-tensors", "eetq", "fbgemm_fp8", "fouroversix", "fp8",
        "fp_quant", "gemma", "gguf", "gptq", "higgs", "hqq", "metal", "mxfp4", "mxfp8", "nvfp4", "quanto", "quark",
        "sinq", "spqr", "torchao", "vptq",
    }
)  # fmt: skip
"""transformers' `QuantizationMethod`, but for bitnet: its layers quantize while they train, which is not modelled."""
_OF_OTHER_TOOLS: Final = frozenset({"modelopt", "intel/auto-round"})
"""NVIDIA's and Intel's tools write these, and transformers skips them with a warning."""


def without_quantization(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], tuple[str, ...]]:
    """The fields of the 16-bit model, and a note where the configuration is of quantized weights.

    ValueError names a method that is not known, or one whose training is another."""
    methods = [method_of(field, config[field]) for field in FIELDS if config.get(field) is not None]
    if not methods:
        return config, ()
    note = f"quantization_config: the checkpoint is of {methods[0]} weights; the estimate is of training that starts from their "
    return {name: value for name, value in config.items() if name not in FIELDS}, (note + "16-bit base",)


def method_of(field: str, given: object) -> str:
    """The quantization method of the field's object. ValueError where it has none that is known."""
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
