"""BERT (models/bert/modeling_bert.py): BertForMaskedLM where `architectures` names it, as most published configurations do,
else BertLMHeadModel, which AutoModelForCausalLM builds and which has the same parameters.

With `is_decoder` false, which is the default, every position attends to all others and there is no mask. The loss of the
former is of its logits as they are; that of the latter is a causal model's, whatever attends to what.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final

from memcalc.core.dims import ONE_DIM, Dim
from memcalc.core.dtypes import int64
from memcalc.core.ops.elementwise import dropout
from memcalc.core.ops.shape import expand, first, reshape, transpose, view
from memcalc.core.tensor import Tensor, new_tensor
from memcalc.families.base.blocks import (
    Attended,
    act,
    bidirectional_sdpa_attention,
    causal_lm_loss,
    loss_of_logits,
    plain_eager_attention,
    sdpa_attention,
)
from memcalc.families.base.config import Activation, Count, FamilyConfig, Layers, Probability, check_divides
from memcalc.families.base.masks import bidirectional_mask, causal_mask
from memcalc.families.base.module import Buffer, Module, Run, Weight, module
from memcalc.families.base.program import Program
from memcalc.families.base.support import Family, Support
from memcalc.families.gpt2 import norm_weights
from memcalc.families.llama import linear_weights

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence


@dataclass(frozen=True, kw_only=True)
class BertConfig(FamilyConfig):
    """The fields and defaults of models/bert/configuration_bert.py."""

    refused: ClassVar[Mapping[str, Sequence[Any]]] = {
        "add_cross_attention": (False, None),
        "chunk_size_feed_forward": (0,),
    }

    vocab_size: Count = 30522
    pad_token_id: int | None = 0
    hidden_size: Count = 768
    num_hidden_layers: Layers = 12
    num_attention_heads: Count = 12
    intermediate_size: Count = 3072
    hidden_act: Activation = "gelu"
    hidden_dropout_prob: Probability = 0.1
    attention_probs_dropout_prob: Probability = 0.1
    max_position_embeddings: Count = 512
    type_vocab_size: Count = 2
    is_decoder: bool = False
    tie_word_embeddings: bool = True
    architectures: list[str] | None = None

    @property
    def width_of_embedding(self) -> int:
        """Return the width of the embedding's rows. If it is not `hidden_size`, a projection follows."""
        return self.hidden_size

    def check(self) -> None:
        super().check()
        check_divides(self, "hidden_size", "num_attention_heads")


