"""T5 (models/t5/modeling_t5.py, T5ForConditionalGeneration)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from memcalc.core.autograd import Constant
from memcalc.core.dims import ONE_DIM, Dim, merge
from memcalc.core.dtypes import boolean, fp16, fp32, int64
from memcalc.core.ops.attention import scaled_dot_product_attention
from memcalc.core.ops.axes import permute
from memcalc.core.ops.elementwise import cast, dropout, like, mean, of_two, power, rsqrt, scale, softmax
from memcalc.core.ops.loss import cross_entropy
from memcalc.core.ops.matmul import matmul
from memcalc.core.ops.selection import clamp_to, where_else
from memcalc.core.ops.shape import contiguous, reshape, transpose, unsqueeze, view
from memcalc.core.tensor import Tensor, new_tensor
from memcalc.families.base.blocks import act
from memcalc.families.base.dropouts import dropout_module
from memcalc.families.base.encoder_decoder import Decoder, EncoderDecoder, Ends, keys_and_values, shift_tokens_right
from memcalc.families.base.masks import bidirectional_mask, decoder_mask
from memcalc.families.base.module import Module, Run, Weight, module
from memcalc.families.base.relative_positions import relative_position_buckets
from memcalc.families.base.stack import stacked
from memcalc.families.base.support import Family, Support
from memcalc.families.base.t5_config import T5Config
from memcalc.families.llama import linear_weights

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memcalc.families.base.config import FamilyConfig


class Attention(NamedTuple):
    """The results of T5Attention: the output, the position bias that later layers take, and for eager the weights."""

    output: Tensor
    position_bias: Tensor
    weights: Tensor | None


class T5(EncoderDecoder):
    """The program of T5ForConditionalGeneration. The table of tokens is tied to the head whatever the configuration says."""

    positional = 6
    Config: type[FamilyConfig] = T5Config
    loss_dtype = None

    def __init__(self, config: Any) -> None:
        super().__init__(config, config.num_layers, config.num_decoder_layers or config.num_layers)
        self.vocab = Dim("vocab", config.vocab_size)
        self.hidden = Dim("hidden", config.d_model)
        self.ffn = Dim("ffn", config.d_ff)
        self.heads = Dim("heads", config.num_heads)
        self.kv_heads = self.heads
        self.head_dim = Dim("head_dim", config.d_kv)
        self.buckets = Dim("buckets", config.relative_attention_num_buckets)
        self.max_seq_len = None

    @property
    def decoder_cache(self) -> Decoder:
        return Decoder(self.decoder_layers, self.heads, self.head_dim)

    @property
    def external(self) -> tuple[tuple[str, str], ...]:  # type: ignore[override]
        """Return the modules that use weights of others: an MLP asks for the dtype of its last layer, which it casts to."""
        dense = [f"{stack}.block.*.layer.{i}.DenseReluDense" for stack, i in (("encoder", 1), ("decoder", 2))]
        return tuple((path, f"{path}.wo.weight") for path in dense)

    # --- weights

    def weights(self) -> Iterator[Weight]:
        yield Weight("shared.weight", (self.vocab, self.hidden), "embedding")
        for name, depth in (("encoder", self.encoder_layers), ("decoder", self.decoder_layers)):
            yield from stacked(f"{name}.block", [i == 0 for i in range(depth)], getattr(self, f"{name}_weights"))
            yield Weight(f"{name}.final_layer_norm.weight", (self.hidden,), "norm")

    def encoder_weights(self, i: int) -> Iterator[Weight]:
        yield from self.self_attention_weights(i)
        yield from self.feed_forward_weights("layer.1")

    def decoder_weights(self, i: int) -> Iterator[Weight]:
        yield from self.self_attention_weights(i)
        yield from self.attention_weights("layer.1.EncDecAttention")
        yield Weight("layer.1.layer_norm.weight", (self.hidden,), "norm")
        yield from self.feed_forward_weights("layer.2")

    def self_attention_weights(self, i: int) -> Iterator[Weight]:
        yield from self.attention_weights("layer.0.SelfAttention")
        if i == 0:
            name = "layer.0.SelfAttention.relative_attention_bias.weight"
            yield Weight(name, (self.buckets, self.heads), "attention")
        yield Weight("layer.0.layer_norm.weight", (self.hidden,), "norm")

    def attention_weights(self, path: str) -> Iterator[Weight]:
        inner = merge(self.heads, self.head_dim)
        for name in ("q", "k", "v"):
            yield from linear_weights(f"{path}.{name}", self.hidden, inner, "attention", bias=False)
        yield from linear_weights(f"{path}.o", inner, self.hidden, "attention", bias=False)

    def feed_forward_weights(self, path: str) -> Iterator[Weight]:
        for name in ("wi_0", "wi_1") if self.config.gated else ("wi",):
            yield from linear_weights(f"{path}.DenseReluDense.{name}", self.hidden, self.ffn, "mlp", bias=False)
        yield from linear_weights(f"{path}.DenseReluDense.wo", self.ffn, self.hidden, "mlp", bias=False)
        yield Weight(f"{path}.layer_norm.weight", (self.hidden,), "norm")

    # --- forward

    def forward(self, run: Run, ids: Tensor) -> Tensor:
        """Return T5ForConditionalGeneration.forward(input_ids=ids, labels=ids).loss."""
        root = Module(run, "")
        hidden_states = self.stack_of_blocks(root / "encoder", ids, self.encoder_layers, None)
        run.memory.enter(run.memory.phase, None)
        decoder_input_ids = shift_tokens_right(run, ids)
        decoder_outputs = self.stack_of_blocks(root / "decoder", decoder_input_ids, self.decoder_layers, hidden_states)
        run.memory.enter(run.memory.phase, None)
        sequence_output = decoder_outputs
        run.memory.scope = "lm_head"
        if self.config.scales_outputs:
            sequence_output = scale(sequence_output, "mul")
        lm_logits = (root / "shared").linear(sequence_output)
        run.memory.scope = "loss"
        logits = view(lm_logits, merge(*lm_logits.shape[:-1]), lm_logits.shape[-1])
        return cross_entropy(logits, view(ids, merge(*ids.shape)))

    def encode(self, run: Run, given: Tensor) -> Tensor:
        return self.stack_of_blocks(Module(run, "encoder"), given, self.encoder_layers, None)

    def decoder_layers_of(self, run: Run, given: Tensor, encoded: Tensor) -> Tensor:
        return self.stack_of_blocks(Module(run, "decoder"), given, self.decoder_layers, encoded)

    def decode(self, run: Run, ids: Tensor, encoded: Tensor) -> Tensor:
        root = Module(run, "")
        sequence_output = decoder_outputs = self.stack_of_blocks(root / "decoder", ids, self.decoder_layers, encoded)
        run.memory.enter(run.memory.phase, None)
        run.memory.scope = "lm_head"
        if self.config.scales_outputs:
            sequence_output = scale(decoder_outputs, "mul")
        return (root / "shared").linear(sequence_output)

    @module
    def stack_of_blocks(self, m: Module, ids: Tensor, depth: int, encoder_hidden_states: Tensor | None) -> Tensor:
        """Return the output of T5Stack. The first block makes the position biases, and all others take them."""
        run = m.run
        inputs_embeds = self.embed_tokens(m, ids)
        is_decoder = encoder_hidden_states is not None
        attention_mask = decoder_mask(run) if is_decoder else bidirectional_mask(run)
        encoder_extended_attention_mask = bidirectional_mask(run) if is_decoder else None
        position_bias = encoder_decoder_position_bias = None
        hidden_states = self.before_blocks(inputs_embeds)
        for i in range(depth):
            run.memory.enter(run.memory.phase, i)
            block = Module(run, f"{m.path}.block.*", i)
            hidden_states, self_attention_position_bias, cross_attention_position_bias = self.call(
                self.block,
                block,
                hidden_states,
                attention_mask,
                position_bias,
                encoder_hidden_states,
                encoder_extended_attention_mask,
                encoder_decoder_position_bias,
            )
            position_bias = self_attention_position_bias
            encoder_decoder_position_bias = cross_attention_position_bias
        run.memory.enter(run.memory.phase, None)
        hidden_states = self.final_norm(m, hidden_states)
        return self.behind_the_norm(hidden_states)

    # --- what only the first or the last stage of a stack has

    def embed_tokens(self, m: Module, ids: Tensor) -> Tensor:
        return Module(m.run, "shared").embedding(ids)

    def before_blocks(self, inputs_embeds: Tensor) -> Tensor:
        return dropout_module(inputs_embeds, self.config.dropout_rate)

    def final_norm(self, m: Module, hidden_states: Tensor) -> Tensor:
        return self.norm(m / "final_layer_norm", hidden_states)

    def behind_the_norm(self, hidden_states: Tensor) -> Tensor:
        return dropout_module(hidden_states, self.config.dropout_rate)

    @property
    def ends(self) -> Ends:
        table = "shared.weight"
        return Ends(
            ("embed_tokens", "before_blocks"),
            ("final_norm", "behind_the_norm"),
            {"encoder": (table,), "decoder": (table,)},
            {
                "encoder": ("encoder.final_layer_norm.weight",),
                "decoder": ("decoder.final_layer_norm.weight", table),
            },
            "layer.0.SelfAttention.relative_attention_bias.weight",
        )

    @module
    def block(
        self,
        m: Module,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        position_bias: Tensor | None,
        encoder_hidden_states: Tensor | None,
        encoder_attention_mask: Tensor | None,
        encoder_decoder_position_bias: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the outputs of T5Block."""
        hidden_states, self_bias, _weights = self.attention_layer(
            m / "layer.0", "SelfAttention", hidden_states, None, attention_mask, position_bias
        )
        hidden_states, _clamp_value = self.clamped(hidden_states)
        cross_bias = None
        if encoder_hidden_states is not None:
            hidden_states, cross_bias, _weights = self.attention_layer(
                m / "layer.1",
                "EncDecAttention",
                hidden_states,
                encoder_hidden_states,
                encoder_attention_mask,
                encoder_decoder_position_bias,
            )
            hidden_states, _clamp_value = self.clamped(hidden_states)
        feed_forward = m / ("layer.1" if encoder_hidden_states is None else "layer.2")
        hidden_states = self.feed_forward(feed_forward, hidden_states)
        hidden_states, _clamp_value = self.clamped(hidden_states)
        return hidden_states, self_bias, cross_bias

    def clamped(self, hidden_states: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the tensor with infinities replaced by the largest number, and that number; done in fp16 only."""
        if hidden_states.dtype is not fp16:
            return hidden_states, None
        _infinite = like(hidden_states, "infinite", boolean)
        any_infinite = new_tensor(hidden_states.memory, (), boolean, "any infinite")
        del _infinite
        clamp_value = like(any_infinite, "clamp value", fp32)
        del any_infinite
        return clamp_to(hidden_states, like(clamp_value, "clamp value"), clamp_value), clamp_value

    @module
    def attention_layer(
        self,
        m: Module,
        name: str,
        hidden_states: Tensor,
        key_value_states: Tensor | None,
        mask: Tensor | None,
        position_bias: Tensor | None,
    ) -> Attention:
        """Return the results of T5LayerSelfAttention or T5LayerCrossAttention."""
        normed_hidden_states = self.norm(m / "layer_norm", hidden_states)
        attention_output, position_bias, attn_weights = self.attention(
            m / name, normed_hidden_states, key_value_states, mask, position_bias
        )
        attention_output = hidden_states + dropout_module(attention_output, self.config.dropout_rate)
        return Attention(attention_output, position_bias, attn_weights)

    @module
    def attention(
        self,
        m: Module,
        hidden_states: Tensor,
        key_value_states: Tensor | None,
        mask: Tensor | None,
        position_bias: Tensor | None,
    ) -> Attention:
        query_states = self.split_heads(m / "q", hidden_states)
        current_states = hidden_states if key_value_states is None else key_value_states

        def project() -> tuple[Tensor, Tensor]:
            return self.split_heads(m / "k", current_states), self.split_heads(m / "v", current_states)

        key_states, value_states = keys_and_values(m, key_value_states, project)
        if position_bias is None:
            keys = key_states.shape[2]
            crosses = key_value_states is not None
            position_bias = self.no_bias(m.run, query_states, keys) if crosses else self.compute_bias(m, keys)
        causal = key_value_states is None and m.path.startswith("decoder")
        attend = self.eager_attention if m.run.attention == "eager" else self.sdpa_attention
        attn_output, attn_weights = attend(query_states, key_states, value_states, mask, position_bias, causal)
        attn_output = contiguous(reshape(attn_output, *hidden_states.shape[:-1], merge(self.heads, self.head_dim)))
        attn_output = (m / "o").linear(attn_output)
        return Attention(attn_output, position_bias, attn_weights)

    def split_heads(self, m: Module, states: Tensor) -> Tensor:
        return transpose(view(m.linear(states), *states.shape[:-1], self.heads, self.head_dim), 1, 2)

    def eager_attention(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, position_bias: Tensor, causal: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return eager_attention_forward: the softmax is in the model's dtype, and the mask is causal if it has to be."""
        attn_weights = scale(matmul(q, transpose(k, 2, 3), "attention scores"), "mul")
        attn_weights = attn_weights + position_bias
        if mask is not None:
            attn_weights = attn_weights + mask
        attn_weights = softmax(attn_weights)
        attn_weights = dropout(attn_weights, self.config.dropout_rate)
        attn_output = matmul(attn_weights, v, "attention output")
        attn_output = contiguous(transpose(attn_output, 1, 2))
        return attn_output, attn_weights

    def sdpa_attention(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, position_bias: Tensor, causal: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return sdpa_attention_forward (integrations/sdpa_attention.py)."""
        is_causal = causal and mask is None and q.shape[2].size > 1
        attention_mask = self.position_bias_mask(q, k, mask, position_bias, is_causal)
        attn_output = scaled_dot_product_attention(q, k, v, attention_mask)
        return contiguous(transpose(attn_output, 1, 2)), None

    def position_bias_mask(
        self, q: Tensor, k: Tensor, mask: Tensor | None, position_bias: Tensor, is_causal: bool
    ) -> Tensor:
        """Return create_position_bias_mask: the bias of the tokens that are seen, made anew in every layer."""
        if is_causal:
            mask = self.causal_positions(q, k)
        if mask is not None:
            position_bias = where_else(mask, position_bias, "position bias of what is seen")
        return contiguous(position_bias)

    def causal_positions(self, q: Tensor, k: Tensor) -> Tensor:
        """Return arange(q_length)[:, None] >= arange(kv_length)[None, :]."""
        queries = unsqueeze(new_tensor(q.memory, (q.shape[2],), int64, "query positions"), 1)
        keys = unsqueeze(new_tensor(q.memory, (k.shape[2],), int64, "key positions"), 0)
        causal_mask = of_two(queries, keys, "causal mask", boolean)
        return unsqueeze(unsqueeze(causal_mask, 0), 0)

    def no_bias(self, run: Run, query_states: Tensor, keys: Dim) -> Tensor:
        """Return the position bias of cross-attention, which is zeros. With recomputed layers it requires a gradient."""
        shape = (ONE_DIM, self.heads, query_states.shape[2], keys)
        zeros = new_tensor(run.memory, shape, query_states.dtype, "no position bias")
        if run.recompute:
            zeros.node = Constant(run.memory, zeros)
        return zeros

    def left_behind(self, run: Run) -> list[Tensor]:
        """Return the zeros of `no_bias` and their gradient, which the graph keeps as a leaf's. A reentrant checkpoint makes them
        in a graph of its own, which is gone."""
        if not run.recompute or run.reentrant:
            return []
        autocast = run.memory.autocast
        casts = (
            None if autocast is None or run.packings else autocast.dtype
        )  # quantised layers return their input's dtype
        dtype = casts or run.dtype
        shape = (ONE_DIM, self.heads, run.seq, run.seq)
        return [
            new_tensor(run.memory, shape, dtype, f"left behind: {name}")
            for name in ("no position bias", "its gradient")
        ]

    def compute_bias(self, m: Module, keys: Dim) -> Tensor:
        run = m.run
        context_position = new_tensor(run.memory, (run.seq,), int64, "query positions")
        context_position = like(unsqueeze(context_position, 1), "query positions")
        memory_position = unsqueeze(new_tensor(run.memory, (keys,), int64, "key positions"), 0)
        relative_position = of_two(memory_position, context_position, "relative positions")
        bidirectional = m.path.startswith("encoder")
        relative_position_bucket = relative_position_buckets(relative_position, bidirectional=bidirectional)
        values = (m / "relative_attention_bias").embedding(relative_position_bucket)
        return unsqueeze(permute(values, 2, 0, 1), 0)

    @module
    def feed_forward(self, m: Module, hidden_states: Tensor) -> Tensor:
        """Return the output of T5LayerFF."""
        forwarded_states = self.norm(m / "layer_norm", hidden_states)
        forwarded_states = self.dense(m / "DenseReluDense", forwarded_states)
        return hidden_states + dropout_module(forwarded_states, self.config.dropout_rate)

    @module
    def dense(self, m: Module, hidden_states: Tensor) -> Tensor:
        """Return the output of T5DenseActDense or T5DenseGatedActDense."""
        name = self.config.activation
        if self.config.gated:
            hidden_gelu = act((m / "wi_0").linear(hidden_states), name)
            hidden_linear = (m / "wi_1").linear(hidden_states)
            hidden_states = hidden_gelu * hidden_linear
        else:
            hidden_states = (m / "wi").linear(hidden_states)
            hidden_states = act(hidden_states, name)
        hidden_states = dropout_module(hidden_states, self.config.dropout_rate)
        hidden_states = cast(hidden_states, (m / "wo").weight().dtype)
        return (m / "wo").linear(hidden_states)

    def norm(self, m: Module, hidden_states: Tensor) -> Tensor:
        """Return the output of T5LayerNorm, which casts to fp32 for the variance only."""
        with m:
            variance = mean(power(cast(hidden_states, fp32), 2))
            hidden_states = hidden_states * rsqrt(variance + 1e-6)
            weight = m.weight()
            if weight.dtype is not fp32:
                hidden_states = cast(hidden_states, weight.dtype)
            return weight * hidden_states


FAMILY: Final = Family(
    "t5", T5, Support(tensor_parallel={}, auto_class="AutoModelForSeq2SeqLM", decodes_encoded=True, encoded_stages=True)
)
