"""Mixtral (models/mixtral/modeling_mixtral.py): Mistral with experts, run as grouped products (integrations/moe.py).

The bytes on one rank are the same however unevenly tokens are spread over its experts (`--expert-imbalance`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from memcalc.dims import Dim, merge
from memcalc.dtypes import fp32, int32
from memcalc.families.blocks import act
from memcalc.families.config import Activation, Count, Layers, Probability, RotaryConfig, check_divides
from memcalc.families.mistral import Mistral
from memcalc.families.module import Module, Weight, module
from memcalc.ops.elementwise import cast, like, softmax, sum_last
from memcalc.ops.matmul import linear
from memcalc.ops.routing import div_, grouped_mm, index, sort, sum_middle, topk
from memcalc.ops.shape import chunk, reshape, transpose, unsqueeze, view
from memcalc.tensor import Tensor, new_tensor

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence


@dataclass(frozen=True, kw_only=True)
class MixtralConfig(RotaryConfig):
    """models/mixtral/configuration_mixtral.py"""

    attribute_map: ClassVar[Mapping[str, str]] = {"num_experts": "num_local_experts"}
    refused: ClassVar[Mapping[str, Sequence[Any]]] = {
        "experts_implementation": (None, "grouped_mm"),
        "output_router_logits": (False, None),
        "router_jitter_noise": (0, 0.0, None),
    }

    vocab_size: Count = 32000
    hidden_size: Count = 4096
    intermediate_size: Count = 14336
    num_hidden_layers: Layers = 32
    num_attention_heads: Count = 32
    num_key_value_heads: Count | None = 8
    head_dim: Count | None = None
    hidden_act: Activation = "silu"
    max_position_embeddings: Count = 4096 * 32
    tie_word_embeddings: bool = False
    sliding_window: Count | None = None
    attention_dropout: Probability = 0.0
    num_experts_per_tok: Count = 2
    num_local_experts: Count = 8
    output_router_logits: bool = False
    router_jitter_noise: float | None = 0.0

    def check(self) -> None:
        super().check()
        check_divides(self, "num_attention_heads", "num_key_value_heads")
        if self.num_experts_per_tok > self.num_local_experts:
            raise ValueError(
                f"num_experts_per_tok {self.num_experts_per_tok} is above num_local_experts {self.num_local_experts}"
            )
        for name in ("hidden_size", "intermediate_size"):
            width: int = getattr(self, name)
            if width % 8:
                raise ValueError(
                    f"{name} {width} does not divide by 8: rows of grouped_mm have to be multiples of 16 bytes"
                )


class Mixtral(Mistral):
    """The program of MixtralForCausalLM."""

    Config = MixtralConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.experts = Dim("experts", config.num_local_experts)
        self.experts_per_token = Dim("experts_per_token", config.num_experts_per_tok)
        self.routed = (config.num_experts_per_tok, config.num_local_experts)
        self.gate_up = Dim("2·ffn", 2 * self.ffn.size)

    def mlp_weights(self) -> Iterator[Weight]:
        yield Weight("mlp.gate.weight", (self.experts, self.hidden), "router")
        yield Weight("mlp.experts.gate_up_proj", (self.experts, self.gate_up, self.hidden), "experts")
        yield Weight("mlp.experts.down_proj", (self.experts, self.hidden, self.ffn), "experts")

    @module
    def mlp(self, m: Module, x: Tensor) -> Tensor:
        """MixtralSparseMoeBlock"""
        batch, seq, hidden = x.shape
        hidden_states = view(x, merge(batch, seq), hidden)
        _logits, top_k_weights, top_k_index = self.router(m / "gate", hidden_states)
        hidden_states = self.run_experts(m / "experts", hidden_states, top_k_index, top_k_weights)
        return reshape(hidden_states, batch, seq, hidden)

    @module
    def router(self, m: Module, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """MixtralTopKRouter"""
        hidden_states = reshape(hidden_states, *hidden_states.shape)
        router_logits = linear(hidden_states, m.weight())
        router_probs = softmax(cast(router_logits, fp32))
        router_top_value, router_indices = topk(router_probs, self.experts_per_token)
        router_top_value = div_(router_top_value, sum_last(router_top_value))
        return router_logits, router_top_value, router_indices

    @module
    def run_experts(self, m: Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """grouped_mm_experts_forward: a row for each copy of a token, sorted by expert."""
        tokens, hidden = hidden_states.shape
        copies = merge(tokens, self.experts_per_token)
        sample_weights = reshape(top_k_weights, copies)
        expert_ids = reshape(top_k_index, copies)

        expert_ids_g, perm = sort(expert_ids)
        selected_hidden_states_g = index(hidden_states, like(perm, "token of a row"), "rows by expert")
        sample_weights_g = index(sample_weights, perm, "weights by expert")
        _histc_input = like(expert_ids_g, "histogram input", int32)  # fp32 on CPU
        _tokens_per_expert = new_tensor(perm.memory, (self.experts,), int32, "tokens per expert")
        offsets = new_tensor(perm.memory, (self.experts,), int32, "offsets of the experts")

        gate_up_proj, down_proj = m.weight("gate_up_proj"), m.weight("down_proj")
        proj_out = grouped_mm(selected_hidden_states_g, transpose(gate_up_proj, 1, 2), offsets, gate_up_proj.name)
        proj_out = self.apply_gate(proj_out)
        proj_out = grouped_mm(proj_out, transpose(down_proj, 1, 2), offsets, down_proj.name)
        weighted_out = proj_out * unsqueeze(sample_weights_g, 1)

        inv_perm = like(perm, "inverse permutation")
        _arange = like(perm, "arange")
        del _arange  # in the real code an argument without a name
        weighted_out = index(weighted_out, inv_perm, "rows by token")
        final_hidden_states = sum_middle(view(weighted_out, tokens, self.experts_per_token, hidden))
        return cast(final_hidden_states, hidden_states.dtype)

    def apply_gate(self, gate_up_out: Tensor) -> Tensor:
        gate, up = chunk(gate_up_out, 2)
        return act(gate, self.config.hidden_act) * up