class Bert(Program):
    """The program of BertLMHeadModel and BertForMaskedLM; its relatives override what differs."""

    positional = 2
    Config: type[FamilyConfig] = BertConfig
    cacheless = "fills in tokens and does not generate"
    prefix = "Bert"
    """The beginning of the names of transformers' classes."""
    base = "bert"
    """The name of the model without its head."""
    decoder = "cls.predictions.decoder"
    """The name of the head's last projection; its bias is tied to that of the module around it."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        if getattr(config, "is_decoder", False):
            self.cacheless = "as a decoder is not modelled with a cache"
        self.layers = config.num_hidden_layers
        self.vocab = Dim("vocab", config.vocab_size)
        self.hidden = Dim("hidden", config.hidden_size)
        width: int = config.width_of_embedding
        self.embed = self.hidden if width == config.hidden_size else Dim("embed", width)
        self.ffn = Dim("ffn", config.intermediate_size)
        self.heads = Dim("heads", config.num_attention_heads)
        self.kv_heads = self.heads
        self.head_dim = Dim("head_dim", config.hidden_size // config.num_attention_heads)
        self.positions = Dim("positions", config.max_position_embeddings)
        self.types = Dim("token types", config.type_vocab_size)
        self.max_seq_len = config.max_position_embeddings
        self.positions_limit = config.max_position_embeddings
        self.table = f"{self.base}.embeddings.word_embeddings"
        self.fills_in = self.trains_filling_in(config)
        if self.fills_in:
            self.loss_dtype = None

    def trains_filling_in(self, config: Any) -> bool:
        """Return True if the model fills in masked tokens. If a configuration names both kinds, the causal model is built."""
        causal = {f"{self.prefix}LMHeadModel", f"{self.prefix}ForCausalLM"}
        named: Collection[str] = config.architectures or ()
        return f"{self.prefix}ForMaskedLM" in named and causal.isdisjoint(named)

    # --- weights and buffers

    @property
    def untrained(self) -> Collection[str]:
        """Return the head's bias if the head is not tied: its decoder has a bias too, and this one is not used."""
        return () if self.config.tie_word_embeddings else (f"{self.decoder.rpartition('.')[0]}.bias",)

    def weights(self) -> Iterator[Weight]:
        for name, shape, component, *_ in self.embedding_weights():
            yield Weight(f"{self.base}.{name}", shape, component)
        yield from self.stack(f"{self.base}.encoder.layer")
        yield from self.head_weights()

    def embedding_weights(self) -> Iterator[Weight]:
        for name, rows in (("word", self.vocab), ("position", self.positions), ("token_type", self.types)):
            yield Weight(f"embeddings.{name}_embeddings.weight", (rows, self.embed), "embedding")
        yield from norm_weights("embeddings.LayerNorm", self.embed)
        if self.embed is not self.hidden:
            yield from linear_weights("embeddings_project", self.embed, self.hidden, "embedding", bias=True)

    def layer_weights(self, i: int) -> Iterator[Weight]:
        for name in ("query", "key", "value"):
            yield from linear_weights(f"attention.self.{name}", self.hidden, self.hidden, "attention", bias=True)
        yield from linear_weights("attention.output.dense", self.hidden, self.hidden, "attention", bias=True)
        yield from norm_weights("attention.output.LayerNorm", self.hidden)
        yield from linear_weights("intermediate.dense", self.hidden, self.ffn, "mlp", bias=True)
        yield from linear_weights("output.dense", self.ffn, self.hidden, "mlp", bias=True)
        yield from norm_weights("output.LayerNorm", self.hidden)

    def head_weights(self) -> Iterator[Weight]:
        yield Weight("cls.predictions.bias", (self.vocab,), "head")
        yield from linear_weights("cls.predictions.transform.dense", self.hidden, self.embed, "head", bias=True)
        yield from norm_weights("cls.predictions.transform.LayerNorm", self.embed)
        yield from self.decoder_weights()

    def decoder_weights(self) -> Iterator[Weight]:
        """Yield the head's own weight and bias; none if it is tied."""
        if not self.config.tie_word_embeddings:
            yield from linear_weights(self.decoder, self.embed, self.vocab, "head", bias=True)

    def buffers(self) -> Iterator[Buffer]:
        for name in ("position_ids", "token_type_ids"):
            yield Buffer(f"{self.base}.embeddings.{name}", (ONE_DIM, self.positions), int64)

    # --- forward

    def forward(self, run: Run, ids: Tensor) -> Tensor:
        """Return BertLMHeadModel.forward(input_ids=ids, labels=ids).loss, or that of BertForMaskedLM."""
        root = Module(run, "")
        hidden_states = self.model(root / self.base, ids)
        run.memory.enter(run.memory.phase, None)
        logits = self.head(root, hidden_states)
        return loss_of_logits(run, logits, ids) if self.fills_in else causal_lm_loss(run, logits, ids)

    def head(self, root: Module, hidden_states: Tensor) -> Tensor:
        with root / "cls.predictions":
            return self.decode(root, self.transform(root / "cls.predictions.transform", hidden_states))

    @module
    def transform(self, m: Module, hidden_states: Tensor) -> Tensor:
        hidden_states = (m / "dense").linear(hidden_states)
        hidden_states = act(hidden_states, self.config.hidden_act)
        return (m / "LayerNorm").layer_norm(hidden_states)

    def decode(self, root: Module, hidden_states: Tensor) -> Tensor:
        root.run.memory.scope = self.decoder
        if not self.config.tie_word_embeddings:
            return (root / self.decoder).linear(hidden_states)
        around = root / self.decoder.rpartition(".")[0]
        return root.run.linear(self.decoder, hidden_states, (root / self.table).weight(), around.weight("bias"))

    @module
    def model(self, m: Module, ids: Tensor) -> Tensor:
        run = m.run
        embedding_output = self.embeddings(m / "embeddings", ids)
        if self.embed is not self.hidden:
            embedding_output = (m / "embeddings_project").linear(embedding_output)
        mask = causal_mask(run) if self.config.is_decoder else bidirectional_mask(run)
        hidden_states = embedding_output
        for i in range(self.layers):
            run.memory.enter(run.memory.phase, i)
            hidden_states = self.call_layer(Module(run, f"{m.path}.encoder.layer.*", i), hidden_states, mask)
        run.memory.enter(run.memory.phase, None)
        return hidden_states

    @module
    def embeddings(self, m: Module, ids: Tensor) -> Tensor:
        positions, token_types = self.ids_of(m, ids)
        inputs_embeds = Module(m.run, self.table).embedding(ids)
        token_type_embeddings = (m / "token_type_embeddings").embedding(token_types)
        embeddings = inputs_embeds + token_type_embeddings
        position_embeddings = (m / "position_embeddings").embedding(positions)
        embeddings = self.positioned(m, embeddings + position_embeddings)
        embeddings = (m / "LayerNorm").layer_norm(embeddings)
        return dropout(embeddings, self.config.hidden_dropout_prob)

    def positioned(self, m: Module, embeddings: Tensor) -> Tensor:
        """Return the embeddings with what a related family adds before the norm."""
        return embeddings

    def ids_of(self, m: Module, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the position ids (a view of the buffer) and the token type ids (gathered from their buffer)."""
        run = m.run
        positions = first(run.buffers[f"{m.path}.position_ids"], ONE_DIM, run.seq)
        token_types = new_tensor(run.memory, positions.shape, int64, "token type ids")
        return positions, expand(token_types, run.batch, run.seq)

    @module
    def layer(self, m: Module, hidden_states: Tensor, mask: Tensor | None) -> Tensor:
        attention_output, _weights = self.attention(m / "attention", hidden_states, mask)
        return self.feed_forward(m, attention_output)

    @module
    def feed_forward(self, m: Module, attention_output: Tensor) -> Tensor:
        intermediate_output = self.intermediate(m / "intermediate", attention_output)
        return self.output(m / "output", intermediate_output, attention_output)

    @module
    def attention(self, m: Module, hidden_states: Tensor, mask: Tensor | None) -> Attended:
        attention_output, attn_weights = self.self_attention(m / "self", hidden_states, mask)
        attention_output = self.output(m / "output", attention_output, hidden_states)
        return attention_output, attn_weights

    @module
    def self_attention(self, m: Module, hidden_states: Tensor, mask: Tensor | None) -> Attended:
        query_layer, key_layer, value_layer = (
            self.split_heads(m / n, hidden_states) for n in ("query", "key", "value")
        )
        p = self.config.attention_probs_dropout_prob
        if m.run.attention == "eager":
            attn_output, attn_weights = plain_eager_attention(query_layer, key_layer, value_layer, mask, p=p)
        else:
            attend = sdpa_attention if self.config.is_decoder else bidirectional_sdpa_attention
            attn_output, attn_weights = attend(query_layer, key_layer, value_layer, mask)
        return reshape(attn_output, *hidden_states.shape), attn_weights

    def split_heads(self, m: Module, hidden_states: Tensor) -> Tensor:
        return transpose(view(m.linear(hidden_states), *hidden_states.shape[:2], self.heads, self.head_dim), 1, 2)

    @module
    def output(self, m: Module, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
        """Return the output of BertSelfOutput or BertOutput."""
        hidden_states = (m / "dense").linear(hidden_states)
        hidden_states = dropout(hidden_states, self.config.hidden_dropout_prob)
        return (m / "LayerNorm").layer_norm(hidden_states + input_tensor)

    @module
    def intermediate(self, m: Module, hidden_states: Tensor) -> Tensor:
        hidden_states = (m / "dense").linear(hidden_states)
        return act(hidden_states, self.config.hidden_act)


FAMILY: Final = Family("bert", Bert, Support(tensor_parallel={}))
