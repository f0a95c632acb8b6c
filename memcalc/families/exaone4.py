"""EXAONE 4 (models/exaone4/modeling_exaone4.py): norms after attention and MLP and over each head of q and k; where
there are windows, layers without one do not rotate q and k."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final

from memcalc.families.base.config import Activation, Count, DecoderConfig, Layers, LayerType
from memcalc.families.base.layer_types import WindowedConfig
from memcalc.families.base.plans import LLAMA, NORMED_HEADS
from memcalc.families.base.support import Family, Support
from memcalc.families.base.variations import HeadNorm, PostNorm, Windowed

if TYPE_CHECKING:
    from collections.abc import Hashable

    from memcalc.core.tensor import Tensor
    from memcalc.families.base.blocks import QKV, Rotary
    from memcalc.families.base.module import Module


@dataclass(frozen=True, kw_only=True)
class Exaone4Config(WindowedConfig, DecoderConfig):
    """The fields and defaults of models/exaone4/configuration_exaone4.py."""

    null_head_dim: ClassVar[bool] = False
    masks_both: ClassVar[bool] = False

    vocab_size: Count = 102400
    hidden_size: Count = 4096
    intermediate_size: Count = 16384
    num_hidden_layers: Layers = 32
    num_attention_heads: Count = 32
    num_key_value_heads: Count = 32
    hidden_act: Activation = "silu"
    max_position_embeddings: Count = 2048
    sliding_window_pattern: int | str | None = 4

    def default_kind(self, i: int) -> LayerType:
        assert isinstance(self.sliding_window_pattern, int)
        return "sliding_attention" if (i + 1) % self.sliding_window_pattern else "full_attention"

    def check(self) -> None:
        pattern = self.sliding_window_pattern
        if self.layer_types is None and self.sliding_window is None:
            raise ValueError("sliding_window is None, which needs layer_types; allowed: either of the two")
        if self.layer_types is None and (not isinstance(pattern, int) or pattern < 1):
            raise ValueError(f"sliding_window_pattern {pattern!r} needs layer_types; allowed without: a number above 0")
        super().check()


class Exaone4(Windowed, HeadNorm, PostNorm):
    """The program of Exaone4ForCausalLM."""

    Config = Exaone4Config

    def rotates(self, i: int) -> bool:
        return self.config.sliding_window is None or self.kinds[i] == "sliding_attention"

    def variant(self, i: int) -> Hashable:
        return self.kinds[i], self.rotates(i)

    def rotated_qkv(self, m: Module, hidden_states: Tensor, rotary: Rotary) -> QKV:
        assert m.layer is not None
        return super().rotated_qkv(m, hidden_states, rotary) if self.rotates(m.layer) else self.qkv(m, hidden_states)


FAMILY: Final = Family("exaone4", Exaone4, Support(tensor_parallel={**LLAMA, **NORMED_HEADS}, ulysses=True))
