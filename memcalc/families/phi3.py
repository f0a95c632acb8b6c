"""Phi-3 (models/phi3/modeling_phi3.py): Llama with joined projections, rotating a part of each head, with dropout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final

from memcalc.core.dims import Dim, merge
from memcalc.core.ops.elementwise import dropout
from memcalc.core.ops.replaceable import replaceable
from memcalc.core.ops.shape import cat, part, reshape, rotate_half, transpose, unsqueeze, view
from memcalc.families.base.blocks import rms_norm
from memcalc.families.base.config import Activation, Count, Fraction, Layers, Probability, RotaryConfig, check_divides
from memcalc.families.base.masks import causal_mask
from memcalc.families.base.module import Module, Run, Weight, module
from memcalc.families.base.plans import ENDS, JOINED_MLP
from memcalc.families.base.support import Family, Support
from memcalc.families.base.variations import JoinedMLP
from memcalc.families.llama import linear_weights

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memcalc.core.tensor import Tensor
    from memcalc.families.base.blocks import Attended
    from memcalc.families.llama import Rotary


@dataclass(frozen=True, kw_only=True)
class Phi3Config(RotaryConfig):
    """The fields and defaults of models/phi3/configuration_phi3.py."""

    null_head_dim: ClassVar[bool] = False
    rotates_part: ClassVar[bool] = True

    vocab_size: Count = 32064
    pad_token_id: int | None = 32000
    hidden_size: Count = 3072
    intermediate_size: Count = 8192
    num_hidden_layers: Layers = 32
    num_attention_heads: Count = 32
    num_key_value_heads: Count | None = None
    head_dim: Count | None = None
    resid_pdrop: Probability = 0.0
    embd_pdrop: Probability = 0.0
    attention_dropout: Probability = 0.0
    hidden_act: Activation = "silu"
    max_position_embeddings: Count = 4096
    partial_rotary_factor: Fraction = 1.0
    original_max_position_embeddings: Count = 4096
    tie_word_embeddings: bool = False
    sliding_window: Count | None = None

    @property
    def rope(self) -> dict[str, Any]:
        """Return the rotary parameters; `su` and `yarn` are older names of `longrope`."""
        rope = super().rope
        return {**rope, "rope_type": "longrope"} if rope["rope_type"] in ("su", "yarn") else rope

    def check(self) -> None:
        super().check()
        check_divides(self, "num_attention_heads", "num_key_value_heads")
        kind = self.rope["rope_type"]
        if kind not in ("default", "longrope"):
            raise ValueError(f"rope_parameters rope_type {kind!r} is not one of phi3's; allowed: 'default', 'longrope'")
        if kind == "longrope" and self.original_max_position_embeddings == 1:
            raise ValueError("original_max_position_embeddings 1 has a logarithm of zero; allowed: 2 and more")


class Phi3(JoinedMLP):
    """The program of Phi3ForCausalLM. Its `embd_pdrop` is a field that no module reads."""

    Config = Phi3Config

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.q_width = merge(self.heads, self.head_dim)
        self.kv_width = merge(self.kv_heads, self.head_dim)
        self.qkv_width = Dim("(heads+2·kv_heads)·head_dim", self.q_width.size + 2 * self.kv_width.size)

    def attention_weights(self) -> Iterator[Weight]:
        yield from linear_weights("self_attn.o_proj", self.q_width, self.hidden, "attention", bias=False)
        yield from linear_weights("self_attn.qkv_proj", self.hidden, self.qkv_width, "attention", bias=False)

    def masks(self, run: Run) -> dict[str, Tensor | None]:
        return {"full_attention": causal_mask(run, self.config.sliding_window)}

    @module
    def layer(
        self, m: Module, hidden_states: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor | None, positions: Tensor
    ) -> Tensor:
        p = self.config.resid_pdrop
        residual = hidden_states
        hidden_states = rms_norm(m / "input_layernorm", hidden_states)
        hidden_states, _weights = self.attention(m / "self_attn", hidden_states, rotary, mask)
        hidden_states = residual + dropout(hidden_states, p)
        residual = hidden_states
        hidden_states = rms_norm(m / "post_attention_layernorm", hidden_states)
        hidden_states = self.mlp(m / "mlp", hidden_states)
        return residual + dropout(hidden_states, p)

    @module
    def attention(self, m: Module, hidden_states: Tensor, rotary: Rotary, mask: Tensor | None) -> Attended:
        """Return the attention's output. The frame holds q, k and v as they were joined, beside what a cache returns."""
        qkv = (m / "qkv_proj").linear(hidden_states)
        query_states, key_states, value_states = self.split(qkv)
        cos, sin = rotary
        query_states, key_states = self.rotate(query_states, key_states, cos, sin)
        key_states, value_states = m.cached(key_states, value_states)
        attn_output, attn_weights = self.attend(m, query_states, key_states, value_states, mask)
        attn_output = reshape(attn_output, *hidden_states.shape[:-1], self.q_width)
        attn_output = (m / "o_proj").linear(attn_output)
        return attn_output, attn_weights

    def split(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        batch, seq, _ = qkv.shape
        q, k, v = part(qkv, self.q_width), part(qkv, self.kv_width), part(qkv, self.kv_width)
        q = transpose(view(q, batch, seq, self.heads, self.head_dim), 1, 2)
        k = transpose(view(k, batch, seq, self.kv_heads, self.head_dim), 1, 2)
        v = transpose(view(v, batch, seq, self.kv_heads, self.head_dim), 1, 2)
        return q, k, v

    def rotate(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return apply_rotary_pos_emb(q, k, cos, sin)


@replaceable
def apply_rotary_pos_emb(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Return q and k with the first dims of each head rotated. q is joined with its other dims before k is rotated."""
    cos, sin = unsqueeze(cos, 1), unsqueeze(sin, 1)
    return _rotated(q, cos, sin), _rotated(k, cos, sin)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    head_dim, rotary_dim = x.shape[3], cos.shape[3]
    x_rot, x_pass = part(x, rotary_dim), part(x, Dim("head_dim-rotary_dim", head_dim.size - rotary_dim.size))
    return cat(((x_rot * cos) + (rotate_half(x_rot) * sin), x_pass), head_dim)


FAMILY: Final = Family(
    "phi3",
    Phi3,
    Support(
        tensor_parallel={
            **ENDS,
            "model.layers.*.self_attn.qkv_proj": "colwise_gather_output",
            "model.layers.*.self_attn.o_proj": "rowwise_split_input",
            **JOINED_MLP,
        },
        context_parallel=True,
        ulysses=True,
        stages=True,
        chunked_loss=True,
        liger="llama",
    ),
)
