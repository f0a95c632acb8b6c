"""MPT (models/mpt/modeling_mpt.py): ALiBi in place of positions, no biases, scores in fp32."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final

from memcalc.core.dims import ONE_DIM, Dim, merge
from memcalc.core.dtypes import boolean, fp32
from memcalc.core.ops.elementwise import activation, cast, scale, softmax
from memcalc.core.ops.matmul import matmul
from memcalc.core.ops.selection import clamp, where_else
from memcalc.core.ops.shape import chunk, contiguous, first, reshape, transpose, view
from memcalc.core.tensor import Tensor, new_tensor
from memcalc.errors import quoted
from memcalc.families.base.blocks import Attended
from memcalc.families.base.config import Count, FamilyConfig, Layers, check_divides
from memcalc.families.base.masks import causal_mask, length_so_far
from memcalc.families.base.module import Module, Run, Weight, module
from memcalc.families.base.support import Family, Support
from memcalc.families.gpt2 import GPT2
from memcalc.families.llama import linear_weights

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


@dataclass(frozen=True, kw_only=True)
class MptConfig(FamilyConfig):
    """The fields and defaults of models/mpt/configuration_mpt.py. `expansion_ratio`, `no_bias`, `alibi` and the like are
    fields that no module reads."""

    attribute_map: ClassVar[Mapping[str, str]] = {
        "num_attention_heads": "n_heads",
        "hidden_size": "d_model",
        "num_hidden_layers": "n_layers",
    }

    d_model: Count = 2048
    n_heads: Count = 16
    n_layers: Layers = 24
    max_seq_len: Count = 2048
    vocab_size: Count = 50368
    attn_config: dict[str, Any] | None = None
    tie_word_embeddings: bool = True

    @property
    def clips(self) -> bool:
        """Return True if q, k and v are clamped."""
        return bool((self.attn_config or {}).get("clip_qkv"))

    def check(self) -> None:
        super().check()
        check_divides(self, "d_model", "n_heads")
        clip = (self.attn_config or {}).get("clip_qkv")
        if not isinstance(clip, float | None):
            raise ValueError(f"attn_config clip_qkv {quoted(clip)} is not a number with a decimal point, or null")
        dropped = (self.attn_config or {}).get("attn_pdrop", 0)
        if dropped:
            raise ValueError(f"attn_config attn_pdrop {dropped!r} is not modelled; allowed: 0")


class Mpt(GPT2):
    """The program of MptForCausalLM."""

    positional = 1
    Config: type[FamilyConfig] = MptConfig
    attention_kinds = ("eager",)

    def __init__(self, config: Any) -> None:
        self.config = config
        self.layers = config.n_layers
        self.vocab = Dim("vocab", config.vocab_size)
        self.hidden = Dim("hidden", config.d_model)
        self.ffn = Dim("ffn", 4 * config.d_model)
        self.heads = Dim("heads", config.n_heads)
        self.kv_heads = self.heads
        self.head_dim = Dim("head_dim", config.d_model // config.n_heads)
        self.max_seq_len = config.max_seq_len
        self.positions_limit = config.max_seq_len

    # --- weights

    def weights(self) -> Iterator[Weight]:
        yield Weight("transformer.wte.weight", (self.vocab, self.hidden), "embedding")
        yield from self.stack("transformer.blocks")
        yield Weight("transformer.norm_f.weight", (self.hidden,), "norm")
        if not self.config.tie_word_embeddings:
            yield Weight("lm_head.weight", (self.vocab, self.hidden), "head")

    def layer_weights(self, i: int) -> Iterator[Weight]:
        yield Weight("norm_1.weight", (self.hidden,), "norm")
        qkv = Dim("3·hidden", 3 * self.hidden.size)
        yield from linear_weights("attn.Wqkv", self.hidden, qkv, "attention", bias=False)
        yield from linear_weights("attn.out_proj", self.hidden, self.hidden, "attention", bias=False)
        yield Weight("norm_2.weight", (self.hidden,), "norm")
        yield from linear_weights("ffn.up_proj", self.hidden, self.ffn, "mlp", bias=False)
        yield from linear_weights("ffn.down_proj", self.ffn, self.hidden, "mlp", bias=False)

    # --- forward

    @module
    def model(self, m: Module, ids: Tensor) -> Tensor:
        run = m.run
        inputs_embeds = (m / "wte").embedding(ids)
        hidden_states = inputs_embeds
        shape = (self.heads, ONE_DIM, Dim("max_seq_len", self.config.max_seq_len))
        alibi = new_tensor(run.memory, shape, fp32, "alibi")
        mask = forbidden(run)
        for i in range(self.layers):
            run.memory.enter(run.memory.phase, i)
            outputs = self.call_layer(Module(run, f"{m.path}.blocks.*", i), hidden_states, alibi, mask)
            hidden_states = outputs[0]
        run.memory.enter(run.memory.phase, None)
        return (m / "norm_f").layer_norm(hidden_states)

    @module
    def layer(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, m: Module, hidden_states: Tensor, alibi: Tensor, mask: Tensor
    ) -> Attended:
        layernorm_output = (m / "norm_1").layer_norm(hidden_states)
        residual = hidden_states
        attn_outputs, attn_weights = self.attention(m / "attn", layernorm_output, alibi, mask)
        hidden_states = attn_outputs + residual
        layernorm_output = (m / "norm_2").layer_norm(hidden_states)
        residual = hidden_states
        output = self.mlp(m / "ffn", layernorm_output, residual)
        return output, attn_weights

    @module
    def attention(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, m: Module, hidden_states: Tensor, alibi: Tensor, mask: Tensor
    ) -> Attended:
        batch, seq, _ = hidden_states.shape
        mixed_qkv = (m / "Wqkv").linear(hidden_states)
        if self.config.clips:
            mixed_qkv = clamp(mixed_qkv, 2)
        query_states, key_states, value_states = chunk(mixed_qkv, 3)
        query_states = transpose(reshape(query_states, batch, seq, self.heads, self.head_dim), 1, 2)
        key_states = transpose(reshape(key_states, batch, seq, self.heads, self.head_dim), 1, 2)
        value_states = transpose(reshape(value_states, batch, seq, self.heads, self.head_dim), 1, 2)
        key_states, value_states = m.cached(key_states, value_states)
        attention_scores = scale(matmul(query_states, transpose(key_states, 2, 3), "attention scores"), "mul")
        _query_length = length_so_far(m.run)
        position_bias = first(
            alibi, self.heads, ONE_DIM, key_states.shape[2]
        )  # the last ones, which is the same to bytes
        attention_scores = attention_scores + position_bias
        attention_scores = where_else(mask, attention_scores, "allowed scores")
        attn_weights = cast(softmax(cast(attention_scores, fp32)), value_states.dtype)
        context_states = matmul(attn_weights, value_states, "attention output")
        context_states = contiguous(transpose(context_states, 1, 2))
        context_states = view(context_states, batch, seq, merge(self.heads, self.head_dim))
        attn_output = (m / "out_proj").linear(context_states)
        return attn_output, attn_weights

    @module
    def mlp(self, m: Module, hidden_states: Tensor, residual: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        hidden_states = activation((m / "up_proj").linear(hidden_states), "gelu")
        output = (m / "down_proj").linear(hidden_states)
        return output + residual


def forbidden(run: Run) -> Tensor:
    """Return a boolean mask of the tokens that must not be seen: where the causal mask is not zero."""
    mask = causal_mask(run)
    assert mask is not None
    return cast(mask, boolean)


FAMILY: Final = Family("mpt", Mpt, Support(tensor_parallel={}))
