"""XGLM (models/xglm/modeling_xglm.py): BioGPT with sines for positions and an attention of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final

from memcalc.core.dims import Dim, merge
from memcalc.core.dtypes import fp16, fp32, int64
from memcalc.core.ops.elementwise import cast, dropout, scale, softmax
from memcalc.core.ops.matmul import bmm
from memcalc.core.ops.selection import maximum
from memcalc.core.ops.shape import reshape, transpose, unsqueeze, view
from memcalc.core.tensor import Tensor, new_tensor
from memcalc.families.base.blocks import Attended, act
from memcalc.families.base.config import Activation, Count, FamilyConfig, Layers, Probability, check_divides
from memcalc.families.base.masks import causal_mask
from memcalc.families.base.module import Buffer, Module, Weight, module
from memcalc.families.base.support import Family, Support
from memcalc.families.biogpt import BioGpt

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence


@dataclass(frozen=True, kw_only=True)
class XGLMConfig(FamilyConfig):
    """The fields and defaults of models/xglm/configuration_xglm.py."""

    attribute_map: ClassVar[Mapping[str, str]] = {
        "num_attention_heads": "attention_heads",
        "hidden_size": "d_model",
        "num_hidden_layers": "num_layers",
    }
    refused: ClassVar[Mapping[str, Sequence[Any]]] = {"add_cross_attention": (False, None), "layerdrop": (0, 0.0)}

    vocab_size: Count = 256008
    pad_token_id: int | None = 1
    max_position_embeddings: Count = 2048
    d_model: Count = 1024
    ffn_dim: Count = 4096
    num_layers: Layers = 24
    attention_heads: Count = 16
    activation_function: Activation = "gelu"
    dropout: Probability = 0.1
    attention_dropout: Probability = 0.1
    activation_dropout: Probability = 0.0
    tie_word_embeddings: bool = True

    def check(self) -> None:
        super().check()
        check_divides(self, "d_model", "attention_heads")


class XGLM(BioGpt):
    """The program of XGLMForCausalLM."""

    positional = 2
    Config = XGLMConfig
    attention_kinds = ("eager",)
    base = "model"
    decoder = "lm_head"

    def __init__(self, config: Any) -> None:
        self.config = config
        self.layers = config.num_layers
        self.vocab = Dim("vocab", config.vocab_size)
        self.hidden = Dim("hidden", config.d_model)
        self.ffn = Dim("ffn", config.ffn_dim)
        self.heads = Dim("heads", config.attention_heads)
        self.kv_heads = self.heads
        self.head_dim = Dim("head_dim", config.d_model // config.attention_heads)
        self.positions = Dim("positions+2", config.max_position_embeddings + 2)
        self.max_seq_len = config.max_position_embeddings
        self.positions_limit = config.max_position_embeddings  # beyond it the table grows as the model runs
        self.activation: str = config.activation_function
        self.p: float = config.dropout

    # --- weights and buffers

    def position_weights(self) -> Iterator[Weight]:
        yield from ()

    def buffers(self) -> Iterator[Buffer]:
        yield Buffer("model.embed_positions.weights", (self.positions, self.hidden))

    # --- forward

    @module
    def model(self, m: Module, ids: Tensor) -> Tensor:
        run = m.run
        inputs_embeds = (m / "embed_tokens").scaled_embedding(ids, lambda looked_up: scale(looked_up, "mul"))
        mask = causal_mask(run)
        run.memory.scope = m.path
        _position_ids = new_tensor(run.memory, (run.seq,), int64, "position ids")
        positions = new_tensor(run.memory, (run.seq, self.hidden), run.dtype, "sines of the positions")
        embedded = [inputs_embeds + unsqueeze(positions, 0)]
        del positions  # in the real code an operand without a name
        return self.decode(m, embedded, mask)

    @module
    def layer(self, m: Module, hidden_states: Tensor, mask: Tensor | None, *_positions: Tensor) -> Tensor:
        residual = hidden_states
        hidden_states = (m / "self_attn_layer_norm").layer_norm(hidden_states)
        hidden_states, _weights = self.attention(m / "self_attn", hidden_states, mask)
        hidden_states = dropout(hidden_states, self.p)
        hidden_states = residual + hidden_states
        residual = hidden_states
        hidden_states = (m / "final_layer_norm").layer_norm(hidden_states)
        hidden_states = act((m / "fc1").linear(hidden_states), self.activation)
        hidden_states = dropout(hidden_states, self.config.activation_dropout)
        hidden_states = (m / "fc2").linear(hidden_states)
        hidden_states = dropout(hidden_states, self.p)
        return residual + hidden_states

    @module
    def attention(self, m: Module, hidden_states: Tensor, mask: Tensor | None) -> Attended:
        batch, seq, hidden = hidden_states.shape
        flat = merge(batch, self.heads)
        query_states = scale((m / "q_proj").linear(hidden_states), "mul")
        key_states = (m / "k_proj").linear(hidden_states)
        value_states = (m / "v_proj").linear(hidden_states)
        key_states = self.split_heads(key_states)
        value_states = self.split_heads(value_states)
        key_states, value_states = m.cached(key_states, value_states)
        keys = key_states.shape[2]
        query_states = self.split_heads(query_states)
        query_states = reshape(query_states, flat, seq, self.head_dim)
        key_states = reshape(key_states, flat, keys, self.head_dim)
        value_states = reshape(value_states, flat, keys, self.head_dim)
        attn_weights = bmm(query_states, transpose(key_states, 1, 2), "attention scores")
        if mask is not None:
            attn_weights = view(attn_weights, batch, self.heads, seq, keys) + mask
            attn_weights = maximum(attn_weights, new_tensor(m.run.memory, (), fp32, "lowest number"))
            attn_weights = view(attn_weights, flat, seq, keys)
        if attn_weights.dtype is fp16:
            attn_weights = cast(softmax(attn_weights, fp32), fp16)
        else:
            attn_weights = softmax(attn_weights)
        attn_probs = dropout(attn_weights, self.config.attention_dropout)
        attn_output = bmm(attn_probs, value_states, "attention output")
        attn_output = transpose(view(attn_output, batch, self.heads, seq, self.head_dim), 1, 2)
        attn_output = reshape(attn_output, batch, seq, hidden)
        attn_output = (m / "out_proj").linear(attn_output)
        return attn_output, attn_weights


FAMILY: Final = Family("xglm", XGLM, Support(tensor_parallel={}, meets_fp32=True))
