"""GPTModel (megatron/core/models/gpt/gpt_model.py) on one tensor-parallel rank of one pipeline stage.

Written after transformer_layer.py, attention.py, mlp.py and language_model_embedding.py with Transformer Engine's and
Megatron's fused kernels (`memcalc.kernels.megatron`).
"""

from __future__ import annotations

from collections import Counter
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from memcalc.core.autograd import Node, no_kernel
from memcalc.core.checkpoint import checkpoint
from memcalc.core.dims import ONE_DIM, Dim, merge
from memcalc.core.dtypes import bf16, boolean, fp32
from memcalc.core.ops.elementwise import dropout
from memcalc.core.ops.shape import clone, split, transpose, view
from memcalc.core.ops.shape import part as slice_of
from memcalc.core.recomputed_outputs import kept_or_recomputed, reentrant_checkpoint
from memcalc.core.tensor import Tensor, new_tensor
from memcalc.families.base.module import Buffer, Module, Weight, module
from memcalc.families.base.program import Program
from memcalc.kernels import megatron as kernels
from memcalc.kernels.unfused_attention import has_kernel
from memcalc.megatron import multi_token
from memcalc.megatron.core_attention import core_attention
from memcalc.megatron.fused import bias_activation, bias_dropout_add
from memcalc.megatron.joined import apart, copied
from memcalc.megatron.latent import LatentAttention
from memcalc.megatron.layers import (
    TensorParallel,
    column_parallel,
    gathered_last_dim,
    row_parallel,
    vocab_parallel_embedding,
)
from memcalc.megatron.layout import Layout, padded_vocab, part
from memcalc.megatron.losses import losses
from memcalc.megatron.moe import MoELayer
from memcalc.megatron.offloading import groups_of, groups_to_move, projected
from memcalc.megatron.scatter import scattered

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator

    from memcalc.families.base.architecture import Architecture
    from memcalc.families.base.module import Run


