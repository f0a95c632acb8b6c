"""MiniMax-Text-01 (models/minimax/modeling_minimax.py): Mixtral with lightning attention in half of the layers, which is
linear between blocks of a sequence.

A Python loop runs over the blocks, and its last results live until the module returns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from memcalc.core.dims import ONE_DIM, Dim, merge, plus
from memcalc.core.ops.axes import cat_dim, narrow, split_dim
from memcalc.core.ops.elementwise import like, sigmoid
from memcalc.core.ops.exponential import exp
from memcalc.core.ops.matmul import matmul
from memcalc.core.ops.shape import first, reshape, transpose
from memcalc.core.tensor import Tensor, new_tensor
from memcalc.families.base.blocks import act, apply_mask_to_padding_states, rms_norm
from memcalc.families.base.config import Count
from memcalc.families.base.hybrid import LinearOrFull, LinearOrFullConfig, LinearOrFullLayers
from memcalc.families.base.module import Buffer, Module, State, Weight, module
from memcalc.families.base.support import Family, Support
from memcalc.families.llama import linear_weights
from memcalc.families.mixtral import Mixtral, MixtralConfig

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memcalc.families.base.blocks import Rotary


@dataclass(frozen=True, kw_only=True)
class MiniMaxConfig(MixtralConfig, LinearOrFullConfig):
    """The fields and defaults of models/minimax/configuration_minimax.py."""

    block_size: Count = 256

    def default_kind(self, i: int) -> LinearOrFull:
        return "linear_attention" if i % 2 else "full_attention"


class LightningAttention:
    """A module like MiniMaxLightningAttention, made from its sizes."""

    def __init__(self, hidden: Dim, heads: Dim, head_dim: Dim, block_size: int, activation: str) -> None:
        self.hidden, self.heads, self.head_dim, self.activation = hidden, heads, head_dim, activation
        self.width = merge(heads, head_dim)
        self.qkv = Dim("3·heads·head_dim", 3 * self.width.size)
        self.block = Dim("block", block_size)

    def weights(self, path: str) -> Iterator[Weight]:
        yield Weight(f"{path}.norm.weight", (self.width,), "norm")
        yield from linear_weights(f"{path}.qkv_proj", self.hidden, self.qkv, "attention", bias=False)
        yield from linear_weights(f"{path}.out_proj", self.width, self.hidden, "attention", bias=False)
        yield from linear_weights(f"{path}.output_gate", self.hidden, self.width, "attention", bias=False)

    def buffers(self, path: str) -> Iterator[Buffer]:
        yield Buffer(f"{path}.slope_rate", (self.heads, ONE_DIM, ONE_DIM))
        yield Buffer(f"{path}.query_decay", (self.heads, self.block, ONE_DIM))
        yield Buffer(f"{path}.key_decay", (self.heads, self.block, ONE_DIM))
        yield Buffer(f"{path}.diagonal_decay", (ONE_DIM, self.heads, self.block, self.block))

    @module
    def forward(self, m: Module, hidden_states: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the output, and the last state, which the layer's frame keeps."""
        batch, seq, _ = hidden_states.shape
        qkv_states = act((m / "qkv_proj").linear(hidden_states), self.activation)
        qkv_states = apply_mask_to_padding_states(qkv_states, mask)
        qkv_states = reshape(qkv_states, batch, seq, self.heads, Dim("3·head_dim", 3 * self.head_dim.size))
        query_states, key_states, value_states = split_dim(qkv_states, 3, *[self.head_dim] * 3)
        query_states = transpose(query_states, 1, 2)
        key_states = transpose(key_states, 1, 2)
        value_states = transpose(value_states, 1, 2)

        outputs: list[Tensor] = []
        cache = m.run.cache
        attn_weights_inter = None if cache is None else cache.state(m, "recurrent state")
        if attn_weights_inter is not None:
            ratio = exp(-m.buffer("slope_rate"))
            current_attn_weights_inter = matmul(transpose(key_states, 2, 3), value_states, "update of the state")
            attn_weights_inter = ratio * attn_weights_inter + current_attn_weights_inter
            outputs.append(matmul(query_states, attn_weights_inter, "output from the state"))
        else:
            state = (batch, self.heads, self.head_dim, self.head_dim)
            attn_weights_inter = new_tensor(m.run.memory, state, value_states.dtype, "initial state")
            for start in range(0, seq.size, self.block.size):
                size = self._block_at(start, seq)
                q, k, v = (narrow(x, 2, size) for x in (query_states, key_states, value_states))
                query_decay = first(m.buffer("query_decay"), self.heads, size, ONE_DIM)
                key_decay = first(m.buffer("key_decay"), self.heads, size, ONE_DIM)
                diagonal_decay = first(m.buffer("diagonal_decay"), ONE_DIM, self.heads, size, size)
                block_decay = like(-m.buffer("slope_rate") * 1.0, "decay of a block")
                attn_weights_intra = matmul(q, transpose(k, 2, 3), "attention within a block")
                attn_output_intra = matmul(attn_weights_intra * diagonal_decay, v, "output within a block")
                attn_output_inter = matmul(q * query_decay, attn_weights_inter, "output from the state")
                outputs.append(attn_output_inter + attn_output_intra)
                next_attn_weights_inter = matmul(transpose(k * key_decay, 2, 3), v, "update of the state")
                attn_weights_inter = attn_weights_inter * block_decay + next_attn_weights_inter
        current_attn_output = outputs[-1]
        attn_output = cat_dim(outputs, 2, seq)
        outputs.clear()
        attn_output = reshape(transpose(attn_output, 1, 2), batch, seq, self.width)
        attn_output = rms_norm(m / "norm", attn_output)
        attn_output = sigmoid((m / "output_gate").linear(hidden_states)) * attn_output
        attn_output = (m / "out_proj").linear(attn_output)
        if cache is not None:
            cache.keep_state(m, "recurrent state", attn_weights_inter)
        del current_attn_output
        return attn_output, attn_weights_inter

    def _block_at(self, start: int, seq: Dim) -> Dim:
        """Return the dim of the block of tokens that begins at `start`. The last block may have fewer tokens."""
        if start + self.block.size <= seq.size:
            return self.block if seq.size > self.block.size else seq
        return plus(seq, -start) if start else seq


