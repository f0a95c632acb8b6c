"""Qwen2-MoE (models/qwen2_moe/modeling_qwen2_moe.py): Qwen2 with experts in some layers and a gated shared expert."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final

from memcalc.core.dims import merge
from memcalc.families.base.config import Activation, Count, CountOrNone, Layers, Probability, check_divides
from memcalc.families.base.experts import REFUSED, check_experts
from memcalc.families.base.layer_types import LayerTypesConfig
from memcalc.families.base.masks import causal_mask
from memcalc.families.base.module import Run, Weight
from memcalc.families.base.plans import EXPERTS, LLAMA
from memcalc.families.base.router_outputs import RouterOutputsConfig
from memcalc.families.base.sparse import GatedSharedExpert
from memcalc.families.base.support import Family, Preset, Support
from memcalc.families.llama import linear_weights
from memcalc.families.qwen2 import Qwen2

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from memcalc.core.tensor import Tensor
    from memcalc.families.base.architecture import Architecture


@dataclass(frozen=True, kw_only=True)
class Qwen2MoeConfig(RouterOutputsConfig, LayerTypesConfig):
    """The fields and defaults of models/qwen2_moe/configuration_qwen2_moe.py."""

    null_head_dim: ClassVar[bool] = False
    refused: ClassVar[Mapping[str, Sequence[Any]]] = REFUSED

    vocab_size: Count = 151936
    hidden_size: Count = 2048
    intermediate_size: Count = 5632
    num_hidden_layers: Layers = 24
    num_attention_heads: Count = 16
    num_key_value_heads: Count = 16
    head_dim: Count | None = None
    hidden_act: Activation = "silu"
    max_position_embeddings: Count = 32768
    tie_word_embeddings: bool = False
    use_sliding_window: bool = False
    sliding_window: CountOrNone | None = 4096
    max_window_layers: int = 28
    attention_dropout: Probability = 0.0
    decoder_sparse_step: Count = 1
    moe_intermediate_size: Count = 1408
    shared_expert_intermediate_size: CountOrNone = 5632
    num_experts_per_tok: Count = 4
    num_experts: CountOrNone = 60
    norm_topk_prob: bool = False
    mlp_only_layers: list[int] | None = None
    qkv_bias: bool = True

    @property
    def kinds(self) -> list[str]:
        """Return the kind of attention of each layer."""
        if self.layer_types is not None:
            return list(self.layer_types)
        windows = min(self.max_window_layers, self.num_hidden_layers) if self.use_sliding_window else 0
        return [
            "sliding_attention" if i < windows and i % 2 == 0 else "full_attention"
            for i in range(self.num_hidden_layers)
        ]

    def check(self) -> None:
        super().check()
        check_divides(self, "num_attention_heads", "num_key_value_heads")
        check_experts(self, "num_experts", "hidden_size", "moe_intermediate_size")
        if self.use_sliding_window and not self.sliding_window:
            raise ValueError(f"use_sliding_window is true: it needs a sliding_window, not {self.sliding_window}")
        if "sliding_attention" in self.kinds and not self.use_sliding_window:
            raise ValueError("layer_types has sliding_attention: it needs use_sliding_window true")


class Qwen2Moe(GatedSharedExpert, Qwen2):
    """The program of Qwen2MoeForCausalLM."""

    Config = Qwen2MoeConfig

    def attention_weights(self) -> Iterator[Weight]:
        q, kv = merge(self.heads, self.head_dim), merge(self.kv_heads, self.head_dim)
        for name, out in (("q_proj", q), ("k_proj", kv), ("v_proj", kv)):
            yield from linear_weights(f"self_attn.{name}", self.hidden, out, "attention", bias=self.config.qkv_bias)
        yield from linear_weights("self_attn.o_proj", q, self.hidden, "attention", bias=False)

    def masks(self, run: Run) -> dict[str, Tensor | None]:
        """Return both masks. They are made even if no layer takes them. Without windows, the second one has window 0."""
        window = self.config.sliding_window if self.config.use_sliding_window else 0
        return {"full_attention": causal_mask(run), "sliding_attention": causal_mask(run, window)}


def _architecture(config: Any) -> Architecture:
    """Return the dims and options that Megatron's GPTModel is built from."""
    from memcalc.families.base.architecture import qwen_moe

    return qwen_moe(config, qkv_bias=config.qkv_bias)


FAMILY: Final = Family(
    "qwen2_moe",
    Qwen2Moe,
    Support(
        tensor_parallel={**LLAMA, **EXPERTS},
        context_parallel=True,
        ulysses=True,
        stages=True,
        zero3_leaf=True,
        auto_ep=Preset(shared=True, gated=True),
        architecture=_architecture,
        only_qkv_biases=True,
    ),
)
