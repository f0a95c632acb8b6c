"""BART (models/bart/modeling_bart.py, BartForConditionalGeneration)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final

from memcalc.core.dims import ONE_DIM, Dim, merge
from memcalc.core.dtypes import boolean, fp16, int64
from memcalc.core.ops.elementwise import dropout, like, of_two, scale
from memcalc.core.ops.loss import cross_entropy
from memcalc.core.ops.selection import clamp
from memcalc.core.ops.shape import contiguous, expand, reshape, transpose, unsqueeze, view
from memcalc.core.tensor import Tensor, new_tensor
from memcalc.families.base.blocks import (
    Attended,
    act,
    bidirectional_sdpa_attention,
    plain_eager_attention,
    position_ids,
    sdpa_attention,
)
from memcalc.families.base.config import Activation, Count, FamilyConfig, Layers, Probability, check_divides
from memcalc.families.base.encoder_decoder import Decoder, EncoderDecoder, Ends, keys_and_values, shift_tokens_right
from memcalc.families.base.masks import bidirectional_mask, causal_mask_of_ones
from memcalc.families.base.module import Buffer, Module, Run, Weight, module
from memcalc.families.base.stack import stacked
from memcalc.families.base.support import Family, Support
from memcalc.families.gpt2 import norm_weights
from memcalc.families.llama import linear_weights

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from memcalc.core.dtypes import DType

_OF_EMBEDDINGS: Final = ("embed_positions.weight", "layernorm_embedding.weight", "layernorm_embedding.bias")


@dataclass(frozen=True, kw_only=True)
class BartConfig(FamilyConfig):
    """The fields and defaults of models/bart/configuration_bart.py."""

    attribute_map: ClassVar[Mapping[str, str]] = {
        "num_attention_heads": "encoder_attention_heads",
        "hidden_size": "d_model",
        "num_hidden_layers": "encoder_layers",
    }
    refused: ClassVar[Mapping[str, Sequence[Any]]] = {
        "encoder_layerdrop": (0, 0.0, None),
        "decoder_layerdrop": (0, 0.0, None),
    }

    vocab_size: Count = 50265
    pad_token_id: int = 1
    decoder_start_token_id: int = 2
    max_position_embeddings: Count = 1024
    encoder_layers: Layers = 12
    encoder_ffn_dim: Count = 4096
    encoder_attention_heads: Count = 16
    decoder_layers: Layers = 12
    decoder_ffn_dim: Count = 4096
    decoder_attention_heads: Count = 16
    activation_function: Activation = "gelu"
    d_model: Count = 1024
    scale_embedding: bool | None = False
    dropout: Probability = 0.1
    attention_dropout: Probability = 0.0
    activation_dropout: Probability = 0.0
    tie_word_embeddings: bool = True

    def check(self) -> None:
        super().check()
        check_divides(self, "d_model", "encoder_attention_heads")
        check_divides(self, "d_model", "decoder_attention_heads")


class Bart(EncoderDecoder):
    """The program of BartForConditionalGeneration."""

    positional = 3
    Config: type[FamilyConfig] = BartConfig
    traced_classes = frozenset({"BartForCausalLM"})
    loss_dtype = None

    def __init__(self, config: Any) -> None:
        super().__init__(config, config.encoder_layers, config.decoder_layers)
        self.vocab = Dim("vocab", config.vocab_size)
        self.hidden = Dim("hidden", config.d_model)
        self.positions = Dim("positions", config.max_position_embeddings + 2)
        self.max_seq_len = config.max_position_embeddings
        self.positions_limit = config.max_position_embeddings

    @property
    def decoder_cache(self) -> Decoder:
        heads = self.config.decoder_attention_heads
        return Decoder(self.decoder_layers, Dim("heads", heads), Dim("head_dim", self.hidden.size // heads))

    # --- weights and buffers

    @property
    def untrained(self) -> Collection[str]:
        """Return the name of the shared table if encoder and decoder have their own tables (not tied), else ()."""
        return () if self.config.tie_word_embeddings else ("model.shared.weight",)

    def weights(self) -> Iterator[Weight]:
        tied = self.config.tie_word_embeddings
        yield Weight("model.shared.weight", (self.vocab, self.hidden), "embedding")
        for name, depth in (("encoder", self.encoder_layers), ("decoder", self.decoder_layers)):
            if not tied:
                yield Weight(f"model.{name}.embed_tokens.weight", (self.vocab, self.hidden), "embedding")
            yield Weight(f"model.{name}.embed_positions.weight", (self.positions, self.hidden), "embedding")
            yield from stacked(f"model.{name}.layers", [None] * depth, getattr(self, f"{name}_weights"))
            yield from norm_weights(f"model.{name}.layernorm_embedding", self.hidden)
        if not tied:
            yield Weight("lm_head.weight", (self.vocab, self.hidden), "head")

    def encoder_weights(self, i: int) -> Iterator[Weight]:
        yield from self.attention_weights("self_attn")
        yield from self.feed_forward_weights(self.config.encoder_ffn_dim)

    def decoder_weights(self, i: int) -> Iterator[Weight]:
        yield from self.attention_weights("self_attn")
        yield from self.attention_weights("encoder_attn")
        yield from self.feed_forward_weights(self.config.decoder_ffn_dim)

    def attention_weights(self, name: str) -> Iterator[Weight]:
        for projection in ("k_proj", "v_proj", "q_proj", "out_proj"):
            yield from linear_weights(f"{name}.{projection}", self.hidden, self.hidden, "attention", bias=True)
        yield from norm_weights(f"{name}_layer_norm", self.hidden)

    def feed_forward_weights(self, width: int) -> Iterator[Weight]:
        ffn = Dim("ffn", width)
        yield from linear_weights("fc1", self.hidden, ffn, "mlp", bias=True)
        yield from linear_weights("fc2", ffn, self.hidden, "mlp", bias=True)
        yield from norm_weights("final_layer_norm", self.hidden)

    def buffers(self) -> Iterator[Buffer]:
        yield Buffer("final_logits_bias", (ONE_DIM, self.vocab))

    # --- forward

    def forward(self, run: Run, ids: Tensor) -> Tensor:
        """Return BartForConditionalGeneration.forward(input_ids=ids, labels=ids).loss."""
        root = Module(run, "")
        decoder_input_ids = shift_tokens_right(run, ids)
        encoder_outputs = self.encoder(root / "model.encoder", ids)
        run.memory.enter(run.memory.phase, None)
        decoder_outputs = self.decoder(root / "model.decoder", decoder_input_ids, encoder_outputs)
        run.memory.enter(run.memory.phase, None)
        lm_logits = self.logits(root, decoder_outputs)
        run.memory.scope = "loss"
        logits = view(lm_logits, merge(*lm_logits.shape[:-1]), self.vocab)
        return cross_entropy(logits, view(ids, merge(*ids.shape)))

    def logits(self, root: Module, decoder_outputs: Tensor) -> Tensor:
        root.run.memory.scope = "lm_head"
        lm_logits = self.table(root, "lm_head").linear(decoder_outputs)
        return lm_logits + root.run.buffers["final_logits_bias"]

    def encode(self, run: Run, given: Tensor) -> Tensor:
        return self.encoder(Module(run, "model.encoder"), given)

    def decoder_layers_of(self, run: Run, given: Tensor, encoded: Tensor) -> Tensor:
        return self.decoder(Module(run, "model.decoder"), given, encoded)

    def decode(self, run: Run, ids: Tensor, encoded: Tensor) -> Tensor:
        root = Module(run, "")
        decoder_outputs = self.decoder(root / "model.decoder", ids, encoded)
        run.memory.enter(run.memory.phase, None)
        return self.logits(root, decoder_outputs)

    def loss_in(self, computes: DType, buffers: DType) -> DType:
        """Return the dtype of the loss: the larger of the model's and the buffer's (the head's bias), as they are added."""
        return buffers if any(self.buffers()) and buffers.itemsize > computes.itemsize else computes

    def look_ups_of(self, weight: Weight) -> int:
        """Return how often a forward looks tokens up in a table. Without tied weights each stack has its own, and nobody uses
        the shared one."""
        return self.look_ups if self.config.tie_word_embeddings else int(not weight.name.startswith("model.shared."))

    def table(self, root: Module, name: str) -> Module:
        """Return a table of tokens; with tied weights all tables are the same one."""
        return root / ("model.shared" if self.config.tie_word_embeddings else name)

    @module
    def encoder(self, m: Module, ids: Tensor) -> Tensor:
        run = m.run
        inputs_embeds = self.embed_tokens(m, ids)
        _embed_pos, hidden_states = self.placed_in_encoder(m, inputs_embeds)
        attention_mask = bidirectional_mask(run)
        for i in range(self.encoder_layers):
            run.memory.enter(run.memory.phase, i)
            layer = Module(run, f"{m.path}.layers.*", i)
            hidden_states = self.call(self.encoder_layer, layer, hidden_states, attention_mask)
        return hidden_states

    @module
    def decoder(self, m: Module, ids: Tensor, encoder_hidden_states: Tensor) -> Tensor:
        run = m.run
        inputs_embeds = self.embed_tokens(m, ids)
        positions = position_ids(run)
        attention_mask = causal_mask_of_ones(run)
        encoder_attention_mask = bidirectional_mask(run)
        _embed_pos, hidden_states = self.placed_in_decoder(m, inputs_embeds, positions)
        for i in range(self.decoder_layers):
            run.memory.enter(run.memory.phase, i)
            layer = Module(run, f"{m.path}.layers.*", i)
            hidden_states = self.call(
                self.decoder_layer, layer, hidden_states, attention_mask, encoder_hidden_states, encoder_attention_mask
            )
        return hidden_states

    # --- what only the first stage of a stack has

    @property
    def ends(self) -> Ends:
        table = "model.shared.weight"
        first = {
            stack: (table, *(f"model.{stack}.{name}" for name in _OF_EMBEDDINGS)) for stack in ("encoder", "decoder")
        }
        begin = ("embed_tokens", "placed_in_encoder", "placed_in_decoder")
        return Ends(begin, (), first, {"encoder": (), "decoder": (table,)})

    def placed_in_encoder(self, m: Module, inputs_embeds: Tensor) -> tuple[Tensor, Tensor]:
        """Return the positions' embeddings, and the first layer's input."""
        embed_pos = self.encoder_positions(m / "embed_positions")
        hidden_states = (m / "layernorm_embedding").layer_norm(inputs_embeds + embed_pos)
        return embed_pos, dropout(hidden_states, self.config.dropout)

    def placed_in_decoder(self, m: Module, inputs_embeds: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the positions' embeddings, and the first layer's input."""
        embed_pos = self.learned_positions(m / "embed_positions", positions)
        hidden_states = (m / "layernorm_embedding").layer_norm(inputs_embeds + embed_pos)
        return embed_pos, dropout(hidden_states, self.config.dropout)

    def embed_tokens(self, m: Module, ids: Tensor) -> Tensor:
        """Return the output of BartScaledWordEmbedding."""
        table = self.table(Module(m.run, ""), f"{m.path}.embed_tokens")
        return table.scaled_embedding(ids, lambda looked_up: scale(looked_up, "mul"))

    def encoder_positions(self, m: Module) -> Tensor:
        run = m.run
        positions = unsqueeze(new_tensor(run.memory, (run.seq,), int64, "position ids"), 0)
        return self.learned_positions(m, expand(positions, run.batch, run.seq))

    def learned_positions(self, m: Module, positions: Tensor) -> Tensor:
        """Return the output of BartLearnedPositionalEmbedding. Two rows of its table are never used."""
        return m.embedding(new_tensor(m.run.memory, positions.shape, int64, "position ids"))

    @module
    def encoder_layer(self, m: Module, hidden_states: Tensor, attention_mask: Tensor | None) -> Tensor:
        residual = hidden_states
        heads = self.config.encoder_attention_heads
        hidden_states, _weights = self.attention(m / "self_attn", hidden_states, None, attention_mask, heads)
        hidden_states = dropout(hidden_states, self.config.dropout)
        hidden_states = residual + hidden_states
        hidden_states = (m / "self_attn_layer_norm").layer_norm(hidden_states)
        residual = hidden_states
        hidden_states = self.feed_forward(m, residual)
        if hidden_states.dtype is fp16:
            check_finite(hidden_states)
        return hidden_states

    @module
    def decoder_layer(
        self,
        m: Module,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        encoder_hidden_states: Tensor,
        encoder_attention_mask: Tensor | None,
    ) -> Tensor:
        heads = self.config.decoder_attention_heads
        residual = hidden_states
        hidden_states, _weights = self.attention(m / "self_attn", hidden_states, None, attention_mask, heads)
        hidden_states = dropout(hidden_states, self.config.dropout)
        hidden_states = residual + hidden_states
        hidden_states = (m / "self_attn_layer_norm").layer_norm(hidden_states)
        residual = hidden_states
        hidden_states, _weights = self.attention(
            m / "encoder_attn", hidden_states, encoder_hidden_states, encoder_attention_mask, heads
        )
        hidden_states = dropout(hidden_states, self.config.dropout)
        hidden_states = residual + hidden_states
        hidden_states = (m / "encoder_attn_layer_norm").layer_norm(hidden_states)
        residual = hidden_states
        return self.feed_forward(m, residual)

    def feed_forward(self, m: Module, residual: Tensor) -> Tensor:
        """Run the end of a layer. Its variables belong to the layer's frame."""
        hidden_states = residual + self.mlp(m, residual)
        return (m / "final_layer_norm").layer_norm(hidden_states)

    def mlp(self, m: Module, hidden_states: Tensor) -> Tensor:
        """Return the output of the MLP, which works on each token by itself."""
        hidden_states = act((m / "fc1").linear(hidden_states), self.config.activation_function)
        hidden_states = dropout(hidden_states, self.config.activation_dropout)
        hidden_states = (m / "fc2").linear(hidden_states)
        return dropout(hidden_states, self.config.dropout)

    @module
    def attention(
        self, m: Module, hidden_states: Tensor, key_value_states: Tensor | None, mask: Tensor | None, heads: int
    ) -> Attended:
        head = Dim("heads", heads), Dim("head_dim", self.hidden.size // heads)
        query_states = split_heads((m / "q_proj").linear(hidden_states), *head)
        current_states = hidden_states if key_value_states is None else key_value_states

        def project() -> tuple[Tensor, Tensor]:
            key_states = (m / "k_proj").linear(current_states)
            value_states = (m / "v_proj").linear(current_states)
            return split_heads(key_states, *head), split_heads(value_states, *head)

        key_states, value_states = keys_and_values(m, key_value_states, project)
        if m.run.attention == "eager":
            p = self.config.attention_dropout
            attn_output, attn_weights = plain_eager_attention(query_states, key_states, value_states, mask, p=p)
        else:
            attn_output, attn_weights = sdpa_of(m, key_value_states)(query_states, key_states, value_states, mask)
        attn_output = contiguous(reshape(attn_output, *hidden_states.shape[:-1], merge(*head)))
        attn_output = (m / "out_proj").linear(attn_output)
        return attn_output, attn_weights


def sdpa_of(m: Module, key_value_states: Tensor | None) -> Callable[..., Attended]:
    """Return the sdpa of an attention: causal in the decoder's self-attention, not causal in the others."""
    causal = key_value_states is None and ".decoder." in m.path
    return sdpa_attention if causal else bidirectional_sdpa_attention


class PreNorm(Bart):
    """A stack whose layers apply the norm to their input (mBART, Pegasus, Blenderbot, Whisper)."""

    @module
    def encoder_layer(self, m: Module, hidden_states: Tensor, attention_mask: Tensor | None) -> Tensor:
        residual = hidden_states
        hidden_states = (m / "self_attn_layer_norm").layer_norm(hidden_states)
        heads = self.config.encoder_attention_heads
        hidden_states, _weights = self.attention(m / "self_attn", hidden_states, None, attention_mask, heads)
        hidden_states = dropout(hidden_states, self.config.dropout)
        hidden_states = residual + hidden_states
        residual = hidden_states
        hidden_states = self.feed_forward(m, residual)
        return clamp(hidden_states, 2) if hidden_states.dtype is fp16 else hidden_states

    @module
    def decoder_layer(
        self,
        m: Module,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        encoder_hidden_states: Tensor,
        encoder_attention_mask: Tensor | None,
    ) -> Tensor:
        heads = self.config.decoder_attention_heads
        residual = hidden_states
        hidden_states = (m / "self_attn_layer_norm").layer_norm(hidden_states)
        hidden_states, _weights = self.attention(m / "self_attn", hidden_states, None, attention_mask, heads)
        hidden_states = dropout(hidden_states, self.config.dropout)
        hidden_states = residual + hidden_states
        residual = hidden_states
        hidden_states = (m / "encoder_attn_layer_norm").layer_norm(hidden_states)
        hidden_states, _weights = self.attention(
            m / "encoder_attn", hidden_states, encoder_hidden_states, encoder_attention_mask, heads
        )
        hidden_states = dropout(hidden_states, self.config.dropout)
        hidden_states = residual + hidden_states
        residual = hidden_states
        return self.feed_forward(m, residual)

    def feed_forward(self, m: Module, residual: Tensor) -> Tensor:
        """Run the end of a layer. Its variables belong to the layer's frame."""
        return residual + self.mlp(m, (m / "final_layer_norm").layer_norm(residual))


def split_heads(states: Tensor, heads: Dim, head_dim: Dim) -> Tensor:
    """Return a view (batch, heads, seq, head_dim) of a tensor (batch, seq, hidden)."""
    return transpose(view(states, *states.shape[:-1], heads, head_dim), 1, 2)


def check_finite(states: Tensor) -> None:
    """Run torch.isfinite(states).all(), which is (states == states) * (states.abs() != inf)."""
    equal = like(states, "equal to itself", boolean)
    finite = like(like(states, "absolute"), "not infinite", boolean)
    _both = of_two(equal, finite, "finite", boolean)


FAMILY: Final = Family(
    "bart",
    Bart,
    Support(tensor_parallel={}, auto_class="AutoModelForSeq2SeqLM", decodes_encoded=True, encoded_stages=True),
)
