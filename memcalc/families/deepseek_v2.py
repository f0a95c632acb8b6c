"""DeepSeek-V2 (models/deepseek_v2/modeling_deepseek_v2.py): the attention of V3, rotated as complex numbers; probabilities
of a softmax choose the experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal

from memcalc.core.dims import Dim, merge
from memcalc.core.dtypes import fp32
from memcalc.core.ops.elementwise import cast, softmax
from memcalc.core.ops.matmul import linear
from memcalc.core.ops.routing import maximum, topk
from memcalc.core.ops.shape import unsqueeze, view
from memcalc.families.base.complex_rotary import as_pairs, complex_rotary_embedding, turned
from memcalc.families.base.config import Activation, Count, CountOrNone, DecimalProbability, Layers, check_divides
from memcalc.families.base.experts import (
    REFUSED,
    Groups,
    check_experts,
    check_given,
    check_groups,
    without_other_groups,
)
from memcalc.families.base.module import Buffer, Module, Weight, module
from memcalc.families.base.plans import SHARED_EXPERTS, SPLIT_LATENT
from memcalc.families.base.sparse import gated_mlp_weights
from memcalc.families.base.support import Family, Preset, Support
from memcalc.families.deepseek_v3 import DeepseekV3, LatentConfig

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from memcalc.core.tensor import Tensor
    from memcalc.families.base.architecture import Architecture


@dataclass(frozen=True, kw_only=True)
class DeepseekV2Config(LatentConfig):
    """The fields and defaults of models/deepseek_v2/configuration_deepseek_v2.py."""

    attribute_map: ClassVar[Mapping[str, str]] = {"num_experts": "n_routed_experts"}
    refused: ClassVar[Mapping[str, Sequence[Any]]] = REFUSED

    vocab_size: Count = 102400
    hidden_size: Count = 4096
    intermediate_size: Count = 11008
    num_hidden_layers: Layers = 32
    num_attention_heads: Count = 32
    hidden_act: Activation = "silu"
    max_position_embeddings: Count = 2048
    tie_word_embeddings: bool = False
    attention_dropout: DecimalProbability = 0.0
    mlp_bias: bool = False
    first_k_dense_replace: int = 0
    n_group: Count | None = None
    topk_group: Count | None = None
    topk_method: Literal["greedy", "group_limited_greedy"] = "greedy"
    n_routed_experts: Count = 64
    n_shared_experts: CountOrNone = 2
    num_experts_per_tok: Count | None = None
    moe_intermediate_size: Count = 1407

    def check_step(self) -> None:
        super().check_step()
        check_given(self, "num_experts_per_tok")
        check_experts(self, "n_routed_experts", "hidden_size", "moe_intermediate_size")

    def check(self) -> None:
        super().check()
        check_divides(self, "hidden_size", "num_attention_heads")
        check_experts(self, "n_routed_experts")
        if self.topk_method == "group_limited_greedy":
            if self.n_group is None or self.topk_group is None:
                raise ValueError("topk_method 'group_limited_greedy' needs n_group and topk_group")
            check_groups(self, "n_routed_experts", 1)


@dataclass(frozen=True)
class GreedyRouter:
    """DeepseekV2TopkRouter with `topk_method` greedy."""

    count: Dim
    per_token: Dim
    hidden: Dim

    def weights(self, path: str) -> Iterator[Weight]:
        yield Weight(f"{path}.weight", (self.count, self.hidden), "router")

    def buffers(self, path: str) -> Iterator[Buffer]:
        yield from ()

    @module
    def forward(self, m: Module, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the router's logits, the weights of the chosen experts, and their indices."""
        hidden_states = view(hidden_states, merge(*hidden_states.shape[:-1]), self.hidden)
        router_logits = linear(cast(hidden_states, fp32), cast(m.weight(), fp32))
        scores = softmax(router_logits)
        scores, _of_groups = self.limited(scores)
        topk_weights, topk_indices = topk(scores, self.per_token)
        topk_weights = topk_weights * 1.0
        m.run.collect(m.layer, router_logits)
        return router_logits, topk_weights, topk_indices

    def limited(self, scores: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the scores of the best groups, and the tensors of the choice that the frame keeps alive."""
        return scores, ()


@dataclass(frozen=True)
class GroupLimitedRouter(GreedyRouter):
    """DeepseekV2TopkRouter with `topk_method` group_limited_greedy."""

    groups: Groups

    def limited(self, scores: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        group_scores = maximum(self.groups.apart(scores))
        chosen = self.groups.choose(group_scores)
        return without_other_groups(scores, chosen[2]), (group_scores, *chosen)


class DeepseekV2(DeepseekV3):
    """The program of DeepseekV2ForCausalLM."""

    Config = DeepseekV2Config

    def make_router(self, experts: Dim, per_token: Dim) -> Any:
        if self.config.topk_method == "greedy":
            return GreedyRouter(experts, per_token, self.hidden)
        groups = Dim("groups", self.config.n_group), Dim("groups_per_token", self.config.topk_group)
        return GroupLimitedRouter(experts, per_token, self.hidden, Groups(experts, *groups))

    def mlp_weights(self) -> Iterator[Weight]:
        yield from gated_mlp_weights("mlp", self.hidden, self.ffn, bias=self.config.mlp_bias)

    def sparse_weights(self) -> Iterator[Weight]:
        yield from self.experts.weights("mlp.experts")
        yield from self.router.weights("mlp.gate")
        bias = self.config.mlp_bias
        yield from gated_mlp_weights("mlp.shared_experts", self.hidden, self.shared_ffn, bias=bias)

    def position_embeddings(self, m: Module, positions: Tensor) -> Tensor:
        return complex_rotary_embedding(m, positions, self.rope_type)

    def rotate_parts(self, q_rot: Tensor, k_rot: Tensor, rotary: Any) -> tuple[Tensor, Tensor]:
        """Return the outputs of apply_rotary_emb."""
        q_pairs, k_pairs = as_pairs(q_rot), as_pairs(k_rot)
        freqs_cis = unsqueeze(rotary, 1)
        q_out = cast(turned(q_pairs, freqs_cis, q_rot), q_rot.dtype)
        k_out = cast(turned(k_pairs, freqs_cis, k_rot), k_rot.dtype)
        return q_out, k_out


def _architecture(config: Any) -> Architecture:
    """Return the dims and options that Megatron's GPTModel is built from."""
    from memcalc.families.base.architecture import deepseek

    return deepseek(config, sigmoid=False)


FAMILY: Final = Family(
    "deepseek_v2",
    DeepseekV2,
    Support(
        tensor_parallel={**SPLIT_LATENT, "model.layers.*.self_attn.q_proj": "colwise", **SHARED_EXPERTS},
        context_parallel=True,
        stages=True,
        auto_ep=Preset(normalises=False, shared=True),
        architecture=_architecture,
    ),
)
