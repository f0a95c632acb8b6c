"""Qwen3-MoE (models/qwen3_moe/modeling_qwen3_moe.py): Qwen3 with experts in some layers, and one window in all layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final

from memcalc.core.dims import Dim, merge
from memcalc.core.ops.shape import reshape, view
from memcalc.families.base.config import (
    Activation,
    Count,
    CountOrNone,
    Layers,
    Probability,
    RotaryConfig,
    check_divides,
)
from memcalc.families.base.experts import REFUSED, Experts, SoftmaxRouter, check_experts
from memcalc.families.base.masks import causal_mask
from memcalc.families.base.module import Module, Run, Weight, module
from memcalc.families.base.plans import EXPERTS, LLAMA, NORMED_HEADS
from memcalc.families.base.router_outputs import RouterOutputsConfig
from memcalc.families.base.sparse import SparseLayers
from memcalc.families.base.support import Family, Preset, Support
from memcalc.families.qwen3 import Qwen3

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from memcalc.core.tensor import Tensor
    from memcalc.families.base.architecture import Architecture


@dataclass(frozen=True, kw_only=True)
class Qwen3MoeConfig(RouterOutputsConfig, RotaryConfig):
    """The fields and defaults of models/qwen3_moe/configuration_qwen3_moe.py."""

    null_head_dim: ClassVar[bool] = False
    attribute_map: ClassVar[Mapping[str, str]] = {"num_experts": "num_local_experts"}
    refused: ClassVar[Mapping[str, Sequence[Any]]] = REFUSED

    vocab_size: Count = 151936
    hidden_size: Count = 2048
    intermediate_size: Count = 6144
    num_hidden_layers: Layers = 24
    num_attention_heads: Count = 32
    num_key_value_heads: Count = 4
    head_dim: Count | None = None
    hidden_act: Activation = "silu"
    max_position_embeddings: Count = 32768
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    use_sliding_window: bool = False
    sliding_window: Count | None = 4096
    attention_dropout: Probability = 0.0
    decoder_sparse_step: Count = 1
    moe_intermediate_size: Count = 768
    num_experts_per_tok: Count = 8
    num_local_experts: CountOrNone = 128
    norm_topk_prob: bool = False
    mlp_only_layers: list[int] | None = None

    @property
    def window(self) -> int | None:
        return self.sliding_window if self.use_sliding_window else None

    @property
    def kinds(self) -> list[str]:
        """Return the kind of attention of each layer."""
        return ["full_attention"] * self.num_hidden_layers

    def check(self) -> None:
        super().check()
        check_divides(self, "num_attention_heads", "num_key_value_heads")
        check_experts(self, "num_local_experts", "hidden_size", "moe_intermediate_size")


class Qwen3Moe(SparseLayers, Qwen3):
    """The program of Qwen3MoeForCausalLM."""

    Config = Qwen3MoeConfig
    balances = True

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.routed = (config.num_experts_per_tok, config.num_local_experts)
        per_token, experts = Dim("experts_per_token", self.routed[0]), Dim("experts", self.routed[1])
        self.router = SoftmaxRouter(experts, per_token, self.hidden, normalised=config.norm_topk_prob)
        expert_ffn = Dim("expert_ffn", config.moe_intermediate_size)
        self.experts = Experts(experts, per_token, self.hidden, expert_ffn, config.hidden_act)

    def cache_windows(self) -> dict[int, int]:
        window: int | None = self.config.window
        return {} if window is None else dict.fromkeys(range(self.layers), window)

    def masks(self, run: Run) -> dict[str, Tensor | None]:
        return {"full_attention": causal_mask(run, self.config.window)}

    def sparse(self, i: int) -> bool:
        config = self.config
        dense = config.mlp_only_layers or ()
        return i not in dense and config.num_local_experts > 0 and (i + 1) % config.decoder_sparse_step == 0

    def sparse_weights(self) -> Iterator[Weight]:
        yield from self.experts.weights("mlp.experts")
        yield from self.router.weights("mlp.gate")

    @module
    def sparse_mlp(self, m: Module, x: Tensor) -> Tensor:
        """Return the output of Qwen3MoeSparseMoeBlock."""
        batch, seq, hidden = x.shape
        hidden_states_reshaped = view(x, merge(batch, seq), hidden)
        _logits, routing_weights, selected_experts = self.router.forward(m / "gate", hidden_states_reshaped)
        final_hidden_states = self.experts.forward(
            m / "experts", hidden_states_reshaped, selected_experts, routing_weights
        )
        return reshape(final_hidden_states, batch, seq, hidden)


def _architecture(config: Any) -> Architecture:
    """Return the dims and options that Megatron's GPTModel is built from."""
    from memcalc.families.base.architecture import qwen_moe

    return qwen_moe(config, qk_norm=True)


FAMILY: Final = Family(
    "qwen3_moe",
    Qwen3Moe,
    Support(
        tensor_parallel={**LLAMA, **NORMED_HEADS, **EXPERTS},
        context_parallel=True,
        ulysses=True,
        stages=True,
        zero3_leaf=True,
        auto_ep=Preset(),
        architecture=_architecture,
    ),
)
