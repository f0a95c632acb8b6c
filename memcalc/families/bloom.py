"""BLOOM (models/bloom/modeling_bloom.py): ALiBi in place of positions, a norm after the embedding, a GELU of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final

from memcalc.core.autograd import Node
from memcalc.core.dims import ONE_DIM, Dim, merge
from memcalc.core.dtypes import fp32, int64
from memcalc.core.ops.elementwise import cast, dropout, like, record, scale, softmax, tanh
from memcalc.core.ops.matmul import baddbmm, bmm
from memcalc.core.ops.shape import reshape, select, transpose, view
from memcalc.core.tensor import Tensor, new_tensor
from memcalc.families.base.blocks import Attended
from memcalc.families.base.config import Count, FamilyConfig, Layers, Probability, check_divides
from memcalc.families.base.dropouts import dropout_module
from memcalc.families.base.masks import causal_mask, keys_of, length_so_far
from memcalc.families.base.module import Module, Run, Weight, module
from memcalc.families.base.support import Family, Support
from memcalc.families.gpt2 import GPT2, norm_weights
from memcalc.families.llama import linear_weights

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence


@dataclass(frozen=True, kw_only=True)
class BloomConfig(FamilyConfig):
    """The fields and defaults of models/bloom/configuration_bloom.py."""

    attribute_map: ClassVar[Mapping[str, str]] = {"num_hidden_layers": "n_layer", "num_attention_heads": "n_head"}
    refused: ClassVar[Mapping[str, Sequence[Any]]] = {"slow_but_exact": (False,)}

    vocab_size: Count = 250880
    hidden_size: Count = 64
    n_layer: Layers = 2
    n_head: Count = 8
    apply_residual_connection_post_layernorm: bool = False
    hidden_dropout: Probability = 0.0
    attention_dropout: Probability = 0.0
    tie_word_embeddings: bool = True

    @classmethod
    def renamed(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        return with_n_embed(super().renamed(config))

    def check(self) -> None:
        super().check()
        check_divides(self, "hidden_size", "n_head")


def with_n_embed(named: dict[str, Any]) -> dict[str, Any]:
    """Return the fields with `n_embed`, the older name of `hidden_size`, which wins; `hidden_size` has to be a number too."""
    n_embed, hidden_size = named.pop("n_embed", None), named.get("hidden_size", 1)
    return named if n_embed is None or type(hidden_size) is not int else {**named, "hidden_size": n_embed}


class Bloom(GPT2):
    """The program of BloomForCausalLM."""

    positional = 1
    Config: type[FamilyConfig] = BloomConfig
    embedding = "transformer.word_embeddings"
    attention_kinds = ("eager",)

    def __init__(self, config: Any) -> None:
        self.config = config
        self.layers = config.n_layer
        self.vocab = Dim("vocab", config.vocab_size)
        self.hidden = Dim("hidden", config.hidden_size)
        self.ffn = Dim("ffn", 4 * config.hidden_size)
        self.heads = Dim("heads", config.n_head)
        self.kv_heads = self.heads
        self.head_dim = Dim("head_dim", config.hidden_size // config.n_head)
        self.max_seq_len = 2048  # no field says it: what BLOOM was trained with

    # --- weights

    def weights(self) -> Iterator[Weight]:
        yield Weight("transformer.word_embeddings.weight", (self.vocab, self.hidden), "embedding")
        yield from norm_weights("transformer.word_embeddings_layernorm", self.hidden)
        yield from self.stack("transformer.h")
        yield from norm_weights("transformer.ln_f", self.hidden)
        if not self.config.tie_word_embeddings:
            yield Weight("lm_head.weight", (self.vocab, self.hidden), "head")

    def layer_weights(self, i: int) -> Iterator[Weight]:
        qkv = merge(self.heads, Dim("3", 3), self.head_dim)
        yield from norm_weights("input_layernorm", self.hidden)
        yield from linear_weights("self_attention.query_key_value", self.hidden, qkv, "attention", bias=True)
        yield from linear_weights("self_attention.dense", self.hidden, self.hidden, "attention", bias=True)
        yield from norm_weights("post_attention_layernorm", self.hidden)
        yield from linear_weights("mlp.dense_h_to_4h", self.hidden, self.ffn, "mlp", bias=True)
        yield from linear_weights("mlp.dense_4h_to_h", self.ffn, self.hidden, "mlp", bias=True)

    # --- forward

    @module
    def model(self, m: Module, ids: Tensor) -> Tensor:
        run = m.run
        inputs_embeds = (m / "word_embeddings").embedding(ids)
        hidden_states = (m / "word_embeddings_layernorm").layer_norm(inputs_embeds)
        _seq_length_with_past = length_so_far(run)
        if run.attention_mask is None:
            slopes = self.slopes(run)
            alibi = self.alibi(run, slopes)
        else:
            alibi = self.padded_alibi(run, run.attention_mask)
        mask = causal_mask(run)
        for i in range(self.layers):
            run.memory.enter(run.memory.phase, i)
            outputs = self.call_layer(Module(run, f"{m.path}.h.*", i), hidden_states, alibi, mask)
            hidden_states = outputs[0]
        run.memory.enter(run.memory.phase, None)
        return (m / "ln_f").layer_norm(hidden_states)

    def slopes(self, run: Run) -> Tensor:
        return new_tensor(run.memory, (self.heads, ONE_DIM, ONE_DIM), fp32, "alibi slopes")

    def padded_alibi(self, run: Run, mask: Tensor) -> Tensor:
        """Return the output of build_alibi_tensor, with positions counted by the mask."""
        slopes = self.slopes(run)
        _arange_tensor = scale(like(mask, "cumulated positions"), "sub") * mask
        alibi = new_tensor(run.memory, (run.batch, self.heads, run.seq), slopes.dtype, "alibi")
        return cast(reshape(alibi, merge(run.batch, self.heads), ONE_DIM, run.seq), run.dtype)

    def alibi(self, run: Run, slopes: Tensor) -> Tensor:
        """Return each head's slope times the position, (batch·heads, 1, seq)."""
        keys = keys_of(run)
        alibi = slopes * new_tensor(run.memory, (keys,), int64, "positions")
        shape = (merge(run.batch, self.heads), ONE_DIM, keys)
        return cast(new_tensor(run.memory, shape, alibi.dtype, "alibi"), run.dtype)

    @module
    def layer(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, m: Module, hidden_states: Tensor, alibi: Tensor, mask: Tensor | None
    ) -> Attended:
        layernorm_output = (m / "input_layernorm").layer_norm(hidden_states)
        after_norm = self.config.apply_residual_connection_post_layernorm
        residual = layernorm_output if after_norm else hidden_states
        attention_output, attn_weights = self.attention(m / "self_attention", layernorm_output, residual, alibi, mask)
        layernorm_output = (m / "post_attention_layernorm").layer_norm(attention_output)
        residual = layernorm_output if after_norm else attention_output
        output = self.mlp(m / "mlp", layernorm_output, residual)
        return output, attn_weights

    @module
    def attention(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, m: Module, hidden_states: Tensor, residual: Tensor, alibi: Tensor, mask: Tensor | None
    ) -> Attended:
        batch, seq, hidden = hidden_states.shape
        batch_heads = merge(batch, self.heads)
        fused_qkv = (m / "query_key_value").linear(hidden_states)
        query_layer, key_layer, value_layer = self.split_qkv(fused_qkv)
        key_layer, value_layer = m.cached(key_layer, value_layer)
        keys = key_layer.shape[2]
        query_layer = reshape(query_layer, batch_heads, seq, self.head_dim)
        key_layer = transpose(reshape(key_layer, batch_heads, keys, self.head_dim), 1, 2)
        value_layer = reshape(value_layer, batch_heads, keys, self.head_dim)
        attention_scores = baddbmm(alibi, query_layer, key_layer, "attention scores")
        attn_weights = view(attention_scores, batch, self.heads, seq, keys)
        if mask is not None:
            attn_weights = attn_weights + mask
        attention_probs = cast(softmax(attn_weights, fp32), query_layer.dtype)
        attention_probs = dropout_module(attention_probs, self.config.attention_dropout)
        attention_probs_reshaped = view(attention_probs, batch_heads, seq, keys)
        context_layer = bmm(attention_probs_reshaped, value_layer, "attention output")
        context_layer = self.merge_heads(context_layer, batch)
        output_tensor = (m / "dense").linear(reshape(context_layer, batch, seq, hidden))
        output_tensor = dropout_add(output_tensor, residual, self.config.hidden_dropout)
        return output_tensor, attention_probs

    def split_qkv(self, fused_qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k and v, three views (batch, heads, seq, head_dim)."""
        batch, seq, _ = fused_qkv.shape
        fused_qkv = view(fused_qkv, batch, seq, self.heads, Dim("3", 3), self.head_dim)
        q, k, v = select(fused_qkv, 3), select(fused_qkv, 3), select(fused_qkv, 3)
        return transpose(q, 1, 2), transpose(k, 1, 2), transpose(v, 1, 2)

    def merge_heads(self, x: Tensor, batch: Dim) -> Tensor:
        _, seq, width = x.shape
        x = transpose(view(x, batch, self.heads, seq, width), 1, 2)
        return reshape(x, batch, seq, merge(self.heads, width))

    @module
    def mlp(self, m: Module, hidden_states: Tensor, residual: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        hidden_states = gelu_module((m / "dense_h_to_4h").linear(hidden_states))
        intermediate_output = (m / "dense_4h_to_h").linear(hidden_states)
        return dropout_add(intermediate_output, residual, self.config.hidden_dropout)


def dropout_add(x: Tensor, residual: Tensor, p: float) -> Tensor:
    """Return residual + dropout(x)."""
    return residual + dropout(x, p)


def gelu_module(x: Tensor) -> Tensor:
    """Run BloomGelu, which an engine with hooks around modules sees as one."""
    visitor = x.memory.visitor
    if visitor is None:
        return bloom_gelu(x)
    visited = visitor.enter("gelu_impl", None)
    out = bloom_gelu(x)
    if visited:
        visitor.leave(done=True)
    return out


def bloom_gelu(x: Tensor) -> Tensor:
    """Return the output of GeLUFunction, transformers' own autograd function: it saves its input and recomputes the rest in
    backward."""
    memory = x.memory
    grad_enabled, memory.grad_enabled = memory.grad_enabled, False
    out = (x * 0.5) * (1.0 + tanh((0.79788 * x) * (1.0 + (0.044715 * x) * x)))
    memory.grad_enabled = grad_enabled
    return record(out, _bloom_gelu_backward, (x,), (x,))


def _bloom_gelu_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    (x,) = node.unpack()
    tanh_out = tanh((0.79788 * x) * (1.0 + (0.044715 * x) * x))
    ff = (0.5 * x) * (_one_minus(tanh_out * tanh_out) * (0.79788 + (0.10703 * x) * x)) + 0.5 * (1.0 + tanh_out)
    return [ff * grads[0]]


def _one_minus(x: Tensor) -> Tensor:
    return scale(x, "sub")


FAMILY: Final = Family("bloom", Bloom, Support(tensor_parallel={}))
