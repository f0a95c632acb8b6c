"""OLMo Hybrid (models/olmo_hybrid/modeling_olmo_hybrid.py): the gated delta rule in most layers, which norm what they take, and
OLMo 2's layers with or without rotary positions.

As `delta` says, the path in plain torch, as runs without the packages fla and causal_conv1d.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final

from memcalc.core.dims import merge
from memcalc.core.dtypes import fp32
from memcalc.core.ops.elementwise import cast, sigmoid
from memcalc.core.ops.exponential import exp, softplus
from memcalc.core.ops.shape import cat, reshape, split, transpose, view
from memcalc.families.base.blocks import QKV, apply_mask_to_padding_states
from memcalc.families.base.config import Activation, Count, DecoderConfig, Layers, check_divides
from memcalc.families.base.delta import GatedDeltaNet, gated_delta_rule
from memcalc.families.base.hybrid import LinearOrFull, LinearOrFullConfig, LinearOrFullLayers
from memcalc.families.base.module import Buffer, Module, State, Weight, module
from memcalc.families.base.plans import OLMO2
from memcalc.families.base.support import Family, Support
from memcalc.families.llama import linear_weights
from memcalc.families.mamba import cached_conv1d
from memcalc.families.olmo2 import Olmo2

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from memcalc.core.dims import Dim
    from memcalc.core.tensor import Tensor


@dataclass(frozen=True, kw_only=True)
class OlmoHybridConfig(DecoderConfig, LinearOrFullConfig):
    """The fields and defaults of models/olmo_hybrid/configuration_olmo_hybrid.py."""

    null_head_dim: ClassVar[bool] = False
    rotation_is_optional: ClassVar[bool] = True

    vocab_size: Count = 100352
    pad_token_id: int | None = 100277
    hidden_size: Count = 3840
    intermediate_size: Count = 11008
    num_hidden_layers: Layers = 32
    num_attention_heads: Count = 30
    hidden_act: Activation = "silu"
    max_position_embeddings: Count = 65536
    attention_bias: bool = False
    linear_num_key_heads: Count | None = None
    linear_num_value_heads: Count | None = None
    linear_key_head_dim: Count | None = None
    linear_value_head_dim: Count | None = None
    linear_conv_kernel_dim: Count = 4
    linear_allow_neg_eigval: bool = True

    @classmethod
    def renamed(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        named = super().renamed(config)
        key = "rope_scaling" if named.get("rope_scaling") else "rope_parameters"
        rope: Any = named.get(key) or {}
        if "rope_theta" in named and isinstance(rope, dict):
            named[key] = {"rope_theta": named.pop("rope_theta"), **rope}
        return named

    @property
    def rotates(self) -> bool:
        """Return True if the model has rotary positions; a theta of null means none."""
        return self.rope.get("rope_theta", 10000.0) is not None

    @property
    def key_heads(self) -> int:
        return self.linear_num_key_heads or self.num_attention_heads

    @property
    def value_heads(self) -> int:
        return self.linear_num_value_heads or self.num_attention_heads

    @property
    def key_head_dim(self) -> int:
        return self.linear_key_head_dim or int(0.75 * self.hidden_size / self.key_heads)

    @property
    def value_head_dim(self) -> int:
        return self.linear_value_head_dim or 2 * self.key_head_dim

    @property
    def kinds(self) -> list[LinearOrFull]:
        kinds = super().kinds
        if self.layer_types is None and "full_attention" not in kinds:
            kinds[-1] = "full_attention"
        return kinds

    def default_kind(self, i: int) -> LinearOrFull:
        return "full_attention" if i % 4 == 3 else "linear_attention"

    def check(self) -> None:
        super().check()
        check_divides(self, "value_heads", "key_heads")
        if len(set(self.kinds)) != 2:
            raise ValueError(f"layer_types {self.kinds} need both linear_attention and full_attention")


class OlmoDeltaNet(GatedDeltaNet):
    """A module like OlmoHybridGatedDeltaNet, with six projections."""

    def __init__(self, *, negative: bool, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.negative = negative

    def weights(self, path: str) -> Iterator[Weight]:
        yield Weight(f"{path}.A_log", (self.value_heads,), "mixer")
        yield Weight(f"{path}.dt_bias", (self.value_heads,), "mixer")
        for name, out in self.projections.items():
            yield from linear_weights(f"{path}.{name}", self.hidden, out, "mixer", bias=False)
        yield from linear_weights(f"{path}.o_proj", self.values, self.hidden, "mixer", bias=False)
        for weight in super().weights(path):
            if weight.name == f"{path}.conv1d.weight":
                yield weight
        yield Weight(f"{path}.o_norm.weight", (self.value_dim,), "norm")

    @property
    def projections(self) -> dict[str, Dim]:
        """Return the projections of the hidden states by name, with their widths."""
        keys, values, heads = self.keys, self.values, self.value_heads
        return {"q_proj": keys, "k_proj": keys, "v_proj": values, "a_proj": heads, "b_proj": heads, "g_proj": values}

    @module
    def forward(self, m: Module, hidden_states: Tensor, mask: Tensor | None) -> Tensor:
        hidden_states = apply_mask_to_padding_states(hidden_states, mask)
        batch, seq, _ = hidden_states.shape
        projected = [(m / name).linear(hidden_states) for name in ("q_proj", "k_proj", "v_proj")]
        mixed_qkv = transpose(cat(projected, self.conv_dim), 1, 2)
        del projected
        mixed_qkv = cached_conv1d(m, m / "conv1d", mixed_qkv, self.activation)
        q, k, v = split(transpose(mixed_qkv, 1, 2), self.keys, self.keys, self.values)
        q = view(q, batch, seq, self.key_heads, self.key_dim)
        k = view(k, batch, seq, self.key_heads, self.key_dim)
        v = view(v, batch, seq, self.value_heads, self.value_dim)
        beta = sigmoid((m / "b_proj").linear(hidden_states))
        if self.negative:
            beta = beta * 2.0
        a_log = -exp(cast(m.weight("A_log"), fp32))
        g = a_log * softplus(cast((m / "a_proj").linear(hidden_states), fp32) + m.weight("dt_bias"))
        del a_log
        output, _state = gated_delta_rule(m, q, k, v, g, beta)
        gate = (m / "g_proj").linear(hidden_states)
        output = reshape(output, merge(batch, seq, self.value_heads), self.value_dim)
        gate = reshape(gate, merge(batch, seq, self.value_heads), self.value_dim)
        output = self.norm(m / "o_norm", output, gate)
        output = reshape(output, batch, seq, self.values)
        return (m / "o_proj").linear(output)


class OlmoHybrid(LinearOrFullLayers, Olmo2):
    """The program of OlmoHybridForCausalLM."""

    Config = OlmoHybridConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.rotates: bool = config.rotates
        self.delta = OlmoDeltaNet(
            hidden=self.hidden, key_heads=config.key_heads, value_heads=config.value_heads,
            key_dim=config.key_head_dim, value_dim=config.value_head_dim, kernel=config.linear_conv_kernel_dim,
            activation=config.hidden_act, negative=config.linear_allow_neg_eigval,
        )  # fmt: skip

    def layer_weights(self, i: int) -> Iterator[Weight]:
        if not self.linear(i):
            yield from super().layer_weights(i)
            return
        yield from self.mlp_weights()
        yield from self.norm_weights("input_layernorm")
        yield from self.norm_weights("post_attention_layernorm")
        yield from self.delta.weights("linear_attn")

    def states(self, i: int) -> tuple[State, ...]:
        return self.delta.states() if self.linear(i) else ()

    def frequencies(self) -> Iterator[Buffer]:
        if self.rotates:
            yield from super().frequencies()

    def rotary_embeddings(self, m: Module, positions: Tensor) -> dict[str, Any]:
        rotary = self.position_embeddings(m, positions) if self.rotates else None
        return {"full_attention": rotary, "linear_attention": None}

    def rotated_qkv(self, m: Module, hidden_states: Tensor, rotary: Any) -> QKV:
        return super().rotated_qkv(m, hidden_states, rotary) if self.rotates else self.qkv(m, hidden_states)

    def layer(self, m: Module, hidden_states: Tensor, rotary: Any, mask: Tensor | None, positions: Tensor) -> Tensor:
        assert m.layer is not None
        if self.linear(m.layer):
            return self.linear_layer(m, hidden_states, mask)
        return super().layer(m, hidden_states, rotary, mask, positions)

    @module
    def linear_layer(self, m: Module, hidden_states: Tensor, mask: Tensor | None) -> Tensor:
        """Return the output of OlmoHybridLinearAttentionDecoderLayer."""
        residual = hidden_states
        hidden_states = self.norm(m / "input_layernorm", hidden_states)
        hidden_states = self.delta.forward(m / "linear_attn", hidden_states, mask)
        hidden_states = residual + hidden_states
        residual = hidden_states
        hidden_states = self.norm(m / "post_attention_layernorm", hidden_states)
        hidden_states = self.mlp(m / "mlp", hidden_states)
        return residual + hidden_states


FAMILY: Final = Family("olmo_hybrid", OlmoHybrid, Support(tensor_parallel=OLMO2, uses_weights_within=True))
