"""MLASelfAttention (megatron/core/transformer/multi_latent_attention.py) on one tensor-parallel rank.

The layer is that of get_gpt_layer_with_transformer_engine_spec. The projections to the latents are whole on every rank
and run on its shard of the sequence. The projections from the latents are column-parallel and follow a norm. Fused
kernels apply rotary positions (core/fusions/fused_mla_yarn_rope_apply.py), to queries in place, with angles that a
layer has cached.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING

from memcalc.core.autograd import Node
from memcalc.core.dims import Dim, merge
from memcalc.core.ops.elementwise import recording
from memcalc.core.ops.shape import contiguous, split, transpose, view
from memcalc.core.recomputed_outputs import kept_or_recomputed
from memcalc.core.tensor import Tensor, new_tensor
from memcalc.families.base.module import Module, Weight, module
from memcalc.kernels import megatron as kernels
from memcalc.kernels.liger import packed
from memcalc.megatron.layers import TensorParallel, column_parallel, row_parallel
from memcalc.megatron.offloading import groups_of, projected

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from memcalc.families.base.architecture import Latent


@dataclass(frozen=True)
class LatentAttention:
    """Attention whose queries, keys and values are projected from latents."""

    latent: Latent
    hidden: Dim
    heads: Dim
    """The heads of one rank."""
    rms_norm: bool = True
    biased: bool = False
    """True if the projection of the output has a bias. The others have none (bias=False)."""

    @cached_property
    def kv_rank(self) -> Dim:
        return Dim("kv_lora_rank", self.latent.kv_rank)

    @cached_property
    def rope(self) -> Dim:
        return Dim("qk_rope_head_dim", self.latent.rope_dim)

    @cached_property
    def qk(self) -> Dim:
        return Dim("(qk_nope_head_dim+qk_rope_head_dim)", self.latent.nope_dim + self.latent.rope_dim)

    @cached_property
    def v(self) -> Dim:
        return Dim("v_head_dim", self.latent.v_dim)

    @cached_property
    def kv(self) -> Dim:
        return Dim("(qk_nope_head_dim+v_head_dim)", self.latent.nope_dim + self.latent.v_dim)

    @cached_property
    def compressed(self) -> Dim:
        return Dim("(kv_lora_rank+qk_rope_head_dim)", self.latent.kv_rank + self.latent.rope_dim)

    def weights(self, path: str) -> Iterator[Weight]:
        q, kv, out = (merge(self.heads, width) for width in (self.qk, self.kv, self.v))
        yield Weight(f"{path}.linear_proj.weight", (self.hidden, out), "attention")
        if self.biased:
            yield Weight(f"{path}.linear_proj.bias", (self.hidden,), "attention")
        if self.latent.q_rank is None:
            yield Weight(f"{path}.linear_q_proj.weight", (q, self.hidden), "attention")
        else:
            q_rank = Dim("q_lora_rank", self.latent.q_rank)
            yield Weight(f"{path}.linear_q_down_proj.weight", (q_rank, self.hidden), "attention")
            yield Weight(f"{path}.linear_q_up_proj.weight", (q, q_rank), "attention")
            yield from self.norm_weights(f"{path}.q_layernorm", q_rank)
        yield Weight(f"{path}.linear_kv_down_proj.weight", (self.compressed, self.hidden), "attention")
        yield Weight(f"{path}.linear_kv_up_proj.weight", (kv, self.kv_rank), "attention")
        yield from self.norm_weights(f"{path}.kv_layernorm", self.kv_rank)

    def norm_weights(self, name: str, width: Dim) -> Iterator[Weight]:
        if self.latent.normed:
            yield Weight(f"{name}.weight", (width,), "norm")
            if not self.rms_norm:
                yield Weight(f"{name}.bias", (width,), "norm")

    def norm(self, m: Module, x: Tensor) -> Tensor:
        """Run the norm of a latent, which is IdentityOp without `--qk-layernorm`."""
        return kernels.either_norm(m, contiguous(x), rms=self.rms_norm) if self.latent.normed else x

    @module
    def forward(
        self,
        m: Module,
        hidden_states: Tensor,
        tp: TensorParallel,
        core_attention: Callable[[Module, Tensor, Tensor, Tensor], Tensor],
        recomputes: bool = False,
    ) -> Tensor:
        """Run the layer. `recomputes`: what the latents are projected to is recomputed (mla_up_proj)."""
        groups = groups_of(m.memory)
        given = groups.start("qkv_linear", hidden_states)
        whole = TensorParallel(1, False, tp.shard, tp.shard)  # every rank has these weights
        q_compressed = given
        if self.latent.q_rank is not None:
            q_compressed = self.projected(m / "linear_q_down_proj", whole, given)
        kv_combined = self.projected(m / "linear_kv_down_proj", whole, given)
        kv_compressed, k_pos_emb = split(kv_combined, self.kv_rank, self.rope)
        if tp.sequence_parallel:
            k_pos_emb = _gathered(m, tp, k_pos_emb)
        up_projection = kept_or_recomputed(partial(self.up_projected, m, tp), recomputes=recomputes)
        query, key, value = up_projection.checkpoint(q_compressed, kv_compressed, k_pos_emb)
        groups.stop()
        groups.commit("qkv_linear", hidden_states)
        query = groups.start("core_attn", query)
        core_attn_out = core_attention(m, *(transpose(t, 1, 2) for t in (query, key, value)))
        groups.stop()
        groups.commit("core_attn", query, key, value)
        up_projection.discard_output_and_register_recompute(core_attn_out)
        core_attn_out = view(core_attn_out, hidden_states.shape[0], tp.whole, merge(self.heads, self.v))
        return projected(self.row, m / "linear_proj", tp, core_attn_out)

    def projected(self, m: Module, tp: TensorParallel, x: Tensor) -> Tensor:
        return column_parallel(m, tp, x, m.weight())

    def row(self, m: Module, tp: TensorParallel, x: Tensor) -> Tensor:
        """Run the projection of attention's output."""
        return row_parallel(m, tp, x, m.weight())

    def up_projected(
        self, m: Module, tp: TensorParallel, q_compressed: Tensor, kv_compressed: Tensor, k_pos_emb: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Run qkv_up_proj_and_rope_apply, with the norms of the latents, which the projections have taken in. Without a
        latent of queries, `q_compressed` is the layer's input."""
        if self.latent.q_rank is None:
            q = self.projected(m / "linear_q_proj", tp, q_compressed)
        else:
            q = self.projected(m / "linear_q_up_proj", tp, self.norm(m / "q_layernorm", q_compressed))
        kv = self.projected(m / "linear_kv_up_proj", tp, self.norm(m / "kv_layernorm", kv_compressed))
        lead = kv.shape[0], tp.whole, self.heads
        query = _rotated_in_place(view(q, *lead, self.qk))
        return query, *self.keys_and_values(kv, k_pos_emb, lead)

    def keys_and_values(self, kv: Tensor, k_pos_emb: Tensor, lead: tuple[Dim, ...]) -> tuple[Tensor, Tensor]:
        """Run ApplyMLARotaryEmbKV: every head's key with the rotated positions, and its value, in new tensors."""
        key = new_tensor(kv.memory, (*lead, self.qk), kv.dtype, "keys")
        value = new_tensor(kv.memory, (*lead, self.v), kv.dtype, "values")
        if recording(kv, k_pos_emb):
            key.node = value.node = Node(kv.memory, _of_both, (kv, k_pos_emb), outputs=2)
            value.output = 1
        return key, value


def _of_both(node: Node, grads: list[Tensor]) -> list[Tensor]:
    _grads = [packed(grad) for grad in grads]
    return [new_tensor(node.memory, shape, dtype, "gradient before positions") for shape, dtype in node.metadata]


def _rotated_in_place(q: Tensor) -> Tensor:
    node = Node(q.memory, _rotated_backward, (q,)) if recording(q) else None
    return Tensor(q.storage, q.shape, q.strides, q.dtype, node)


def _rotated_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    return [packed(grads[0])]


def _gathered(m: Module, tp: TensorParallel, x: Tensor) -> Tensor:
    shape = (x.shape[0], tp.whole, x.shape[2])
    tp.send(x.memory, "all_gather", "positions of the keys", shape, x.dtype)
    out = new_tensor(x.memory, shape, x.dtype, "positions of the keys")
    if recording(x):
        out.node = Node(x.memory, _gathered_backward, (x,), (), tp)
    return out


def _gathered_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    tp: TensorParallel = node.context
    (shape, dtype), whole = node.metadata[0], grads[0].shape
    tp.send(node.memory, "reduce_scatter", "gradient of the positions of the keys", whole, dtype)
    return [new_tensor(node.memory, shape, dtype, "gradient of the positions of the keys")]
