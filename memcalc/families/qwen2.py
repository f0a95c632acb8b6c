"""Qwen2 (models/qwen2/modeling_qwen2.py): Llama with biases on q, k and v, and sliding windows in some layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final

from memcalc.core.dims import merge
from memcalc.families.base.config import Activation, Count, Layers, Probability, check_divides
from memcalc.families.base.layer_types import LayerTypesConfig
from memcalc.families.base.masks import causal_mask
from memcalc.families.base.plans import LLAMA
from memcalc.families.base.support import Family, Support
from memcalc.families.llama import Llama, linear_weights

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator

    from memcalc.core.tensor import Tensor
    from memcalc.families.base.architecture import Architecture
    from memcalc.families.base.module import Run, Weight


@dataclass(frozen=True, kw_only=True)
class Qwen2Config(LayerTypesConfig):
    """The fields and defaults of models/qwen2/configuration_qwen2.py."""

    null_head_dim: ClassVar[bool] = False

    vocab_size: Count = 151936
    pad_token_id: int | None = None
    hidden_size: Count = 4096
    intermediate_size: Count = 22016
    num_hidden_layers: Layers = 32
    num_attention_heads: Count = 32
    num_key_value_heads: Count | None = 32
    head_dim: Count | None = None
    hidden_act: Activation = "silu"
    max_position_embeddings: Count = 32768
    use_sliding_window: bool = False
    sliding_window: Count | None = 4096
    max_window_layers: int = 28
    attention_dropout: Probability = 0.0
    tie_word_embeddings: bool = False

    @property
    def window(self) -> int | None:
        return self.sliding_window if self.use_sliding_window else None

    @property
    def kinds(self) -> list[str]:
        """Return the kind of attention of each layer."""
        if self.layer_types is not None:
            return list(self.layer_types)
        sliding_from = self.num_hidden_layers if self.window is None else self.max_window_layers
        return ["sliding_attention" if i >= sliding_from else "full_attention" for i in range(self.num_hidden_layers)]

    def check(self) -> None:
        super().check()
        check_divides(self, "num_attention_heads", "num_key_value_heads")
        if "sliding_attention" in self.kinds and self.window is None:
            raise ValueError("layer_types has sliding_attention: it needs use_sliding_window true and a sliding_window")


class Qwen2(Llama):
    """The program of Qwen2ForCausalLM."""

    Config = Qwen2Config

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.kinds: list[str] = config.kinds

    def attention_weights(self) -> Iterator[Weight]:
        q, kv = merge(self.heads, self.head_dim), merge(self.kv_heads, self.head_dim)
        for name, out in (("q_proj", q), ("k_proj", kv), ("v_proj", kv)):
            yield from linear_weights(f"self_attn.{name}", self.hidden, out, "attention", bias=True)
        yield from linear_weights("self_attn.o_proj", q, self.hidden, "attention", bias=False)

    def variant(self, i: int) -> Hashable:
        return self.kinds[i]

    def layer_kind(self, i: int) -> str:
        return self.kinds[i]

    def masks(self, run: Run) -> dict[str, Tensor | None]:
        masks = {"full_attention": causal_mask(run)}
        if "sliding_attention" in self.kinds:
            masks["sliding_attention"] = causal_mask(run, self.config.window)
        return masks


def _architecture(config: Any) -> Architecture:
    """Return the dims and options that Megatron's GPTModel is built from."""
    from memcalc.families.base.architecture import llama_like

    return llama_like(config, qkv_bias=True)


FAMILY: Final = Family(
    "qwen2",
    Qwen2,
    Support(
        tensor_parallel=LLAMA,
        sequence_parallel=True,
        context_parallel=True,
        ulysses=True,
        stages=True,
        chunked_loss=True,
        liger="llama",
        megatron_kernels=True,
        architecture=_architecture,
        only_qkv_biases=True,
    ),
)
