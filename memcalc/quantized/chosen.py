"""The options that say how the weights of a base are quantised."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from memcalc.core.dtypes import bf16, fp16, fp32, uint8

if TYPE_CHECKING:
    from memcalc.core.dtypes import DType

_DTYPES = {"fp32": fp32, "bf16": bf16, "fp16": fp16, "uint8": uint8}


class Chosen(Protocol):
    """Options or a setup: both say how the base is quantised."""

    @property
    def precision(self) -> str: ...
    @property
    def base_dtype(self) -> str | None: ...
    @property
    def quantize(self) -> str: ...
    @property
    def double_quant(self) -> bool: ...
    @property
    def quantize_compute_dtype(self) -> str | None: ...
    @property
    def prepare_kbit_training(self) -> bool: ...
    @property
    def quantize_storage(self) -> str | None: ...


class Quantization(NamedTuple):
    """A way to quantise the base."""

    nested: bool
    """True for double quantization."""
    computes: DType
    original: DType
    """The dtype that the base was loaded in."""
    storage: DType
    """The dtype of the tensors that hold the codes."""


class EightBits(NamedTuple):
    """A base in 8 bits (`int8`)."""

    original: DType
    """The dtype that the base was loaded in."""
    weights: DType
    """The dtype of what is not quantised."""
    autocast: DType | None


def quantization_of(chosen: Chosen) -> Quantization | EightBits | None:
    """Return how options or a setup quantise the base; None if they do not. nf4 and fp4 differ only in the values of their
    codes."""
    if chosen.quantize == "none":
        return None
    if chosen.quantize == "int8":
        original = _DTYPES[base_dtype_name(chosen)]
        name, _, rest = chosen.precision.partition("-")
        autocast = _DTYPES[name] if rest == "autocast" else None
        return EightBits(original, fp32 if chosen.prepare_kbit_training else original, autocast)
    computes, original = _DTYPES[compute_dtype_name(chosen)], _DTYPES[base_dtype_name(chosen)]
    return Quantization(chosen.double_quant, computes, original, _DTYPES[chosen.quantize_storage or "uint8"])


def compute_dtype_name(chosen: Chosen) -> str:
    """Return the dtype that quantised weights are multiplied in: by default the precision's."""
    return chosen.quantize_compute_dtype or chosen.precision.split("-")[0]


def base_dtype_name(chosen: Chosen) -> str:
    """Return the dtype that the weights are loaded in: as given, or the precision's, which is fp32 under autocast."""
    name, _, rest = chosen.precision.partition("-")
    return chosen.base_dtype or {"fp8": "bf16"}.get(name, "fp32" if rest == "autocast" else name)