class MiniMax(LinearOrFullLayers, Mixtral):
    """The program of MiniMaxForCausalLM."""

    Config = MiniMaxConfig
    cache_knows_layers = False
    no_static_cache = "keeps its states in a cache of its own"

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.lightning = LightningAttention(
            self.hidden, self.heads, self.head_dim, config.block_size, config.hidden_act
        )

    def states(self, i: int) -> tuple[State, ...]:
        lightning = self.lightning
        state = State("recurrent state", (lightning.heads, lightning.head_dim, lightning.head_dim))
        return (state,) if self.linear(i) else ()

    def layer_weights(self, i: int) -> Iterator[Weight]:
        if self.linear(i):
            yield from self.lightning.weights("self_attn")
        else:
            yield from self.attention_weights()
        yield from self.norm_weights("input_layernorm")
        yield from self.norm_weights("post_attention_layernorm")
        yield from self.mlp_weights()

    def layer_buffers(self, i: int) -> Iterator[Buffer]:
        if self.linear(i):
            yield from self.lightning.buffers("self_attn")

    def buffers(self) -> Iterator[Buffer]:
        yield from self.buffer_stack("model.layers")
        yield from super().buffers()

    @module
    def layer(self, m: Module, hidden_states: Tensor, rotary: Rotary, mask: Tensor | None, positions: Tensor) -> Tensor:
        assert m.layer is not None
        hidden_states = self.norm(m / "input_layernorm", hidden_states)
        residual = hidden_states
        if self.linear(m.layer):
            hidden_states, _state = self.lightning.forward(m / "self_attn", hidden_states, mask)
        else:
            hidden_states, _weights = self.attention(m / "self_attn", hidden_states, rotary, mask)
        hidden_states = residual * 1.0 + hidden_states * 1.0
        hidden_states = self.norm(m / "post_attention_layernorm", hidden_states)
        residual = hidden_states
        hidden_states = self.mlp(m / "mlp", hidden_states)
        return residual * 1.0 + hidden_states * 1.0


FAMILY: Final = Family("minimax", MiniMax, Support(meets_fp32=True, attends_in_fp32=True))
