"""Stacks in which some layers have a dense MLP and the others route tokens to experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from memcalc.core.dims import ONE_DIM, Dim, merge
from memcalc.core.ops.elementwise import sigmoid
from memcalc.core.ops.shape import reshape, view
from memcalc.families.base.config import Layers, RotaryConfig
from memcalc.families.base.experts import Experts, SoftmaxRouter, grouped_router
from memcalc.families.base.module import Buffer, Module, Weight, module
from memcalc.families.base.router_outputs import RouterOutputs, RouterOutputsConfig
from memcalc.families.llama import linear_weights

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Sequence

    from memcalc.core.tensor import Tensor


@dataclass(frozen=True, kw_only=True)
class MlpTypesConfig(RouterOutputsConfig, RotaryConfig):
    """A family whose layers differ in their MLP, by one name each in `mlp_layer_types`."""

    num_hidden_layers: Layers
    mlp_layer_types: list[Literal["dense", "sparse"]] | None = None

    @property
    def default_mlp_types(self) -> Sequence[str]:
        return ["dense", *["sparse"] * (self.num_hidden_layers - 1)]

    @property
    def mlp_types(self) -> Sequence[str]:
        """Return the kind of MLP of each layer."""
        return self.default_mlp_types if self.mlp_layer_types is None else self.mlp_layer_types

    def check(self) -> None:
        super().check()
        given, layers = len(self.mlp_types), self.num_hidden_layers
        if given < layers:
            raise ValueError(f"mlp_layer_types has {given} entries, num_hidden_layers is {layers}")


class SparseLayers(RouterOutputs):
    """Llama's stack with a routed block instead of some layers' MLP."""

    sparse_mlp: Any
    """The forward of a routed block, a module's method."""

    def sparse(self, i: int) -> bool:
        """Tell whether layer `i` has experts."""
        return self.config.mlp_types[i] == "sparse"

    def sparse_weights(self) -> Iterator[Weight]:
        """Yield the weights of a routed block, instead of `mlp_weights`."""
        raise NotImplementedError

    def variant(self, i: int) -> Hashable:
        return super().variant(i), self.sparse(i)

    def layer_weights(self, i: int) -> Iterator[Weight]:
        yield from self.attention_weights()
        yield from self.sparse_weights() if self.sparse(i) else self.mlp_weights()
        yield Weight("input_layernorm.weight", (self.hidden,), "norm")
        yield Weight("post_attention_layernorm.weight", (self.hidden,), "norm")

    @module
    def mlp(self, m: Module, x: Tensor) -> Tensor:
        assert m.layer is not None
        return self.sparse_mlp(m, x) if self.sparse(m.layer) else self.dense_mlp(m, x)

    def dense_mlp(self, m: Module, x: Tensor) -> Tensor:
        """Run the MLP of a layer without experts, or that of the experts that all tokens are sent to."""
        return super().mlp(m, x)


