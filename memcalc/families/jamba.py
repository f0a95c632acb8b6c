"""Jamba (models/jamba/modeling_jamba.py): Mamba in most layers, attention without positions in the others, experts in
some of both.

As Mamba, the path in plain torch, as runs without the packages mamba_ssm and causal_conv1d.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal

from memcalc.core.dims import Dim, merge
from memcalc.core.dtypes import fp32
from memcalc.core.ops.elementwise import cast, softmax
from memcalc.core.ops.matmul import linear
from memcalc.core.ops.routing import topk
from memcalc.core.ops.shape import reshape, view
from memcalc.families.base.blocks import Attended, rms_norm
from memcalc.families.base.config import Activation, Count, Layers, Probability, check_divides
from memcalc.families.base.experts import REFUSED, Experts, SoftmaxRouter, check_experts
from memcalc.families.base.hybrid import Hybrid
from memcalc.families.base.module import Module, Weight, module
from memcalc.families.base.plans import FEED_FORWARD
from memcalc.families.base.router_outputs import RouterOutputs, RouterOutputsConfig
from memcalc.families.base.support import Family, Support
from memcalc.families.llama import linear_weights
from memcalc.families.mamba import SelectiveMixer

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Mapping, Sequence

    from memcalc.core.tensor import Tensor
    from memcalc.families.base.module import Buffer


@dataclass(frozen=True, kw_only=True)
class JambaConfig(RouterOutputsConfig):
    """The fields and defaults of models/jamba/configuration_jamba.py."""

    computed: ClassVar[Sequence[str]] = ("layer_types", "layers_block_type", "layers_num_experts")
    null_head_dim: ClassVar[bool] = False
    attribute_map: ClassVar[Mapping[str, str]] = {"num_local_experts": "num_experts"}
    refused: ClassVar[Mapping[str, Sequence[Any]]] = REFUSED

    vocab_size: Count = 65536
    pad_token_id: int | None = 0
    tie_word_embeddings: bool = False
    hidden_size: Count = 4096
    intermediate_size: Count = 14336
    num_hidden_layers: Layers = 32
    num_attention_heads: Count = 32
    num_key_value_heads: Count = 8
    hidden_act: Activation = "silu"
    max_position_embeddings: Count = 262144
    attention_dropout: Probability = 0.0
    num_experts_per_tok: Count = 2
    num_experts: Count = 16
    expert_layer_period: Count = 2
    expert_layer_offset: int = 1
    attn_layer_period: Count = 8
    attn_layer_offset: int = 4
    mamba_d_state: Count = 16
    mamba_d_conv: Count = 4
    mamba_expand: Count = 2
    mamba_dt_rank: Count | Literal["auto"] = "auto"
    mamba_conv_bias: bool = True
    mamba_proj_bias: bool = False
    head_dim: Count | None = None

    @property
    def rope(self) -> dict[str, Any]:
        """Return default rotary parameters, which nothing uses: the family rotates no heads."""
        return {"rope_type": "default"}

    @property
    def rotary_width(self) -> int:
        return self.head_dim or self.hidden_size // self.num_attention_heads

    def check(self) -> None:
        super().check()
        check_divides(self, "num_attention_heads", "num_key_value_heads")
        for name in ("attn_layer", "expert_layer"):
            offset, period = getattr(self, f"{name}_offset"), getattr(self, f"{name}_period")
            if offset >= period:
                raise ValueError(f"{name}_offset {offset} is not below {name}_period {period}")
        if self.num_experts > 1:
            check_experts(self, "num_experts", "hidden_size", "intermediate_size")


class JambaMixer(SelectiveMixer):
    """A module like JambaMambaMixer."""

    def weights(self, path: str) -> Iterator[Weight]:
        yield from super().weights(path)
        yield Weight(f"{path}.dt_layernorm.weight", (self.rank,), "norm")
        yield Weight(f"{path}.b_layernorm.weight", (self.state,), "norm")
        yield Weight(f"{path}.c_layernorm.weight", (self.state,), "norm")

    used_by_itself = ("conv1d.weight", "conv1d.bias", "dt_proj.weight", "dt_proj.bias")

    def offer_to_the_fused_kernel(self, m: Module) -> None:
        """Do nothing: this mixer offers its tensors to no fused kernel."""

    def normalise(self, m: Module, time_step: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        time_step = rms_norm(m / "dt_layernorm", time_step)
        b = rms_norm(m / "b_layernorm", b)
        c = rms_norm(m / "c_layernorm", c)
        return time_step, b, c


class JambaRouter(SoftmaxRouter):
    """A module like JambaTopKRouter. The weights of the chosen experts have the dtype of the hidden states."""

    @module
    def forward(self, m: Module, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        router_logits = linear(hidden_states, m.weight())
        routing_weights = softmax(cast(router_logits, fp32))
        top_k_weights, top_k_index = topk(routing_weights, self.per_token)
        m.run.collect(m.layer, router_logits)
        return router_logits, cast(top_k_weights, hidden_states.dtype), top_k_index


class Jamba(RouterOutputs, Hybrid):
    """The program of JambaForCausalLM."""

    Config = JambaConfig
    balances = True
    polynomial = True

    @property
    def external(self) -> tuple[tuple[str, str], ...]:  # type: ignore[override]
        return self.mixer.external("model.layers.*.mamba")

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.routed = (config.num_experts_per_tok, config.num_experts) if config.num_experts > 1 else (1, 1)
        per_token, experts = Dim("experts_per_token", self.routed[0]), Dim("experts", self.routed[1])
        self.router = JambaRouter(experts, per_token, self.hidden, normalised=False)
        self.experts = Experts(experts, per_token, self.hidden, self.ffn, config.hidden_act)
        self.mixer = JambaMixer(
            hidden=self.hidden, inner=config.mamba_expand * config.hidden_size, state=config.mamba_d_state,
            kernel=config.mamba_d_conv, rank=config.mamba_dt_rank, bias=config.mamba_proj_bias,
            conv_bias=config.mamba_conv_bias, activation=config.hidden_act,
        )  # fmt: skip

    def branch(self, batch: int, seq: int) -> Hashable:
        return super().branch(batch, seq), min(seq, 3)

    def mixes(self, i: int) -> bool:
        return i % self.config.attn_layer_period != self.config.attn_layer_offset

    def sparse(self, i: int) -> bool:
        """Return True if layer `i` has experts."""
        config = self.config
        return config.num_experts > 1 and i % config.expert_layer_period == config.expert_layer_offset

    def variant(self, i: int) -> Hashable:
        return self.mixes(i), self.sparse(i)

    def buffers(self) -> Iterator[Buffer]:
        yield from ()

    def attention_weights(self) -> Iterator[Weight]:
        q, kv = merge(self.heads, self.head_dim), merge(self.kv_heads, self.head_dim)
        for name, out in (("q_proj", q), ("k_proj", kv), ("v_proj", kv)):
            yield from linear_weights(f"self_attn.{name}", self.hidden, out, "attention", bias=False)
        yield from linear_weights("self_attn.o_proj", q, self.hidden, "attention", bias=False)

    def feed_forward_weights(self, i: int) -> Iterator[Weight]:
        if not self.sparse(i):
            yield from super().feed_forward_weights(i)
            return
        yield from self.router.weights("feed_forward.router")
        yield from self.experts.weights("feed_forward.experts")

    def position_embeddings(self, m: Module, positions: Tensor) -> None:
        """Return None: the family has no positions."""

    @module
    def attention(self, m: Module, hidden_states: Tensor, rotary: Any, mask: Tensor | None) -> Attended:
        query_states, key_states, value_states = self.qkv(m, hidden_states)
        key_states, value_states = m.cached(key_states, value_states)
        attn_output, attn_weights = self.attend(m, query_states, key_states, value_states, mask)
        attn_output = reshape(attn_output, *hidden_states.shape[:-1], merge(self.heads, self.head_dim))
        return (m / "o_proj").linear(attn_output), attn_weights

    @module
    def mlp(self, m: Module, x: Tensor) -> Tensor:
        assert m.layer is not None
        return self.sparse_mlp(m, x) if self.sparse(m.layer) else super().mlp(m, x)

    def sparse_mlp(self, m: Module, x: Tensor) -> Tensor:
        """Return the output of JambaSparseMoeBlock."""
        batch, seq, hidden = x.shape
        hidden_states = view(x, merge(batch, seq), hidden)
        _logits, top_k_weights, top_k_index = self.router.forward(m / "router", hidden_states)
        hidden_states = self.experts.forward(m / "experts", hidden_states, top_k_index, top_k_weights)
        return reshape(hidden_states, batch, seq, hidden)


FAMILY: Final = Family("jamba", Jamba, Support(tensor_parallel=FEED_FORWARD, uses_weights_within=True))
