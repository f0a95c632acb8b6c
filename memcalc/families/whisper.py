"""Whisper (models/whisper/modeling_whisper.py, WhisperForConditionalGeneration): BART's decoder behind an encoder of speech.

The batch is spectrograms of a fixed length and the transcripts' tokens: `seq` is the decoder's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final

from memcalc.core.dims import Dim, merge
from memcalc.core.dtypes import int64
from memcalc.core.ops.axes import permute
from memcalc.core.ops.convolution import convolution
from memcalc.core.ops.elementwise import activation, dropout, scale
from memcalc.core.ops.embedding import embedding
from memcalc.core.ops.loss import cross_entropy
from memcalc.core.ops.routing import index
from memcalc.core.ops.shape import contiguous, reshape, view
from memcalc.core.tensor import Tensor, new_tensor
from memcalc.families.bart import PreNorm, sdpa_of, split_heads
from memcalc.families.base.blocks import Attended, plain_eager_attention
from memcalc.families.base.config import Activation, Count, FamilyConfig, Layers, Probability, check_divides
from memcalc.families.base.encoder_decoder import Decoder, EncoderDecoder, Ends, keys_and_values, shift_tokens_right
from memcalc.families.base.masks import decoder_mask
from memcalc.families.base.module import Buffer, Input, Module, Run, Weight, module
from memcalc.families.base.stack import stacked
from memcalc.families.base.support import Family, Support
from memcalc.families.gpt2 import norm_weights
from memcalc.families.llama import linear_weights

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence


@dataclass(frozen=True, kw_only=True)
class WhisperConfig(FamilyConfig):
    """The fields and defaults of models/whisper/configuration_whisper.py."""

    attribute_map: ClassVar[Mapping[str, str]] = {
        "num_key_value_heads": "encoder_attention_heads",
        "num_attention_heads": "encoder_attention_heads",
        "hidden_size": "d_model",
        "num_hidden_layers": "encoder_layers",
    }
    refused: ClassVar[Mapping[str, Sequence[Any]]] = {
        "apply_spec_augment": (False,),
        "encoder_layerdrop": (0, 0.0),
        "decoder_layerdrop": (0, 0.0),
    }

    vocab_size: Count = 51865
    pad_token_id: int = 50256
    num_mel_bins: Count = 80
    encoder_layers: Layers = 4
    encoder_attention_heads: Count = 6
    encoder_ffn_dim: Count = 1536
    decoder_layers: Layers = 4
    decoder_attention_heads: Count = 6
    decoder_ffn_dim: Count = 1536
    activation_function: Activation = "gelu"
    d_model: Count = 384
    dropout: Probability = 0.0
    attention_dropout: Probability = 0.0
    activation_dropout: Probability = 0.0
    max_source_positions: Count = 1500
    max_target_positions: Count = 448
    decoder_start_token_id: int = 50257
    tie_word_embeddings: bool = True

    def check(self) -> None:
        super().check()
        check_divides(self, "d_model", "encoder_attention_heads")
        check_divides(self, "d_model", "decoder_attention_heads")
        if self.d_model % 2 or self.d_model < 4:
            raise ValueError(f"d_model {self.d_model} has no sinusoids; allowed: even numbers from 4 up")


class Whisper(PreNorm):
    """The program of WhisperForConditionalGeneration. The encoder's positions are sinusoids that are not trained."""

    Config: type[FamilyConfig] = WhisperConfig
    traced_classes = frozenset({"WhisperForCausalLM"})

    def __init__(self, config: Any) -> None:
        EncoderDecoder.__init__(self, config, config.encoder_layers, config.decoder_layers)
        self.vocab = Dim("vocab", config.vocab_size)
        self.hidden = Dim("hidden", config.d_model)
        self.mel = Dim("mel bins", config.num_mel_bins)
        self.frames = Dim("frames", 2 * config.max_source_positions)
        self.source_positions = Dim("source positions", config.max_source_positions)
        self.positions = Dim("positions", config.max_target_positions)
        self.max_seq_len = config.max_target_positions
        self.positions_limit = config.max_target_positions

    def inputs(self, batch: Dim, seq: Dim) -> Sequence[Input]:
        return Input("input_features", (batch, self.mel, self.frames)), Input("labels", (batch, seq), int64)

    @property
    def encoded_length(self) -> Dim:
        return self.source_positions

    def padding(self, batch: Dim, seq: Dim) -> Input:
        """The feature extractor's mask of frames. The model takes it, but uses it only with SpecAugment."""
        return Input("attention_mask", (batch, self.frames), int64)

    @property
    def decoder_cache(self) -> Decoder:
        """Return what the decoder's layers cache: the prompt is the task's tokens; the encoder has all places of its audio."""
        return super().decoder_cache._replace(encoded=self.source_positions.size, prompted=True)

    # --- weights and buffers

    @property
    def untrained(self) -> Collection[str]:
        return ("model.encoder.embed_positions.weight",)

    @property
    def frozen(self) -> Collection[str]:
        return self.untrained

    def weights(self) -> Iterator[Weight]:
        kernel = Dim("3", 3)
        for name, channels in (("conv1", self.mel), ("conv2", self.hidden)):
            yield Weight(f"model.encoder.{name}.weight", (self.hidden, channels, kernel), "embedding")
            yield Weight(f"model.encoder.{name}.bias", (self.hidden,), "embedding")
        yield Weight("model.encoder.embed_positions.weight", (self.source_positions, self.hidden), "embedding")
        yield from stacked("model.encoder.layers", [None] * self.encoder_layers, self.encoder_weights)
        yield from norm_weights("model.encoder.layer_norm", self.hidden)
        yield Weight("model.decoder.embed_tokens.weight", (self.vocab, self.hidden), "embedding")
        yield Weight("model.decoder.embed_positions.weight", (self.positions, self.hidden), "embedding")
        yield from stacked("model.decoder.layers", [None] * self.decoder_layers, self.decoder_weights)
        yield from norm_weights("model.decoder.layer_norm", self.hidden)
        if not self.config.tie_word_embeddings:
            yield Weight("proj_out.weight", (self.vocab, self.hidden), "head")

    def attention_weights(self, name: str) -> Iterator[Weight]:
        """Yield the parameters of an attention as in BART, without the bias of the keys."""
        for projection in ("k_proj", "v_proj", "q_proj", "out_proj"):
            bias = projection != "k_proj"
            yield from linear_weights(f"{name}.{projection}", self.hidden, self.hidden, "attention", bias=bias)
        yield from norm_weights(f"{name}_layer_norm", self.hidden)

    def buffers(self) -> Iterator[Buffer]:
        yield from ()

    # --- forward

    def forward(self, run: Run, input_features: Tensor, labels: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return WhisperForConditionalGeneration.forward(input_features=input_features, labels=labels).loss."""
        root = Module(run, "")
        decoder_input_ids = shift_tokens_right(run, labels)
        encoder_outputs = self.encoder(root / "model.encoder", input_features)
        run.memory.enter(run.memory.phase, None)
        decoder_outputs = self.decoder(root / "model.decoder", decoder_input_ids, encoder_outputs)
        run.memory.enter(run.memory.phase, None)
        lm_logits = self.logits(root, decoder_outputs)
        run.memory.scope = "loss"
        logits = view(lm_logits, merge(*lm_logits.shape[:-1]), self.vocab)
        return cross_entropy(logits, reshape(labels, merge(*labels.shape)))

    def logits(self, root: Module, decoder_outputs: Tensor) -> Tensor:
        root.run.memory.scope = "proj_out"
        tied = self.config.tie_word_embeddings
        return (root / ("model.decoder.embed_tokens" if tied else "proj_out")).linear(decoder_outputs)

    @module
    def encoder(self, m: Module, input_features: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        run = m.run
        inputs_embeds = self.convolutions(m, input_features)
        _all_positions, hidden_states = self.placed_in_encoder(m, inputs_embeds)
        for i in range(self.encoder_layers):
            run.memory.enter(run.memory.phase, i)
            hidden_states = self.call(self.encoder_layer, Module(run, f"{m.path}.layers.*", i), hidden_states, None)
        run.memory.enter(run.memory.phase, None)
        return self.final_norm(m / "layer_norm", hidden_states)

    def convolved(self, m: Module, x: Tensor, places: Dim) -> Tensor:
        with m:
            return convolution(x, m.weight(), m.weight("bias"), places)

    def sinusoids(self, m: Module, positions: Tensor) -> Tensor:
        table = m.weight()
        frozen = Tensor(table.storage, table.shape, table.strides, table.dtype, name=table.name)
        with m:
            return embedding(frozen, positions)

    @module
    def decoder(self, m: Module, ids: Tensor, encoder_hidden_states: Tensor) -> Tensor:
        run = m.run
        inputs_embeds = self.embed_tokens(m, ids)
        _positions, hidden_states = self.placed_in_decoder(m, inputs_embeds)
        mask = decoder_mask(run)
        for i in range(self.decoder_layers):
            run.memory.enter(run.memory.phase, i)
            layer = Module(run, f"{m.path}.layers.*", i)
            hidden_states = self.call(self.decoder_layer, layer, hidden_states, mask, encoder_hidden_states, None)
        run.memory.enter(run.memory.phase, None)
        return self.final_norm(m / "layer_norm", hidden_states)

    # --- what only the first or the last stage of a stack has

    @property
    def ends(self) -> Ends:
        front = [f"model.encoder.{name}.{part}" for name in ("conv1", "conv2") for part in ("weight", "bias")]
        first = {
            "encoder": (*front, "model.encoder.embed_positions.weight"),
            "decoder": ("model.decoder.embed_tokens.weight", "model.decoder.embed_positions.weight"),
        }
        norms = {stack: [f"model.{stack}.layer_norm.{part}" for part in ("weight", "bias")] for stack in first}
        head = "model.decoder.embed_tokens.weight" if self.config.tie_word_embeddings else "proj_out.weight"
        begin = ("convolutions", "embed_tokens", "placed_in_encoder", "placed_in_decoder")
        return Ends(begin, ("final_norm",), first, {"encoder": norms["encoder"], "decoder": (*norms["decoder"], head)})

    def convolutions(self, m: Module, input_features: Tensor) -> Tensor:
        """Return a spectrogram as (batch, source positions, hidden)."""
        inputs_embeds = activation(self.convolved(m / "conv1", input_features, self.frames), "gelu")
        inputs_embeds = activation(self.convolved(m / "conv2", inputs_embeds, self.source_positions), "gelu")
        return permute(inputs_embeds, 0, 2, 1)

    def placed_in_encoder(self, m: Module, inputs_embeds: Tensor) -> tuple[Tensor, Tensor]:
        """Return the positions, which the encoder's frame holds, and the first layer's input."""
        all_positions = new_tensor(m.run.memory, (self.source_positions,), int64, "source positions")
        hidden_states = inputs_embeds + self.sinusoids(m / "embed_positions", all_positions)
        return all_positions, dropout(hidden_states, self.config.dropout)

    def embed_tokens(self, m: Module, ids: Tensor) -> Tensor:
        return (m / "embed_tokens").embedding(ids)

    def placed_in_decoder(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, m: Module, inputs_embeds: Tensor
    ) -> tuple[tuple[Tensor, Tensor], Tensor]:
        """Return the positions and their embeddings, which the decoder's frame holds, and the first layer's input."""
        run = m.run
        _arange = new_tensor(run.memory, (run.seq,), int64, "position ids")
        del _arange
        positions = new_tensor(run.memory, (run.batch, run.seq), int64, "position ids")
        with m / "embed_positions" as table:
            embed_pos = index(table.weight(), positions, "embed_positions")
        return (positions, embed_pos), dropout(inputs_embeds + embed_pos, self.config.dropout)

    def final_norm(self, m: Module, hidden_states: Tensor) -> Tensor:
        return m.layer_norm(hidden_states)

    @module
    def attention(
        self, m: Module, hidden_states: Tensor, key_value_states: Tensor | None, mask: Tensor | None, heads: int
    ) -> Attended:
        """Return the attention's output. The queries are scaled first, and q, k and v are made contiguous."""
        head = Dim("heads", heads), Dim("head_dim", self.hidden.size // heads)
        query_states = contiguous(split_heads(scale((m / "q_proj").linear(hidden_states), "mul"), *head))
        current_states = hidden_states if key_value_states is None else key_value_states

        def project() -> tuple[Tensor, Tensor]:
            key_states = contiguous(split_heads((m / "k_proj").linear(current_states), *head))
            value_states = contiguous(split_heads((m / "v_proj").linear(current_states), *head))
            return key_states, value_states

        key_states, value_states = keys_and_values(m, key_value_states, project)
        if m.run.attention == "eager":
            p = self.config.attention_dropout
            attn_output, attn_weights = plain_eager_attention(query_states, key_states, value_states, mask, p=p)
        else:
            attn_output, attn_weights = sdpa_of(m, key_value_states)(query_states, key_states, value_states, mask)
        attn_output = contiguous(reshape(attn_output, *hidden_states.shape[:-1], merge(*head)))
        attn_output = (m / "out_proj").linear(attn_output)
        return attn_output, attn_weights


FAMILY: Final = Family(
    "whisper",
    Whisper,
    Support(
        tensor_parallel={},
        auto_class="AutoModelForSpeechSeq2Seq",
        decodes_encoded=True,
        encoded_stages=True,
        batch="speech",
    ),
)
