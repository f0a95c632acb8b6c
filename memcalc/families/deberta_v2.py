"""DeBERTa v2 and v3 (models/deberta_v2/modeling_deberta_v2.py, DebertaV2ForMaskedLM): attention to content and to positions.

Scores of content and of relative positions are added: each layer projects a table of relative positions, repeats it for
every sequence and gathers from the products what belongs to each distance. Hidden states of all layers are held.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from memcalc.core.dims import ONE_DIM, Dim, divided, merge
from memcalc.core.dtypes import boolean, fp32, int64
from memcalc.core.ops.axes import narrow, permute, repeat, squeeze
from memcalc.core.ops.convolution import convolution
from memcalc.core.ops.elementwise import add_, cast, dropout, like, of_two, over, softmax
from memcalc.core.ops.matmul import bmm, times
from memcalc.core.ops.routing import gather, masked_fill
from memcalc.core.ops.selection import masked_fill_
from memcalc.core.ops.shape import contiguous, expand, first, transpose, unsqueeze, view
from memcalc.core.tensor import Tensor, new_tensor
from memcalc.families.base.blocks import act
from memcalc.families.base.deberta_v2_config import DebertaV2Config
from memcalc.families.base.module import Buffer, Module, Run, Weight, module
from memcalc.families.base.support import Family, Support
from memcalc.families.bert import Bert
from memcalc.families.gpt2 import norm_weights
from memcalc.families.llama import linear_weights

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Iterator


class DebertaV2(Bert):
    """The program of DebertaV2ForMaskedLM."""

    Config = DebertaV2Config
    base = "deberta"
    attention_kinds = ("eager",)
    layers_add_up = True  # to the gradient of the relative positions, behind their norm

    @property
    def external(self) -> tuple[tuple[str, str], ...]:  # type: ignore[override]
        head = () if self.config.legacy else (("lm_predictions.lm_head", f"{self.table}.weight"),)
        return ((f"{self.base}.encoder", f"{self.base}.encoder.rel_embeddings.weight"), *head)

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        if not config.position_biased_input:
            self.positions_limit = None
        self.buckets = Dim("buckets", 2 * config.relative_positions)
        self.conv_kernel = Dim("conv_kernel", config.conv_kernel_size)

    def trains_filling_in(self, config: Any) -> bool:
        """Return True: the family has only a model that fills in masked tokens."""
        return True

    def variant(self, i: int) -> Hashable:
        """Return True for the first layer if a convolution follows it: this layer differs from the others."""
        return bool(self.config.conv_kernel_size) and i == 0

    # --- weights and buffers

    @property
    def untrained(self) -> Collection[str]:
        """Return the weights without a gradient: those of BERT, and the relative positions' if no layer uses them."""
        names = list(super().untrained) if self.config.legacy else []
        if not self.config.attends_to_positions:
            encoder = f"{self.base}.encoder"
            names += [f"{encoder}.rel_embeddings.weight", f"{encoder}.LayerNorm.weight", f"{encoder}.LayerNorm.bias"]
        return names

    def weights(self) -> Iterator[Weight]:
        for name, shape, component, *_ in self.embedding_weights():
            yield Weight(f"{self.base}.embeddings.{name}", shape, component)
        yield from self.stack(f"{self.base}.encoder.layer")
        for name, shape, component, *_ in self.encoder_weights():
            yield Weight(f"{self.base}.encoder.{name}", shape, component)
        yield from self.head_weights()

    def embedding_weights(self) -> Iterator[Weight]:
        yield Weight("word_embeddings.weight", (self.vocab, self.embed), "embedding")
        if self.config.position_biased_input:
            yield Weight("position_embeddings.weight", (self.positions, self.embed), "embedding")
        if self.config.type_vocab_size:
            yield Weight("token_type_embeddings.weight", (self.types, self.embed), "embedding")
        if self.embed is not self.hidden:
            yield from linear_weights("embed_proj", self.embed, self.hidden, "embedding", bias=False)
        yield from norm_weights("LayerNorm", self.hidden)

    def layer_weights(self, i: int) -> Iterator[Weight]:
        for name in self.projections():
            yield from linear_weights(f"attention.self.{name}", self.hidden, self.hidden, "attention", bias=True)
        yield from linear_weights("attention.output.dense", self.hidden, self.hidden, "attention", bias=True)
        yield from norm_weights("attention.output.LayerNorm", self.hidden)
        yield from linear_weights("intermediate.dense", self.hidden, self.ffn, "mlp", bias=True)
        yield from linear_weights("output.dense", self.ffn, self.hidden, "mlp", bias=True)
        yield from norm_weights("output.LayerNorm", self.hidden)

    def projections(self) -> Iterator[str]:
        """Yield the names of the projections. Positions share the content's projections, or have their own."""
        yield from ("query_proj", "key_proj", "value_proj")
        if self.config.relative_attention and not self.config.share_att_key:
            for kind, name in (("c2p", "pos_key_proj"), ("p2c", "pos_query_proj")):
                if kind in self.config.positions_attended:
                    yield name

    def encoder_weights(self) -> Iterator[Weight]:
        """Yield the parameters that all layers share, and those of the convolution after the first layer."""
        if self.config.relative_attention:
            yield Weight("rel_embeddings.weight", (self.buckets, self.hidden), "embedding")
        if self.config.norms_positions:
            yield from norm_weights("LayerNorm", self.hidden)
        if self.config.conv_kernel_size:
            channels = divided(self.hidden, self.config.conv_groups)
            yield Weight("conv.conv.weight", (self.hidden, channels, self.conv_kernel), "convolution")
            yield Weight("conv.conv.bias", (self.hidden,), "convolution")
            yield from norm_weights("conv.LayerNorm", self.hidden)

    def head_weights(self) -> Iterator[Weight]:
        if self.config.legacy:
            yield from super().head_weights()
            return
        yield Weight("lm_predictions.lm_head.bias", (self.vocab,), "head")
        yield from linear_weights("lm_predictions.lm_head.dense", self.hidden, self.hidden, "head", bias=True)
        yield from norm_weights("lm_predictions.lm_head.LayerNorm", self.hidden)

    def buffers(self) -> Iterator[Buffer]:
        yield Buffer(f"{self.base}.embeddings.position_ids", (ONE_DIM, self.positions), int64)

    # --- forward

    def head(self, root: Module, hidden_states: Tensor) -> Tensor:
        if self.config.legacy:
            return super().head(root, hidden_states)
        return self.lm_head(root / "lm_predictions.lm_head", hidden_states)

    @module
    def lm_head(self, m: Module, hidden_states: Tensor) -> Tensor:
        """Return DebertaV2LMPredictionHead.forward, which always uses the embedding's weight."""
        hidden_states = self.transform(m, hidden_states)
        columns = transpose(Module(m.run, self.table).weight(), 0, 1)
        return times(hidden_states, columns, "logits") + m.weight("bias")

    @module
    def model(self, m: Module, ids: Tensor) -> Tensor:
        run = m.run
        mask = run.attention_mask
        if mask is None:
            mask = new_tensor(run.memory, ids.shape, fp32, "mask of ones")
        token_types = new_tensor(run.memory, ids.shape, int64, "token type ids")
        embedding_output = self.embedded(m / "embeddings", ids, token_types, mask)
        encoded_layers = self.encoder(m / "encoder", embedding_output, mask)
        return encoded_layers[-1]

    @module
    def embedded(self, m: Module, ids: Tensor, token_types: Tensor, mask: Tensor) -> Tensor:
        """Return DebertaV2Embeddings.forward."""
        inputs_embeds = (m / "word_embeddings").embedding(ids)
        if self.config.position_biased_input:
            position_ids = first(m.buffer("position_ids"), ONE_DIM, m.run.seq)
            position_embeddings = (m / "position_embeddings").embedding(position_ids)
            embeddings = inputs_embeds + position_embeddings
        else:
            position_embeddings = like(inputs_embeds, "zeros")
            embeddings = inputs_embeds
        if self.config.type_vocab_size:
            token_type_embeddings = (m / "token_type_embeddings").embedding(token_types)
            embeddings = embeddings + token_type_embeddings
        if self.embed is not self.hidden:
            embeddings = (m / "embed_proj").linear(embeddings)
        embeddings = (m / "LayerNorm").layer_norm(embeddings)
        mask = cast(unsqueeze(mask, 2), embeddings.dtype)
        embeddings = embeddings * mask
        return dropout(embeddings, self.config.hidden_dropout_prob)

    @module
    def encoder(self, m: Module, hidden_states: Tensor, input_mask: Tensor) -> list[Tensor]:
        """Return the hidden states before and after each layer: DebertaV2Encoder.forward(output_hidden_states=True)."""
        run = m.run
        mask = self.mask_of_pairs(input_mask)
        relative_pos = self.relative_position(run) if self.config.relative_attention else None
        all_hidden_states = [hidden_states]
        rel_embeddings = self.relative_embeddings(m)
        for i in range(self.layers):
            run.memory.enter(run.memory.phase, i)
            layer = Module(run, f"{m.path}.layer.*", i)
            output_states = self.call_layer(layer, all_hidden_states[-1], mask, relative_pos, rel_embeddings)
            if i == 0 and self.config.conv_kernel_size:
                output_states = self.convolved(m / "conv", hidden_states, output_states, input_mask)
            all_hidden_states.append(output_states)
        run.memory.enter(run.memory.phase, None)
        return all_hidden_states

    def mask_of_pairs(self, mask: Tensor) -> Tensor:
        """Return the output of get_attention_mask, (batch, 1, seq, seq)."""
        keys = unsqueeze(unsqueeze(mask, 1), 2)
        return keys * unsqueeze(squeeze(keys, 2), 3)

    def relative_embeddings(self, m: Module) -> Tensor | None:
        """Return the output of get_rel_embedding."""
        if not self.config.relative_attention:
            return None
        rel_embeddings = (m / "rel_embeddings").weight()
        return (m / "LayerNorm").layer_norm(rel_embeddings) if self.config.norms_positions else rel_embeddings

    def relative_position(self, run: Run) -> Tensor:
        """Return the output of build_relative_position, (1, seq, seq)."""
        q_ids = new_tensor(run.memory, (run.seq,), int64, "query positions")
        k_ids = new_tensor(run.memory, (run.seq,), int64, "key positions")
        rel_pos_ids = of_two(unsqueeze(q_ids, 1), unsqueeze(k_ids, 0), "relative positions")
        if self.config.position_buckets > 0:
            rel_pos_ids = log_bucket_position(rel_pos_ids)
        rel_pos_ids = cast(rel_pos_ids, int64)
        return unsqueeze(rel_pos_ids, 0)

    @module
    def convolved(self, m: Module, hidden_states: Tensor, residual_states: Tensor, input_mask: Tensor) -> Tensor:
        """Return ConvLayer.forward."""
        out = self.convolution(m / "conv", hidden_states)
        rmask = cast(like(input_mask, "one minus the mask"), boolean)
        out = masked_fill_(out, expand(unsqueeze(rmask, 2), *out.shape))
        out = act(dropout(out, self.config.hidden_dropout_prob), self.config.conv_act)
        layer_norm_input = residual_states + out
        output = (m / "LayerNorm").layer_norm(layer_norm_input)
        input_mask = cast(unsqueeze(input_mask, 2), output.dtype)
        return output * input_mask

    @module
    def convolution(self, m: Module, hidden_states: Tensor) -> Tensor:
        channels_first = contiguous(permute(hidden_states, 0, 2, 1))
        out = convolution(channels_first, m.weight(), m.weight("bias"), m.run.seq)
        del channels_first
        return contiguous(permute(out, 0, 2, 1))

    @module
    def layer(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, m: Module, hidden_states: Tensor, mask: Tensor, relative_pos: Tensor | None, rel_embeddings: Tensor | None
    ) -> Tensor:
        self_attention = m / "attention.self"
        self_output = self.disentangled_attention(self_attention, hidden_states, mask, relative_pos, rel_embeddings)
        attention_output = self.output(m / "attention.output", self_output, hidden_states)
        del self_output
        return self.feed_forward(m, attention_output)

    @module
    def disentangled_attention(
        self, m: Module, hidden_states: Tensor, mask: Tensor, relative_pos: Tensor | None, rel_embeddings: Tensor | None
    ) -> Tensor:
        """Return DisentangledSelfAttention.forward."""
        batch, seq, _ = hidden_states.shape
        query_layer = self.transpose_for_scores((m / "query_proj").linear(hidden_states))
        key_layer = self.transpose_for_scores((m / "key_proj").linear(hidden_states))
        value_layer = self.transpose_for_scores((m / "value_proj").linear(hidden_states))
        scale = scaled_size_sqrt(m)
        scaled_keys = over(transpose(key_layer, 1, 2), cast(scale, query_layer.dtype))
        attention_scores = bmm(query_layer, scaled_keys, "attention scores")
        del scaled_keys
        if relative_pos is not None and rel_embeddings is not None:
            rel_embeddings = dropout(rel_embeddings, self.config.hidden_dropout_prob)
            rel_att = self.disentangled_attention_bias(m, query_layer, key_layer, relative_pos, rel_embeddings)
            attention_scores = attention_scores + rel_att
        attention_scores = view(attention_scores, batch, self.heads, seq, seq)
        mask = cast(mask, boolean)
        attention_scores = masked_fill(attention_scores, like(mask, "masked pairs"))
        attention_probs = softmax(attention_scores)
        attention_probs = dropout(attention_probs, self.config.attention_probs_dropout_prob)
        pairs = view(attention_probs, merge(batch, self.heads), seq, seq)
        context_layer = bmm(pairs, value_layer, "attention output")
        context_layer = view(context_layer, batch, self.heads, seq, self.head_dim)
        context_layer = contiguous(permute(context_layer, 0, 2, 1, 3))
        return view(context_layer, batch, seq, self.hidden)

    def transpose_for_scores(self, x: Tensor) -> Tensor:
        """Return a tensor (batch, seq, hidden) as (batch·heads, seq, head_dim)."""
        batch, seq, _ = x.shape
        x = view(x, batch, seq, self.heads, self.head_dim)
        return view(contiguous(permute(x, 0, 2, 1, 3)), merge(batch, self.heads), seq, self.head_dim)

    def disentangled_attention_bias(
        self, m: Module, query_layer: Tensor, key_layer: Tensor, relative_pos: Tensor, rel_embeddings: Tensor
    ) -> Tensor | float:
        """Return the scores of content to positions plus those of positions to content; 0 if the model has neither."""
        kinds = self.config.positions_attended
        relative_pos = unsqueeze(relative_pos, 1)
        rel_embeddings = unsqueeze(narrow(rel_embeddings, 0, self.buckets), 0)
        pos_key_layer, pos_query_layer = self.projected_positions(m, rel_embeddings)
        score: Tensor | float = 0
        if "c2p" in kinds and pos_key_layer is not None:
            scale = scaled_size_sqrt(m)
            c2p_att = bmm(query_layer, transpose(pos_key_layer, 1, 2), "content to positions")
            c2p_pos = like(like(relative_pos, "buckets"), "buckets")  # clamp(relative_pos + att_span)
            c2p_att = gather(c2p_att, bucket_of_pairs(c2p_pos, query_layer))
            score = plus(score, over(c2p_att, cast(scale, c2p_att.dtype)))
        if "p2c" in kinds and pos_query_layer is not None:
            scale = scaled_size_sqrt(m)
            p2c_pos = like(like(like(relative_pos, "neg"), "buckets"), "buckets")  # clamp(-r_pos + att_span)
            p2c_att = bmm(key_layer, transpose(pos_query_layer, 1, 2), "positions to content")
            p2c_att = transpose(gather(p2c_att, bucket_of_pairs(p2c_pos, query_layer)), 1, 2)
            score = plus(score, over(p2c_att, cast(scale, p2c_att.dtype)))
        return score

    def projected_positions(self, m: Module, rel_embeddings: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Return the keys and queries of the relative positions, (batch·heads, buckets, head_dim)."""
        if self.config.share_att_key:
            pos_query_layer = self.projected_position(m / "query_proj", rel_embeddings)
            return self.projected_position(m / "key_proj", rel_embeddings), pos_query_layer
        kinds = self.config.positions_attended
        pos_key_layer = self.projected_position(m / "pos_key_proj", rel_embeddings) if "c2p" in kinds else None
        return pos_key_layer, (
            self.projected_position(m / "pos_query_proj", rel_embeddings) if "p2c" in kinds else None
        )

    def projected_position(self, projection: Module, rel_embeddings: Tensor) -> Tensor:
        return repeat(self.transpose_for_scores(projection.linear(rel_embeddings)), projection.run.batch)


def log_bucket_position(relative_pos: Tensor) -> Tensor:
    """Return the output of make_log_bucket_position, in fp32."""
    sign = like(relative_pos, "sign")
    near = of_two(like(relative_pos, "below", boolean), like(relative_pos, "above", boolean), "near")
    abs_pos = of_two(like(relative_pos, "distances"), near, "distances", int64)
    del near
    log_pos = like(abs_pos, "quotient", fp32)
    for step in ("log", "quotient", "mul", "ceil", "buckets"):
        log_pos = like(log_pos, step)
    return where_near(like(abs_pos, "near", boolean), cast(relative_pos, fp32), of_two(log_pos, sign, "signed buckets"))


def where_near(near: Tensor, relative_pos: Tensor, buckets: Tensor) -> Tensor:
    """Return torch.where of two tensors without gradients."""
    return of_two(relative_pos, buckets, "bucketed positions")


def scaled_size_sqrt(m: Module) -> Tensor:
    """Return the square root of (head width · kinds of scores), an fp32 scalar on the device."""
    return like(like(new_tensor(m.memory, (), fp32, "head width"), "scaled head width"), "scale of the scores")


def bucket_of_pairs(position: Tensor, query_layer: Tensor) -> Tensor:
    """Return a view (batch·heads, seq, seq) of a tensor (1, 1, seq, seq)."""
    return expand(squeeze(position, 0), *query_layer.shape[:2], position.shape[3])


def plus(score: Tensor | float, more: Tensor) -> Tensor:
    """Return score + more: a new tensor if the score is a number, else added in place."""
    return add_(score, more) if isinstance(score, Tensor) else score + more


FAMILY: Final = Family("deberta-v2", DebertaV2, Support(tensor_parallel={}))
