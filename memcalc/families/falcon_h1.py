"""Falcon-H1 (models/falcon_h1/modeling_falcon_h1.py): Mamba 2 and attention side by side in every layer, with multipliers
everywhere.

As Mamba 2, the path in plain torch, as runs without the packages mamba_ssm and causal_conv1d.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal

from memcalc.core.dims import ONE_DIM, Dim
from memcalc.core.dtypes import fp32
from memcalc.core.ops.elementwise import cast, mean, power, rsqrt
from memcalc.core.ops.shape import transpose, view
from memcalc.families.base.blocks import act
from memcalc.families.base.config import Activation, Count, Layers, Probability, RotaryConfig, Several, check_divides
from memcalc.families.base.hybrid import Hybrid
from memcalc.families.base.masks import recurrent_mask
from memcalc.families.base.module import Buffer, Module, State, Weight, module
from memcalc.families.base.support import Family, Support
from memcalc.families.llama import linear_weights
from memcalc.families.mamba2 import StateSpace, check_groups

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from memcalc.core.tensor import Tensor


@dataclass(frozen=True, kw_only=True)
class FalconH1Config(RotaryConfig):
    """The fields and defaults of models/falcon_h1/configuration_falcon_h1.py."""

    computed: ClassVar[Sequence[str]] = ("layer_types", "layers_block_type")
    null_head_dim: ClassVar[bool] = False
    attribute_map: ClassVar[Mapping[str, str]] = {"layer_types": "layers_block_type"}

    vocab_size: Count = 128000
    pad_token_id: int | None = 0
    tie_word_embeddings: bool = False
    hidden_size: Count = 4096
    intermediate_size: Count = 14336
    num_hidden_layers: Layers = 32
    num_attention_heads: Count = 32
    num_key_value_heads: Count | None = 8
    hidden_act: Activation = "silu"
    max_position_embeddings: Count = 8192
    attention_dropout: Probability = 0.0
    mamba_d_ssm: Count | None = 1024
    mamba_n_heads: Count = 128
    mamba_d_head: Count | Literal["auto"] = "auto"
    mamba_n_groups: Count = 1
    mamba_d_state: Several = 256
    mamba_d_conv: Count = 4
    mamba_expand: Count = 2
    mamba_chunk_size: Several = 256
    mamba_conv_bias: bool = True
    mamba_proj_bias: bool = False
    mamba_norm_before_gate: bool = True
    mamba_rms_norm: bool = False
    projectors_bias: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    head_dim: Count | None = None

    @property
    def inner(self) -> int:
        """Return the number of channels of a mixer."""
        return self.mamba_expand * self.hidden_size if self.mamba_d_ssm is None else self.mamba_d_ssm

    @property
    def mamba_head_dim(self) -> int:
        return self.inner // self.mamba_n_heads if isinstance(self.mamba_d_head, str) else self.mamba_d_head

    def check(self) -> None:
        super().check()
        check_divides(self, "num_attention_heads", "num_key_value_heads")
        if self.mamba_head_dim * self.mamba_n_heads != self.inner:
            raise ValueError(
                f"mamba_n_heads {self.mamba_n_heads} of mamba_d_head {self.mamba_head_dim} are not {self.inner} channels"
            )
        check_groups(self.mamba_n_heads, self.mamba_n_groups, self.inner)


class FalconH1Mixer(StateSpace):
    """A module like FalconH1Mixer, a Mamba 2 mixer with vectors of multipliers and an optional norm."""

    def __init__(self, *, out_bias: bool, normalised: bool, norm_before_gate: bool, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.out_bias, self.normalised, self.norm_before_gate = out_bias, normalised, norm_before_gate

    def weights(self, path: str) -> Iterator[Weight]:
        for weight in super().weights(path):
            if not weight.name.startswith(f"{path}.out_proj"):
                yield weight
        yield from linear_weights(f"{path}.out_proj", self.inner, self.hidden, "mixer", bias=self.out_bias)

    def norm_weights(self, path: str) -> Iterator[Weight]:
        if self.normalised:
            yield from super().norm_weights(path)

    def buffers(self, path: str) -> Iterator[Buffer]:
        yield Buffer(f"{path}.mup_vector", (ONE_DIM, ONE_DIM, self.projection))

    def project(self, m: Module, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        hidden_states = hidden_states * 1.0
        projected_states = (m / "in_proj").linear(hidden_states)
        return hidden_states, projected_states * m.buffer("mup_vector")

    def gate_of_step(self, gate: Tensor) -> Tensor | None:
        return None if self.normalised else view(gate, gate.shape[0], self.heads, self.head_dim)

    def norm(self, m: Module, hidden_states: Tensor, gate: Tensor) -> Tensor:
        if not self.normalised and m.run.cache is not None and m.run.cache.seen:
            return hidden_states  # the step has applied the gate
        if not self.normalised:
            return hidden_states * act(gate, "silu")
        return self.gated_norm(m, hidden_states, gate)

    @module
    def gated_norm(self, m: Module, hidden_states: Tensor, gate: Tensor) -> Tensor:
        """Return the output of FalconH1RMSNormGated."""
        input_dtype = hidden_states.dtype
        if not self.norm_before_gate:
            hidden_states = hidden_states * act(cast(gate, fp32), "silu")
        batch, seq, dim = hidden_states.shape
        hidden_states = cast(hidden_states, fp32)
        of_a_group = Dim("inner/groups", dim.size // self.groups.size)
        hidden_states = view(hidden_states, batch, seq, self.groups, of_a_group)
        variance = mean(power(hidden_states, 2))
        hidden_states = hidden_states * rsqrt(variance + 1e-6)
        hidden_states = view(m.weight(), self.groups, of_a_group) * hidden_states
        hidden_states = view(hidden_states, batch, seq, dim)
        if self.norm_before_gate:
            hidden_states = hidden_states * act(cast(gate, fp32), "silu")
        return cast(hidden_states, input_dtype)


class FalconH1(Hybrid):
    """The program of FalconH1ForCausalLM."""

    Config = FalconH1Config

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.mixer = FalconH1Mixer(
            hidden=self.hidden, heads=config.mamba_n_heads, head_dim=config.mamba_head_dim,
            groups=config.mamba_n_groups, state=config.mamba_d_state, kernel=config.mamba_d_conv,
            chunk=config.mamba_chunk_size, bias=config.mamba_proj_bias, conv_bias=config.mamba_conv_bias,
            activation=config.hidden_act, out_bias=config.projectors_bias, normalised=config.mamba_rms_norm,
            norm_before_gate=config.mamba_norm_before_gate,
        )  # fmt: skip

    def mixes(self, i: int) -> bool:
        """Return True: every layer has attention too, so all layers take the mask."""
        return False

    def states(self, i: int) -> tuple[State, ...]:
        return self.mixer.states()

    def layer_weights(self, i: int) -> Iterator[Weight]:
        yield from self.feed_forward_weights(i)
        yield from self.mixer.weights("mamba")
        yield from self.attention_weights()
        yield Weight("input_layernorm.weight", (self.hidden,), "norm")
        yield Weight("pre_ff_layernorm.weight", (self.hidden,), "norm")

    def buffers(self) -> Iterator[Buffer]:
        yield from self.buffer_stack("model.layers")
        yield from super().buffers()

    def layer_buffers(self, i: int) -> Iterator[Buffer]:
        yield from self.mixer.buffers("mamba")

    def embed(self, m: Module, ids: Tensor) -> Tensor:
        return super().embed(m, ids) * 1.0

    def head(self, root: Module, hidden_states: Tensor) -> Tensor:
        return super().head(root, hidden_states) * 1.0

    def mix(self, m: Module, x: Tensor, rotary: Any, mask: Tensor | None) -> tuple[Tensor, Any]:
        """Return the sum of mixer and attention, and the tensors that the layer's frame keeps: both parts and the attention's
        weights."""
        mamba_hidden_states = self.mixer.forward(m / "mamba", x, recurrent_mask(m.run))
        mamba_hidden_states = mamba_hidden_states * 1.0
        attention_hidden_states, weights = self.attention(m / "self_attn", x * 1.0, rotary, mask)
        attention_hidden_states = attention_hidden_states * 1.0
        kept = (mamba_hidden_states, attention_hidden_states, weights)
        return mamba_hidden_states + attention_hidden_states, kept

    def qkv(self, m: Module, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        batch, seq, _ = hidden_states.shape
        q = transpose(view((m / "q_proj").linear(hidden_states), batch, seq, self.heads, self.head_dim), 1, 2)
        k = transpose(view((m / "k_proj").linear(hidden_states), batch, seq, self.kv_heads, self.head_dim), 1, 2) * 1.0
        v = transpose(view((m / "v_proj").linear(hidden_states), batch, seq, self.kv_heads, self.head_dim), 1, 2)
        return q, k, v

    @module
    def mlp(self, m: Module, x: Tensor) -> Tensor:
        y = (m / "up_proj").linear(x) * act((m / "gate_proj").linear(x) * 1.0, self.config.hidden_act)
        return (m / "down_proj").linear(y) * 1.0


FAMILY: Final = Family("falcon_h1", FalconH1, Support(uses_weights_within=True))
