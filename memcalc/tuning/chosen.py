"""The options that say what trains, with their defaults filled in."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from memcalc.quantized.chosen import Chosen as ChosenBase
from memcalc.quantized.chosen import EightBits, Quantization, quantization_of


class Chosen(ChosenBase, Protocol):
    """Options or a setup: both say what trains."""

    @property
    def engine(self) -> str | None: ...
    @property
    def freeze(self) -> str | None: ...
    @property
    def lora_rank(self) -> int: ...
    @property
    def lora_targets(self) -> str | None: ...
    @property
    def lora_dropout(self) -> float | None: ...
    @property
    def lora_bias(self) -> str | None: ...
    @property
    def adapter_dtype(self) -> str | None: ...
    @property
    def dora(self) -> bool: ...
    @property
    def modules_to_save(self) -> str | None: ...


class Lora(NamedTuple):
    """The options of an adapter."""

    rank: int
    targets: str
    dropout: float
    bias: str
    """The biases that train: none, all, lora_only."""
    dtype: str
    """The dtype of the adapters over a 16-bit base; fp32 is peft's own (`autocast_adapter_dtype`), "base" Megatron-Bridge's."""
    saved: str | None
    """The modules that train in whole (`modules_to_save`), as given."""
    dora: bool
    """True for adapters with a magnitude of their own (`memcalc.tuning.dora`)."""


class Tuning(NamedTuple):
    """The options that say which weights train."""

    freeze: str | None
    lora: Lora | None
    quantization: Quantization | EightBits | None = None
    megatron: bool = False
    """True if the weights are those of Megatron's GPTModel."""


def tuning_of(chosen: Chosen) -> Tuning:
    """Return what trains by options or by a setup, defaults filled in."""
    megatron = chosen.engine == "megatron"
    if not chosen.lora_rank:
        return Tuning(chosen.freeze, None, megatron=megatron and chosen.freeze is not None)
    how = chosen.lora_targets or "default", chosen.lora_dropout or 0.0, chosen.lora_bias or "none"
    kind = chosen.adapter_dtype or ("base" if megatron else "fp32"), chosen.modules_to_save, chosen.dora
    return Tuning(chosen.freeze, Lora(chosen.lora_rank, *how, *kind), quantization_of(chosen), megatron)
