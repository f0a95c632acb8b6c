"""Megatron-BERT (models/megatron_bert/modeling_megatron_bert.py, MegatronBertForCausalLM): BERT, norms before the blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from memcalc.core.dims import ONE_DIM, merge
from memcalc.core.dtypes import fp32, int64
from memcalc.core.ops.elementwise import add_, dropout, scale, softmax
from memcalc.core.ops.matmul import matmul
from memcalc.core.ops.shape import contiguous, first, transpose, view
from memcalc.core.tensor import Tensor, new_tensor
from memcalc.families.base.blocks import Attended
from memcalc.families.base.config import Count, Layers
from memcalc.families.base.masks import bidirectional_mask, causal_mask
from memcalc.families.base.module import Buffer, Module, Weight, module
from memcalc.families.base.support import Family, Support
from memcalc.families.bert import Bert, BertConfig
from memcalc.families.gpt2 import norm_weights
from memcalc.families.llama import linear_weights

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True, kw_only=True)
class MegatronBertConfig(BertConfig):
    """The fields and defaults of models/megatron_bert/configuration_megatron_bert.py."""

    vocab_size: Count = 29056
    hidden_size: Count = 1024
    num_hidden_layers: Layers = 24
    num_attention_heads: Count = 16
    intermediate_size: Count = 4096


class MegatronBert(Bert):
    """The program of MegatronBertForCausalLM and MegatronBertForMaskedLM."""

    Config = MegatronBertConfig
    prefix = "MegatronBert"
    attention_kinds = ("eager",)

    # --- weights and buffers

    def weights(self) -> Iterator[Weight]:
        for name, rows in (("word", self.vocab), ("position", self.positions), ("token_type", self.types)):
            yield Weight(f"bert.embeddings.{name}_embeddings.weight", (rows, self.hidden), "embedding")
        yield from self.stack("bert.encoder.layer")
        yield from norm_weights("bert.encoder.ln", self.hidden)
        yield from self.head_weights()

    def layer_weights(self, i: int) -> Iterator[Weight]:
        yield from norm_weights("attention.ln", self.hidden)
        for name in ("query", "key", "value"):
            yield from linear_weights(f"attention.self.{name}", self.hidden, self.hidden, "attention", bias=True)
        yield from linear_weights("attention.output.dense", self.hidden, self.hidden, "attention", bias=True)
        yield from norm_weights("ln", self.hidden)
        yield from linear_weights("intermediate.dense", self.hidden, self.ffn, "mlp", bias=True)
        yield from linear_weights("output.dense", self.ffn, self.hidden, "mlp", bias=True)

    def buffers(self) -> Iterator[Buffer]:
        yield Buffer("bert.embeddings.position_ids", (ONE_DIM, self.positions), int64)

    # --- forward

    @module
    def model(self, m: Module, ids: Tensor) -> Tensor:
        run = m.run
        attention_mask = run.attention_mask
        if attention_mask is None:
            attention_mask = new_tensor(run.memory, ids.shape, fp32, "positions that count")
        token_types = new_tensor(run.memory, ids.shape, int64, "token type ids")  # lives as long as this forward
        embedding_output = self.embeddings(m / "embeddings", ids, token_types)
        mask = causal_mask(run) if self.config.is_decoder else bidirectional_mask(run)
        del attention_mask  # its name is the mask's now
        hidden_states = embedding_output
        for i in range(self.layers):
            run.memory.enter(run.memory.phase, i)
            layer_outputs = self.call_layer(Module(run, f"{m.path}.encoder.layer.*", i), hidden_states, mask)
            hidden_states = layer_outputs[0]
        run.memory.enter(run.memory.phase, None)
        return (m / "encoder.ln").layer_norm(hidden_states)

    @module
    def embeddings(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, m: Module, ids: Tensor, token_types: Tensor
    ) -> Tensor:
        run = m.run
        positions = first(run.buffers[f"{m.path}.position_ids"], ONE_DIM, run.seq)
        inputs_embeds = (m / "word_embeddings").embedding(ids)
        token_type_embeddings = (m / "token_type_embeddings").embedding(token_types)
        embeddings = inputs_embeds + token_type_embeddings
        position_embeddings = (m / "position_embeddings").embedding(positions)
        embeddings = add_(embeddings, position_embeddings)
        return dropout(embeddings, self.config.hidden_dropout_prob)

    @module
    def layer(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, m: Module, hidden_states: Tensor, mask: Tensor | None
    ) -> Attended:
        attention_output, attention_probs = self.attention(m / "attention", hidden_states, mask)
        layer_output = self.feed_forward(m, attention_output)
        return layer_output, attention_probs

    @module
    def feed_forward(self, m: Module, attention_output: Tensor) -> Tensor:
        ln_output = (m / "ln").layer_norm(attention_output)
        intermediate_output = self.intermediate(m / "intermediate", ln_output)
        return self.output(m / "output", intermediate_output, attention_output)

    @module
    def attention(self, m: Module, hidden_states: Tensor, mask: Tensor | None) -> Attended:
        ln_outputs = (m / "ln").layer_norm(hidden_states)
        context_layer, attention_probs = self.self_attention(m / "self", ln_outputs, mask)
        attention_output = self.output(m / "output", context_layer, hidden_states)
        return attention_output, attention_probs

    @module
    def self_attention(self, m: Module, hidden_states: Tensor, mask: Tensor | None) -> Attended:
        batch, seq, _ = hidden_states.shape
        query_layer, key_layer, value_layer = (
            self.split_heads(m / n, hidden_states) for n in ("query", "key", "value")
        )
        attention_scores = matmul(query_layer, transpose(key_layer, 2, 3), "attention scores")
        attention_scores = scale(attention_scores, "div")
        if mask is not None:
            attention_scores = attention_scores + mask
        attention_probs = softmax(attention_scores)
        attention_probs = dropout(attention_probs, self.config.attention_probs_dropout_prob)
        context_layer = matmul(attention_probs, value_layer, "attention output")
        context_layer = contiguous(transpose(context_layer, 1, 2))
        return view(context_layer, batch, seq, merge(self.heads, self.head_dim)), attention_probs

    @module
    def output(self, m: Module, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
        """Return the output of MegatronBertSelfOutput or MegatronBertOutput."""
        hidden_states = (m / "dense").linear(hidden_states)
        hidden_states = dropout(hidden_states, self.config.hidden_dropout_prob)
        return input_tensor + hidden_states


FAMILY: Final = Family("megatron-bert", MegatronBert, Support(tensor_parallel={}))