class GatedSharedExpert(SparseLayers):
    """Qwen2-MoE's layers: experts in every `decoder_sparse_step`-th layer, beside a shared one behind a gate."""

    balances = True

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.routed = (config.num_experts_per_tok, config.num_experts)
        per_token, experts = Dim("experts_per_token", self.routed[0]), Dim("experts", self.routed[1])
        self.router = SoftmaxRouter(experts, per_token, self.hidden, normalised=config.norm_topk_prob)
        expert_ffn = Dim("expert_ffn", config.moe_intermediate_size)
        self.experts = Experts(experts, per_token, self.hidden, expert_ffn, config.hidden_act)
        self.shared_ffn = Dim("shared_ffn", config.shared_expert_intermediate_size)

    def sparse(self, i: int) -> bool:
        config = self.config
        dense = config.mlp_only_layers or ()
        return i not in dense and config.num_experts > 0 and (i + 1) % config.decoder_sparse_step == 0

    def sparse_weights(self) -> Iterator[Weight]:
        yield from self.router.weights("mlp.gate")
        yield from self.experts.weights("mlp.experts")
        yield from gated_mlp_weights("mlp.shared_expert", self.hidden, self.shared_ffn)
        yield from linear_weights("mlp.shared_expert_gate", self.hidden, ONE_DIM, "mlp", bias=False)

    @module
    def sparse_mlp(self, m: Module, x: Tensor) -> Tensor:
        """Run Qwen2MoeSparseMoeBlock."""
        batch, seq, hidden = x.shape
        hidden_states_reshaped = view(x, merge(batch, seq), hidden)
        shared_expert_output = self.dense_mlp(m / "shared_expert", hidden_states_reshaped)
        _logits, routing_weights, selected_experts = self.router.forward(m / "gate", hidden_states_reshaped)
        expert_output = self.experts.forward(m / "experts", hidden_states_reshaped, selected_experts, routing_weights)
        shared_expert_output = sigmoid((m / "shared_expert_gate").linear(hidden_states_reshaped)) * shared_expert_output
        expert_output = expert_output + shared_expert_output
        return reshape(expert_output, batch, seq, hidden)


class GroupedSparseLayers(SparseLayers):
    """DeepSeek-V3's layers, which many families have adopted: dense ones first, then experts in groups beside a shared
    one."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        experts_per_token = config.num_experts_per_tok or config.n_routed_experts  # None cannot run (check_step)
        self.routed = (experts_per_token, config.n_routed_experts)
        per_token, experts = Dim("experts_per_token", self.routed[0]), Dim("experts", self.routed[1])
        expert_ffn = Dim("expert_ffn", config.moe_intermediate_size)
        self.router = self.make_router(experts, per_token)
        self.experts = Experts(experts, per_token, self.hidden, expert_ffn, config.hidden_act)
        self.shared_ffn = Dim("shared_ffn", config.moe_intermediate_size * config.n_shared_experts)

    def make_router(self, experts: Dim, per_token: Dim) -> Any:
        return grouped_router(self.config, experts, per_token, self.hidden)

    def sparse(self, i: int) -> bool:
        return i >= self.config.first_k_dense_replace

    def sparse_weights(self) -> Iterator[Weight]:
        yield from self.experts.weights("mlp.experts")
        yield from self.router.weights("mlp.gate")
        yield from gated_mlp_weights("mlp.shared_experts", self.hidden, self.shared_ffn)

    def layer_buffers(self, i: int) -> Iterator[Buffer]:
        if self.sparse(i):
            yield from self.router.buffers("mlp.gate")

    def buffers(self) -> Iterator[Buffer]:
        yield from self.buffer_stack("model.layers")
        yield from super().buffers()

    @module
    def sparse_mlp(self, m: Module, x: Tensor) -> Tensor:
        """Run DeepseekV3MoE."""
        batch, seq, hidden = x.shape
        _logits, topk_weights, topk_indices = self.router.forward(m / "gate", x)
        hidden_states = view(x, merge(batch, seq), hidden)
        hidden_states = self.experts.forward(m / "experts", hidden_states, topk_indices, topk_weights)
        hidden_states = view(hidden_states, batch, seq, hidden)
        hidden_states = hidden_states + self.dense_mlp(m / "shared_experts", x)
        return self.of_all_experts(m, hidden_states)

    def of_all_experts(self, m: Module, hidden_states: Tensor) -> Tensor:
        """Return the block's output from the sum of all experts, in the block's own frame."""
        return hidden_states


def gated_mlp_weights(path: str, hidden: Dim, ffn: Dim, *, bias: bool = False) -> Iterator[Weight]:
    """Yield the parameters of Llama's MLP, of any width."""
    yield from linear_weights(f"{path}.gate_proj", hidden, ffn, "mlp", bias=bias)
    yield from linear_weights(f"{path}.up_proj", hidden, ffn, "mlp", bias=bias)
    yield from linear_weights(f"{path}.down_proj", ffn, hidden, "mlp", bias=bias)