class GPTModel(Program):
    """The modules of one rank. `run.seq` is the shard of the sequence in a tensor between layers."""

    def __init__(self, a: Architecture, layout: Layout) -> None:
        super().__init__(a)
        self.a, self.layout = a, layout
        tp = layout.tensor_parallel
        self.layers = layout.layers
        self.max_seq_len = a.positions
        self.hidden = Dim("hidden", a.hidden)
        self.heads = part("heads", a.heads, tp)
        self.kv_heads = Dim("1 kv_head", 1) if self.shares_kv_heads else part("kv_heads", a.kv_heads, tp)
        self.head_dim = Dim("head_dim", a.head_dim)
        self.q, self.kv = merge(self.heads, self.head_dim), merge(self.kv_heads, self.head_dim)
        qkv = "(heads+2·kv_heads)·head_dim"
        self.whole_qkv = Dim(qkv, (a.heads + 2 * a.kv_heads) * a.head_dim)
        self.qkv = part(qkv, self.whole_qkv.size, tp)
        self.group_heads = Dim("heads of a kv_head", a.heads // a.kv_heads)
        ends = a.rms_norm, a.linear_bias
        self.latent = None if a.latent is None else LatentAttention(a.latent, self.hidden, self.heads, *ends)
        self.ffn = part("ffn", a.ffn, tp)
        self.predicted_part = part("hidden", a.hidden, tp) if a.mtp else self.hidden
        self.vocab = part("padded vocab", padded_vocab(a.vocab, tp), tp)
        self.polynomial = layout.expert_imbalance == 1 and not layout.offloaded  # whose sizes decide what is moved
        if a.experts is not None:
            ranks = layout.expert_parallel, layout.expert_tensor_parallel
            how = layout.expert_imbalance, layout.fuses_accumulation, a.gated, frozenset(layout.recomputed)
            self.moe = MoELayer(a.experts, self.hidden, *ranks, *how)
            self.shared_ffn = part("shared_ffn", a.experts.shared_ffn, tp)

    @property
    def shares_kv_heads(self) -> bool:
        """Tell whether several ranks have the same key/value head (core/transformer/attention.py)."""
        return self.a.kv_heads < self.layout.tensor_parallel

    # --- parameters

    @cached_property
    def weight_classes(self) -> Counter[Weight]:
        """Count the equal weights of all layers."""
        return Counter(weight._replace(layer=None) for weight in self.weights())

    def weights(self) -> Iterator[Weight]:
        a, layout = self.a, self.layout
        if layout.first or (layout.last and (a.tied or a.mtp)):
            yield Weight("embedding.word_embeddings.weight", (self.vocab, self.hidden), "embedding")
        if (layout.first or (layout.last and a.mtp)) and a.positions is not None:
            table = (Dim("positions", a.positions), self.hidden)
            yield Weight("embedding.position_embeddings.weight", table, "embedding")
        yield from self.stack("decoder.layers")
        if layout.has_final_norm:
            yield from self.norm_weights("decoder.final_layernorm", self.hidden)
        if layout.last:
            yield from multi_token.weights(self)
            if not a.tied or (a.mtp and not layout.first):  # not used if it is tied
                yield Weight("output_layer.weight", (self.vocab, self.hidden), "head")

    def layer_weights(self, i: int) -> Iterator[Weight]:
        yield from self.weights_of_layer(routed=self.is_routed(i))

    def weights_of_layer(self, *, routed: bool) -> Iterator[Weight]:
        """Yield the weights of a layer, named from the layer."""
        a = self.a
        yield from self.norm_weights("input_layernorm", self.hidden)
        if self.latent is None:
            yield from self.attention_weights()
        else:
            yield from self.latent.weights("self_attention")
        yield from self.norm_weights("pre_mlp_layernorm", self.hidden)
        if not routed:
            yield from self.mlp_weights("mlp", self.ffn)
            return
        yield from self.moe.weights("mlp")
        assert a.experts is not None
        if a.experts.shared_gate:
            yield Weight("mlp.shared_experts.gate_weight", (ONE_DIM, self.hidden), "mlp")
        if a.experts.shared_ffn:
            yield from self.mlp_weights("mlp.shared_experts", self.shared_ffn)

    def attention_weights(self) -> Iterator[Weight]:
        a = self.a
        yield Weight("self_attention.linear_proj.weight", (self.hidden, self.q), "attention")
        if a.linear_bias:
            yield Weight("self_attention.linear_proj.bias", (self.hidden,), "attention")
        yield Weight("self_attention.linear_qkv.weight", (self.qkv, self.hidden), "attention")
        if a.qkv_bias:
            yield Weight("self_attention.linear_qkv.bias", (self.qkv,), "attention")
        if a.qk_norm:
            yield from self.norm_weights("self_attention.q_layernorm", self.head_dim)
            yield from self.norm_weights("self_attention.k_layernorm", self.head_dim)

    def mlp_weights(self, path: str, ffn: Dim) -> Iterator[Weight]:
        fc1 = Dim(f"2·{ffn.name}", 2 * ffn.size) if self.a.gated else ffn
        yield Weight(f"{path}.linear_fc1.weight", (fc1, self.hidden), "mlp")
        if self.a.linear_bias:
            yield Weight(f"{path}.linear_fc1.bias", (fc1,), "mlp")
        yield Weight(f"{path}.linear_fc2.weight", (self.hidden, ffn), "mlp")
        if self.a.linear_bias:
            yield Weight(f"{path}.linear_fc2.bias", (self.hidden,), "mlp")

    def is_routed(self, i: int) -> bool:
        """Tell whether the stage's layer `i` has experts."""
        return bool(self.layout.routed) and self.layout.routed[i]

    def has_experts(self, m: Module) -> bool:
        """Tell whether a layer of the decoder, or of multi-token prediction, has experts."""
        return self.a.predicts_by_experts if m.layer is None else self.is_routed(m.layer)

    def variant(self, i: int) -> Hashable:
        return self.is_routed(i), self.is_recomputed(i)

    def is_recomputed(self, i: int) -> bool:
        """Tell whether the stage's layer `i` is recomputed when recomputation is on (`--recompute-method block`)."""
        return self.layout.recompute_layers is None or i < self.layout.recompute_layers

    def norm_weights(self, name: str, width: Dim) -> Iterator[Weight]:
        yield Weight(f"{name}.weight", (width,), "norm")
        if not self.a.rms_norm:
            yield Weight(f"{name}.bias", (width,), "norm")

    def buffers(self) -> Iterator[Buffer]:
        if self.a.positions is None:
            yield Buffer("rotary_pos_emb.inv_freq", (Dim("head_dim/2", self.a.head_dim // 2),), fp32)

    def branch(self, batch: int, seq: int) -> Hashable:
        return (batch == 1, seq == 1, self.fuses_softmax(batch, seq)) if self.polynomial else (batch, seq)

    def fuses_softmax(self, batch: int, shard: int) -> bool:
        """Tell whether Transformer Engine's unfused attention has a kernel for the softmax of its 16-bit scores."""
        return has_kernel(bf16, batch * self.heads.size, self.layout.tokens(shard))

    # --- forward

    def forward(self, run: Run, ids: Tensor) -> Tensor:
        root = Module(run, "")
        tp = self.layout.group(run.seq)
        mask = self.attention_mask(run, tp)
        labels = Tensor(ids.storage, (run.batch, tp.whole), (tp.whole.size, 1), ids.dtype)
        groups = groups_to_move(self, run)
        hidden_states = (
            self.embed(root / "embedding", tp, labels, labels) if self.layout.first else self.received(run, tp)
        )
        angles = self.rotary(run, tp)
        hidden_states = self.decoder(root / "decoder", tp, hidden_states, angles, mask)
        if not self.layout.last:
            return hidden_states if groups is None else groups.ends(hidden_states)
        last_hidden_states = hidden_states
        if self.a.mtp:
            joined = multi_token.predicted(self, run, tp, labels, hidden_states, angles, mask)
            last_hidden_states = multi_token.with_losses(self, run, tp, joined, labels)
            del joined
        logits = self.output(run, tp, last_hidden_states)
        return kernels.mean_loss(run, losses(self.layout.loss, run, tp, logits, labels))

    def output(self, run: Run, tp: TensorParallel, hidden_states: Tensor) -> Tensor:
        """Run the output layer."""
        root = Module(run, "")
        run.memory.scope = "output_layer"
        tied = root / "embedding.word_embeddings"
        weight = (tied if self.a.tied else root / "output_layer").weight()
        return column_parallel(root / "output_layer", tp, hidden_states, weight)

    def attention_mask(self, run: Run, tp: TensorParallel) -> Tensor | None:
        """Return this rank's rows of the mask that the first and last stage's get_batch moves to the GPU, or None. The
        mask stays until forward is over, and for backward if a checkpoint keeps it (megatron/training/utils.py)."""
        layout, ranks = self.layout, self.layout.context_parallel
        if not layout.mask_in_batch or not (layout.first or layout.last):
            return None
        columns = tp.whole if ranks == 1 else Dim("seq", ranks * tp.whole.size, tuple(ranks * c for c in tp.whole.poly))  # type: ignore[arg-type]
        mask = new_tensor(run.memory, (run.batch, columns, columns), boolean, "attention mask of the batch")
        if ranks == 1:
            return mask
        return new_tensor(run.memory, (run.batch, tp.whole, columns), boolean, "rows of the mask")

    def received(self, run: Run, tp: TensorParallel) -> Tensor:
        """Return the previous stage's output, received into a buffer that requires a gradient."""
        shape = (run.batch, tp.shard, self.hidden)
        out = new_tensor(run.memory, shape, run.dtype, "received hidden states")
        out.node = Node(run.memory, _sent_back, ())
        return out

    def embed(self, m: Module, tp: TensorParallel, ids: Tensor, positions: Tensor) -> Tensor:
        learned = self.a.positions is not None
        scatters = tp.sequence_parallel and not learned
        words = m / "word_embeddings"
        word_embeddings = vocab_parallel_embedding(words, tp, words.weight(), ids, scatters=scatters)
        with m:
            embeddings = word_embeddings
            if learned:
                position_embeddings = (m / "position_embeddings").embedding(positions)
                embeddings = word_embeddings + position_embeddings
            if not scatters:
                embeddings = copied(embeddings, "sequence first")
            if tp.sequence_parallel and learned:
                embeddings = scattered(tp, embeddings, m.path)
            return dropout(embeddings, self.a.hidden_dropout)

    def rotary(self, run: Run, tp: TensorParallel) -> Tensor | None:
        """Return the angles of all positions in fp32 (RotaryEmbedding.forward); None if they are not needed here."""
        if self.a.positions is not None or self.latent is not None:
            return None
        return new_tensor(run.memory, (tp.whole, self.head_dim), fp32, "rotary angles")

    @module
    def decoder(
        self, m: Module, tp: TensorParallel, hidden_states: Tensor, angles: Tensor | None, mask: Tensor | None = None
    ) -> Tensor:
        run = m.run
        for i in range(self.layers):
            run.memory.enter(run.memory.phase, i)
            hidden_states = self.call_layer(Module(run, f"{m.path}.layers.*", i), hidden_states, tp, angles, mask)
        run.memory.enter(run.memory.phase, None)
        if self.layout.has_final_norm:
            return self.norm(m / "final_layernorm", hidden_states)
        return hidden_states if self.layers or self.layout.first else clone(hidden_states)

    def call_layer(self, m: Module, hidden_states: Tensor, *rest: Any) -> Any:
        """Call a layer, or checkpoint the whole layer (transformer_block.py, _checkpointed_forward)."""
        if m.run.recompute and self.is_recomputed(m.layer or 0):
            return checkpoint(m.run.memory, self.layer, m, hidden_states, *rest, early_stop=False)
        return self.layer(m, hidden_states, *rest)

    @module
    def layer(
        self, m: Module, hidden_states: Tensor, tp: TensorParallel, angles: Tensor | None, mask: Tensor | None
    ) -> Tensor:
        residual, recomputed, routed = hidden_states, self.layout.recomputed, self.has_experts(m)
        groups = groups_of(m.memory)
        if self.latent is not None:  # other input norms are parts of a linear layer
            hidden_states = groups.start("attn_norm", hidden_states)
        own_norms = "layernorm" in recomputed  # those that no linear layer has taken in
        of_input = partial(self.norm, m / "input_layernorm")
        input_layernorm = kept_or_recomputed(of_input, recomputes=own_norms and self.latent is not None)
        input_layernorm_output = input_layernorm.checkpoint(hidden_states)
        groups.stop()
        attention = m / "self_attention"
        if self.latent is None:
            attention_output = self.self_attention(attention, input_layernorm_output, tp, angles, mask)
        else:
            core = partial(self.core_attention, mask=mask)
            again = "mla_up_proj" in recomputed
            attention_output = self.latent.forward(attention, input_layernorm_output, tp, core, again)
        input_layernorm.discard_output_and_register_recompute(attention_output)
        hidden_states = self.bias_dropout_add(m / "self_attention.linear_proj", attention_output, residual)
        if self.latent is not None:
            groups.commit("attn_norm", residual)
        residual = hidden_states
        if self.layout.fp8 is not None:  # saved by no layer in 16 bits
            del input_layernorm_output
        if not routed and "mlp" in recomputed:
            mlp_output = reentrant_checkpoint(partial(self.normed_mlp, m, tp), hidden_states)
            return self.bias_dropout_add(m / "mlp.linear_fc2", mlp_output, residual)
        of_mlp = partial(self.norm, m / "pre_mlp_layernorm")
        pre_mlp_layernorm = kept_or_recomputed(of_mlp, recomputes=own_norms and routed)
        if routed:
            hidden_states = groups.start("mlp_norm", hidden_states)
        pre_mlp_layernorm_output = pre_mlp_layernorm.checkpoint(hidden_states)
        groups.stop()
        if routed:
            mlp_output = self.moe.forward(m / "mlp", pre_mlp_layernorm_output, partial(self.shared_mlp, tp))
        else:
            mlp_output = self.mlp(m / "mlp", pre_mlp_layernorm_output, tp, self.ffn)
        pre_mlp_layernorm.discard_output_and_register_recompute(mlp_output)
        hidden_states = self.bias_dropout_add(m / "mlp.linear_fc2", mlp_output, residual)
        if routed:
            groups.commit("mlp_norm", residual)
        return hidden_states

    def normed_mlp(self, m: Module, tp: TensorParallel, hidden_states: Tensor) -> Tensor:
        """Run a dense MLP with the norm before it, which its first linear layer has taken in."""
        return self.mlp(m / "mlp", hidden_states, tp, self.ffn, m / "pre_mlp_layernorm")

    def shared_mlp(self, tp: TensorParallel, m: Module, hidden_states: Tensor) -> Tensor:
        return self.mlp(m, hidden_states, tp, self.shared_ffn)

    def norm(self, m: Module, x: Tensor) -> Tensor:
        return kernels.either_norm(m, x, rms=self.a.rms_norm)

    @module
    def self_attention(
        self, m: Module, hidden_states: Tensor, tp: TensorParallel, angles: Tensor | None, mask: Tensor | None
    ) -> Tensor:
        mixed_qkv = self.column(m / "linear_qkv", tp, hidden_states, (m / "linear_qkv").optional("bias"))
        (batch, seq, _), heads = mixed_qkv.shape, self.heads
        if self.shares_kv_heads:
            mixed_qkv = gathered_last_dim(tp, mixed_qkv, self.whole_qkv, "joined queries, keys and values")
            heads = self.group_heads
            own = Dim("queries, key and value of a group", (heads.size + 2) * self.head_dim.size)
            mixed_qkv = slice_of(mixed_qkv, own)
        query, key, value = split(mixed_qkv, merge(heads, self.head_dim), self.kv, self.kv)
        query = view(query, batch, seq, heads, self.head_dim)
        if self.shares_kv_heads:
            query = slice_of(query, self.heads, 2)
        elif self.group_heads.size > 1 and self.kv_heads.size > 1 and angles is None:
            query = copied(query, "query")  # heads of several groups are not one dim of the joined projection
        key = view(key, batch, seq, self.kv_heads, self.head_dim)
        value = transpose(view(value, batch, seq, self.kv_heads, self.head_dim), 1, 2)
        if self.a.qk_norm:
            query, key = self.norm(m / "q_layernorm", query), self.norm(m / "k_layernorm", key)
        query, key = transpose(query, 1, 2), transpose(key, 1, 2)
        if angles is not None:
            query, key = kernels.rotated(query, angles), kernels.rotated(key, angles)
        if m.run.attention != "eager":
            query, key, value = apart(query, key, value, joined=mixed_qkv)
        del mixed_qkv
        groups = groups_of(m.memory)
        query = groups.start("core_attn", query)
        core_attn_out = self.core_attention(m, query, key, value, mask)
        groups.stop()
        groups.commit("core_attn", query, key, value)
        core_attn_out = view(core_attn_out, batch, seq, self.q)
        del query, key, value
        return projected(self.row, m / "linear_proj", tp, core_attn_out)

    def core_attention(self, m: Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        return core_attention(m, self.layout, self.a.attention_dropout, (q, k, v), mask)

    @module
    def mlp(self, m: Module, hidden_states: Tensor, tp: TensorParallel, ffn: Dim, norm: Module | None = None) -> Tensor:
        """Run MLP. `norm` is the norm that its first linear layer has taken in, if it is not run before."""
        fc1, fc2 = m / "linear_fc1", m / "linear_fc2"
        intermediate_parallel = self.column(fc1, tp, hidden_states if norm is None else self.norm(norm, hidden_states))
        bias = fc1.optional("bias")
        if self.a.squared_relu and bias is not None:
            intermediate_parallel, bias = intermediate_parallel + bias, None
        intermediate_parallel = self.activation(intermediate_parallel, bias, ffn)
        return self.row(fc2, tp, intermediate_parallel)

    def column(self, m: Module, tp: TensorParallel, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Run a column-parallel layer of attention or of an MLP."""
        return column_parallel(m, tp, x, m.weight(), bias)

    def row(self, m: Module, tp: TensorParallel, x: Tensor) -> Tensor:
        """Run a row-parallel layer of attention or of an MLP."""
        return row_parallel(m, tp, x, m.weight())

    @property
    def activation_name(self) -> str:
        return "squared ReLU" if self.a.squared_relu else "gated" if self.a.gated else "gelu"

    def activation(self, x: Tensor, bias: Tensor | None, ffn: Dim) -> Tensor:
        return bias_activation(x, bias, ffn, self.activation_name)

    def bias_dropout_add(self, m: Module, x: Tensor, residual: Tensor) -> Tensor:
        return bias_dropout_add(x, m.optional("bias"), residual, self.a.hidden_dropout)


@no_kernel
def _sent_back(node: Node, grads: list[Tensor]) -> list[Tensor]:
    return []
