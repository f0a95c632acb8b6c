"""Megatron-DeepSpeed's GPTModel on one tensor-parallel rank, as far as it differs from Megatron-Core's
(`gpt_model.py`).

The layers are those of megatron/model/transformer.py in that repository, with the column- and row-parallel linear
layers of megatron/core/tensor_parallel. SwiGLU and rotary positions are plain torch. Keys and values are repeated to
all heads before attention. The loss keeps one more copy of the logits while it runs. Gradients of weights are
autograd's own, since DeepSpeed has no main gradients. Modules have Megatron-Core's names.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final

from memcalc.core.autograd import Node
from memcalc.core.checkpoint import checkpoint
from memcalc.core.dims import ONE_DIM, Dim, merge
from memcalc.core.dtypes import boolean, fp32, int64
from memcalc.core.ops.elementwise import activation, cast, dropout, like, recording
from memcalc.core.ops.shape import (
    chunk,
    clone,
    contiguous,
    expand,
    reshape,
    rotate_half,
    split,
    transpose,
    unsqueeze,
    view,
)
from memcalc.core.tensor import Tensor, new_tensor
from memcalc.families.base.module import Buffer, Input, Module, Weight, module
from memcalc.kernels import megatron as kernels
from memcalc.megatron.gpt_model import GPTModel
from memcalc.megatron.layers import TensorParallel, column_parallel, row_parallel, vocab_parallel_embedding

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from memcalc.families.base.architecture import Architecture
    from memcalc.families.base.module import Run
    from memcalc.megatron.layout import Layout

SOURCE: Final = "Megatron-DeepSpeed megatron/model/transformer.py; torch tools/autograd/derivatives.yaml"


class LegacyGPTModel(GPTModel):
    """The modules of one rank, or of one of its pipeline stages."""

    attention_kinds = ("flash", "eager")
    weights_source = "Megatron-DeepSpeed megatron/core/tensor_parallel/layers.py"

    def __init__(self, a: Architecture, layout: Layout) -> None:
        super().__init__(a, layout)
        self.positions = Dim("positions", a.positions or 0)

    def weights(self) -> Iterator[Weight]:
        """Yield the weights in the order of `parameters()`. A last stage with a tied head has the whole embedding and
        uses its words."""
        a, layout = self.a, self.layout
        embeds = layout.first or (layout.last and a.tied)
        if embeds:
            yield Weight("embedding.word_embeddings.weight", (self.vocab, self.hidden), "embedding")
        if embeds and a.positions is not None:
            yield Weight("embedding.position_embeddings.weight", (self.positions, self.hidden), "embedding")
        yield from self.stack("decoder.layers")
        if layout.last:
            yield from self.norm_weights("decoder.final_layernorm", self.hidden)
            if not a.tied:
                yield Weight("output_layer.weight", (self.vocab, self.hidden), "head")

    @property
    def external(self) -> tuple[tuple[str, str], ...]:  # type: ignore[override]
        """Return the weights that a module uses without owning them: the model itself computes the logits with the
        embedding's weight."""
        return (("", "embedding.word_embeddings.weight"),) if self.a.tied else ()

    @property
    def untrained(self) -> Collection[str]:
        """Return the names of weights without gradients: only the first stage adds positions."""
        return () if self.layout.first or self.a.positions is None else ("embedding.position_embeddings.weight",)

    def attention_weights(self) -> Iterator[Weight]:
        a = self.a
        yield Weight("self_attention.linear_qkv.weight", (self.qkv, self.hidden), "attention")
        if a.qkv_bias:
            yield Weight("self_attention.linear_qkv.bias", (self.qkv,), "attention")
        yield Weight("self_attention.linear_proj.weight", (self.hidden, self.q), "attention")
        if a.linear_bias:
            yield Weight("self_attention.linear_proj.bias", (self.hidden,), "attention")

    def buffers(self) -> Iterator[Buffer]:
        return iter(())

    def inputs(self, batch: Dim, seq: Dim) -> tuple[Input, ...]:
        """Return the batch of get_batch in pretrain_gpt.py. One mask serves all sequences."""
        given = (
            Input("tokens", (batch, seq), int64),
            Input("labels", (batch, seq), int64),
            Input("loss mask", (batch, seq), fp32),
            Input("attention mask", (seq, seq), boolean),
            Input("position ids", (batch, seq), int64),
        )
        return given if self.a.positions is not None else (*given, Input("rotary angles", (seq, self.head_dim), fp32))

    # --- forward

    def forward(self, run: Run, ids: Tensor, *given: Tensor) -> Tensor:
        """Run GPTModel.forward and loss_func."""
        labels, loss_mask, _, positions, *_ = given
        tp = self.layout.group(run.seq)
        hidden_states = self.stage(run, ids, positions)
        logits = self.logits(run, hidden_states)
        del hidden_states
        return self.loss_of(run, tp, logits, cast(logits, fp32, "logits in fp32"), labels, loss_mask)

    def stage(self, run: Run, given: Tensor, positions: Tensor | None = None) -> Tensor:
        """Run a stage: tokens and their positions, or received hidden states -> hidden states."""
        root, tp = Module(run, ""), self.layout.group(run.seq)
        hidden_states = self.embed(root / "embedding", tp, given, positions) if self.layout.first else given
        return self.decoder(root / "decoder", tp, hidden_states, self.rotary(run, tp))

    def embed(self, m: Module, tp: TensorParallel, ids: Tensor, positions: Tensor | None = None) -> Tensor:
        """Run Embedding.forward. The sequence comes first, which is another memory order if there are several
        sequences."""
        words = m / "word_embeddings"
        embeddings = vocab_parallel_embedding(words, tp, words.weight(), ids, scatters=False)
        with m:
            if self.a.positions is not None:
                assert positions is not None
                embeddings = embeddings + (m / "position_embeddings").embedding(positions)
            if ids.shape[0].size > 1:
                embeddings = clone(embeddings)
            return dropout(embeddings, self.a.hidden_dropout)

    def logits(self, run: Run, hidden_states: Tensor) -> Tensor:
        """Run parallel_lm_logits."""
        root, tp = Module(run, ""), self.layout.group(run.seq)
        if self.a.tied:
            words = root / "embedding.word_embeddings"
            return column_parallel(root, tp, hidden_states, words.weight(), name="output_layer")
        head = root / "output_layer"
        return column_parallel(head, tp, hidden_states, head.weight())

    def loss_of(
        self, run: Run, tp: TensorParallel, held: Tensor, logits: Tensor, labels: Tensor, loss_mask: Tensor
    ) -> Tensor:
        """Return the mean loss over the tokens. `held` is a tensor that the caller's frame also holds: the logits in 16
        bits, or none."""
        run.memory.scope = "loss"
        targets = contiguous(transpose(labels, 0, 1))
        losses = vocab_parallel_cross_entropy(tp, logits, targets)
        del held, logits
        losses = contiguous(transpose(losses, 0, 1))
        weighted = view(losses, merge(*losses.shape)) * view(loss_mask, merge(*loss_mask.shape))
        return _over(_summed(weighted), loss_mask)

    def call_layer(self, m: Module, hidden_states: Tensor, *rest: Any) -> Any:
        run = m.run
        forward = self.layer
        if run.recompute and self.is_recomputed(m.layer or 0):
            forward = partial(checkpoint, run.memory, self.layer, early_stop=False)
        return (
            forward(m, hidden_states, *rest) if run.hooks is None else run.hooks.layer(forward, m, hidden_states, *rest)
        )

    @module
    def layer(
        self, m: Module, hidden_states: Tensor, tp: TensorParallel, angles: Tensor | None, mask: Tensor | None = None
    ) -> Tensor:
        """Run ParallelTransformerLayer.forward, which binds the outputs of both norms to one name."""
        layernorm_output = self.norm(m / "input_layernorm", hidden_states)
        residual = hidden_states
        attention_output = self.self_attention(m / "self_attention", layernorm_output, tp, angles)
        layernorm_input = self.bias_dropout_add(m / "self_attention.linear_proj", attention_output, residual)
        layernorm_output = self.norm(m / "pre_mlp_layernorm", layernorm_input)
        mlp_output = self.mlp(m / "mlp", layernorm_output, tp, self.ffn)
        return self.bias_dropout_add(m / "mlp.linear_fc2", mlp_output, layernorm_input)

    def rotary(self, run: Run, tp: TensorParallel) -> None:
        """Return no angles: they are one of the batch's buffers."""

    @module
    def self_attention(
        self, m: Module, hidden_states: Tensor, tp: TensorParallel, angles: Tensor | None, mask: Tensor | None = None
    ) -> Tensor:
        """Run ParallelAttention.forward. Queries, keys and values are thirds of the joined projection."""
        qkv = m / "linear_qkv"
        mixed_x_layer = column_parallel(qkv, tp, hidden_states, qkv.weight(), qkv.optional("bias"))
        batch, seq, _ = mixed_x_layer.shape
        query_layer, key_layer, value_layer = split(mixed_x_layer, self.q, self.kv, self.kv)
        query_layer = view(query_layer, batch, seq, self.heads, self.head_dim)
        key_layer = self.repeated(view(key_layer, batch, seq, self.kv_heads, self.head_dim))
        value_layer = self.repeated(view(value_layer, batch, seq, self.kv_heads, self.head_dim))
        if self.a.positions is None:
            query_layer, key_layer = rotated(query_layer), rotated(key_layer)
        if m.run.attention == "flash" or batch.size > 1:  # a reshape that is no view if attention is not fused
            query_layer, key_layer, value_layer = (
                batch_first(query_layer),
                batch_first(key_layer),
                batch_first(value_layer),
            )
        context_layer = self.core_attention(m, query_layer, key_layer, value_layer)
        context_layer = view(context_layer, batch, seq, self.q)
        return row_parallel(m / "linear_proj", tp, context_layer, (m / "linear_proj").weight())

    def repeated(self, x: Tensor) -> Tensor:
        """Repeat (batch, seq, kv_heads, head_dim) to (batch, seq, heads, head_dim): a copy, if several heads are
        repeated."""
        batch, seq, kv_heads, width = x.shape
        if kv_heads.size == self.heads.size:
            return x
        if kv_heads.size == 1:
            return expand(x, batch, seq, self.heads, width)
        groups = Dim("heads/kv_heads", self.heads.size // kv_heads.size)
        whole = expand(unsqueeze(x, 3), batch, seq, kv_heads, groups, width)
        return reshape(whole, batch, seq, self.heads, width)

    def core_attention(self, m: Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        """Run FlashSelfAttention or CoreAttention over (batch, seq, heads, head_dim), recomputed with `--recompute
        selective`."""
        memory, p = m.run.memory, self.a.attention_dropout
        q, k, v = transpose(q, 1, 2), transpose(k, 1, 2), transpose(v, 1, 2)
        with m / "core_attention":
            if m.run.attention == "flash":
                out = kernels.te_fused_attention(q, k, v)
                return out if q.shape[0].size == 1 else clone(out)
            if self.layout.selective:
                return checkpoint(memory, kernels.dot_product_attention, q, k, v, p, early_stop=False)
            return kernels.dot_product_attention(q, k, v, p)

    def activation(self, x: Tensor, bias: Tensor | None, ffn: Dim) -> Tensor:
        """Run the activation: bias_gelu_impl as one kernel, or SwiGLU as chunk, silu and mul."""
        if not self.a.gated:
            return super().activation(x, bias, ffn)
        gate, up = chunk(x, 2)
        return activation(gate, "silu") * up


def batch_first(x: Tensor) -> Tensor:
    """Compute `rearrange(x, "s b ... -> b s ...").contiguous()`. With one sequence both orders are the same."""
    return contiguous(x) if x.shape[0].size == 1 else clone(x)


def rotated(x: Tensor) -> Tensor:
    """Run apply_rotary_pos_emb (megatron/model/rotary_pos_embedding.py). cos and sin are made in the tensor's dtype
    every time."""
    shape = (x.shape[1], ONE_DIM, x.shape[3])
    cos = cast(new_tensor(x.memory, shape, fp32, "cos"), x.dtype, "cos")
    sin = cast(new_tensor(x.memory, shape, fp32, "sin"), x.dtype, "sin")
    return (x * cos) + (rotate_half(x) * sin)


# --- the loss (megatron/core/tensor_parallel/cross_entropy.py)


def vocab_parallel_cross_entropy(tp: TensorParallel, logits: Tensor, target: Tensor) -> Tensor:
    """Compute losses of fp32 logits (batch, seq, vocab/tp): a copy with the maximum subtracted, and its exponentials,
    which stay."""
    memory, tokens = logits.memory, target.shape

    def each_token(dtype: Any, name: str) -> Tensor:
        return new_tensor(memory, tokens, dtype, name)

    for name in ("maximum of the logits", "logits of the targets", "sum of exponentials"):
        tp.send(memory, "all_reduce", name, tokens, fp32)
    logits_max, places = each_token(fp32, "maximum"), each_token(int64, "place of the maximum")
    del places
    vocab_parallel_logits = like(logits, "logits less their maximum")
    bounds = [each_token(boolean, "outside the vocabulary") for _ in ("below", "above")]
    target_mask = each_token(boolean, "outside the vocabulary")
    del bounds
    copied = each_token(int64, "targets")
    masked_target = each_token(int64, "targets")
    del copied
    rows = each_token(int64, "rows")
    predicted = each_token(fp32, "logits of the targets")
    predicted = each_token(fp32, "logits of the targets")
    exp_logits = like(vocab_parallel_logits, "softmax")
    sums = each_token(fp32, "sums")
    logarithms = each_token(fp32, "logarithms of the sums")
    losses = each_token(fp32, "loss of each token")
    del logits_max, vocab_parallel_logits, rows, predicted, sums, logarithms
    if recording(logits):
        losses.node = Node(memory, kernels.cross_entropy_backward, (logits,), (exp_logits, target_mask, masked_target))
    return losses


def _summed(weighted: Tensor) -> Tensor:
    out = new_tensor(weighted.memory, (), fp32, "sum of the losses")
    if recording(weighted):
        out.node = Node(weighted.memory, kernels.sum_backward, (weighted,), (), weighted.shape)
    return out


def _over(total: Tensor, loss_mask: Tensor) -> Tensor:
    """Compute `total / loss_mask.sum()`. It saves the sum."""
    count = new_tensor(total.memory, (), fp32, "tokens that count")
    loss = new_tensor(total.memory, (), fp32, "loss")
    if recording(total):
        loss.node = Node(total.memory, _over_backward, (total,), (count,))
    return loss


def _over_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    return [new_tensor(node.memory, (), fp32, "gradient of the sum")]
