"""Tensor-parallel layers (megatron/core/tensor_parallel/layers.py, mappings.py) over sizes, with the collectives that
they send.

Activations are (batch, sequence, …) here and (sequence, batch, …) there: the same bytes. With sequence parallelism the
tensors between the layers are shards of the sequence. A column-parallel layer gathers its input into a buffer that is
never freed, keeps the shard, and gathers again for the gradient of its weight. A row-parallel layer reduces and
scatters its output. Gradients of weights are added to the main gradients by the kernel that computes them
(gradient_accumulation_fusion), or are autograd's own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from memcalc.core.autograd import Node
from memcalc.core.dims import Dim
from memcalc.core.dtypes import boolean, int64
from memcalc.core.ops.elementwise import like, recording
from memcalc.core.ops.work import works, works_backward
from memcalc.core.tensor import Sent, Tensor, new_tensor

if TYPE_CHECKING:
    from memcalc.core.dtypes import DType
    from memcalc.core.tensor import Memory
    from memcalc.families.base.module import Module
    from memcalc.layout.collectives import Kind


class TensorParallel(NamedTuple):
    """The tensor-parallel group, and the two lengths of a sequence."""

    ranks: int
    sequence_parallel: bool
    whole: Dim
    """The sequence inside attention and MLP."""
    shard: Dim
    """The sequence between attention and MLP: an equal part of `whole` with sequence parallelism, `whole` without."""
    fuses_accumulation: bool = True
    """True if the kernel that computes a weight's gradient adds it to the main gradient (TransformerConfig's
    gradient_accumulation_fusion). If False, gradients are tensors until DistributedDataParallel's hook has added them.
    """

    def gradient_of(self, weight: Tensor) -> Tensor | None:
        """Return the gradient tensor that backward makes for a weight; None if the kernel accumulates it."""
        return None if self.fuses_accumulation else like(weight, "weight gradient")

    def send(self, memory: Memory, kind: Kind, name: str, shape: tuple[Dim, ...], dtype: DType) -> None:
        """Record a collective over the group. `shape` is that of its payload."""
        if self.ranks > 1:
            memory.sent.append(Sent("tp", kind, name, memory.phase, memory.layer, shape, dtype))


def _short(m: Module) -> str:
    """Return a module's path within its layer."""
    return m.path.split("*.")[-1]


def column_parallel(
    m: Module, tp: TensorParallel, x: Tensor, weight: Tensor, bias: Tensor | None = None, name: str = ""
) -> Tensor:
    """Run ColumnParallelLinear: weight (out/tp, in). `bias` is added by a separate kernel, unless a later kernel takes
    it.

    `name` is the name of a product that belongs to `m` but to no module of its own.
    """
    batch, _, width = x.shape
    if tp.sequence_parallel:
        tp.send(x.memory, "all_gather", f"input of {_short(m)}", (batch, tp.whole, width), x.dtype)
    with m:
        works(x.memory, name, (batch, tp.whole, width, weight.shape[0]), x.dtype)
        out = new_tensor(x.memory, (batch, tp.whole, weight.shape[0]), x.dtype, "column-parallel output")
        if bias is not None:
            out = like(out, "with its bias")
        inputs = (x, weight) if bias is None else (x, weight, bias)
        if recording(*inputs):
            out.node = Node(x.memory, _column_parallel_backward, inputs, (x, weight), (tp, name, name or _short(m)))
    return out


def _column_parallel_backward(node: Node, grads: list[Tensor]) -> list[Tensor | None]:
    tp, own, name = node.context
    x, weight = node.unpack()
    grad = grads[0]
    whole = (x.shape[0], tp.whole, x.shape[2])
    works_backward(node, own, (*whole, weight.shape[0]), grad.dtype)
    if tp.sequence_parallel:
        tp.send(node.memory, "all_gather", f"input of {name}, again", whole, x.dtype)
    grad_x = new_tensor(node.memory, whole, grad.dtype, "input gradient")
    if tp.sequence_parallel:
        whole_grad, grad_x = grad_x, like(x, "shard of the input gradient")
        tp.send(node.memory, "reduce_scatter", f"input gradient of {name}", whole, grad.dtype)
        del whole_grad
    else:
        tp.send(node.memory, "all_reduce", f"input gradient of {name}", whole, grad.dtype)
    out: list[Tensor | None] = [grad_x, tp.gradient_of(weight)]
    return [*out, _bias_gradient(node, grad)] if len(node.edges) == 3 else out


def _bias_gradient(node: Node, grad: Tensor) -> Tensor:
    return new_tensor(node.memory, (grad.shape[-1],), grad.dtype, "bias gradient")


def gathered_last_dim(tp: TensorParallel, x: Tensor, whole: Dim, name: str) -> Tensor:
    """Run all_gather_last_dim_from_tensor_parallel_region: gather along the first dim, then put the parts side by
    side."""
    shape = (*x.shape[:-1], whole)
    tp.send(x.memory, "all_gather", name, shape, x.dtype)
    gathered = new_tensor(x.memory, shape, x.dtype, f"gathered {name}")
    out = new_tensor(x.memory, shape, x.dtype, name)
    del gathered
    if recording(x):
        out.node = Node(x.memory, _gathered_last_dim_backward, (x,), (), (tp, name))
    return out


def _gathered_last_dim_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    tp, name = node.context
    shape, dtype = node.metadata[0]
    _side_by_side = like(grads[0], "gradients, rank by rank")
    tp.send(node.memory, "reduce_scatter", f"gradient of the {name}", grads[0].shape, dtype)
    return [new_tensor(node.memory, shape, dtype, f"gradient of the {name}")]


def row_parallel(m: Module, tp: TensorParallel, x: Tensor, weight: Tensor) -> Tensor:
    """Run RowParallelLinear: x (…, in/tp), weight (out, in/tp) -> the sum over the ranks. The next kernel adds the
    bias."""
    batch = x.shape[0]
    shape = (batch, tp.whole, weight.shape[0])
    with m:
        node = (
            Node(x.memory, _row_parallel_backward, (x, weight), (x, weight), (tp, _short(m)))
            if recording(x, weight)
            else None
        )
        works(x.memory, "", (*shape, weight.shape[1]), x.dtype)
        out = new_tensor(x.memory, shape, x.dtype, "row-parallel output")
        if tp.sequence_parallel:
            partial, out = out, new_tensor(x.memory, (batch, tp.shard, weight.shape[0]), x.dtype, "shard of the sum")
            tp.send(x.memory, "reduce_scatter", f"output of {_short(m)}", shape, x.dtype)
            del partial
        else:
            tp.send(x.memory, "all_reduce", f"output of {_short(m)}", shape, x.dtype)
    out.node = node
    return out


def _row_parallel_backward(node: Node, grads: list[Tensor]) -> list[Tensor | None]:
    tp, name = node.context
    x, weight = node.unpack()
    grad = grads[0]
    if tp.sequence_parallel:
        shape = (x.shape[0], tp.whole, weight.shape[0])
        grad = new_tensor(node.memory, shape, grad.dtype, "gathered gradient")
        tp.send(node.memory, "all_gather", f"output gradient of {name}", shape, grad.dtype)
    works_backward(node, "", (x.shape[0], tp.whole, *weight.shape), grad.dtype)
    grad_x = new_tensor(node.memory, x.shape, grad.dtype, "input gradient")
    return [grad_x, tp.gradient_of(weight)]


def vocab_parallel_embedding(m: Module, tp: TensorParallel, table: Tensor, ids: Tensor, *, scatters: bool) -> Tensor:
    """Run VocabParallelEmbedding: table (vocab/tp, hidden). `scatters`: reduce directly into shards of the sequence."""
    memory = table.memory
    with m:
        looked_up, outside = ids, None
        if tp.ranks > 1:
            below, above = like(ids, "below", boolean), like(ids, "above", boolean)
            outside = like(ids, "outside the vocabulary", boolean)
            del below, above
            copied = like(ids, "ids", int64)
            looked_up = like(ids, "masked ids", int64)
            del copied
        shape = (*ids.shape, table.shape[1])
        out = new_tensor(memory, shape, table.dtype, "embeddings")
        saved = (looked_up,) if outside is None else (looked_up, outside)
        node = (
            Node(memory, _embedding_backward, (table,), saved, (tp, scatters, _short(m))) if recording(table) else None
        )
        if scatters:
            batch_first, out = out, like(out, "sequence first")
            del batch_first
            partial, out = out, new_tensor(memory, (ids.shape[0], tp.shard, shape[2]), out.dtype, "shard of the sum")
            tp.send(memory, "reduce_scatter", f"output of {_short(m)}", shape, out.dtype)
            del partial
        else:
            tp.send(memory, "all_reduce", f"output of {_short(m)}", shape, out.dtype)
    out.node = node
    return out


def _embedding_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    tp, scatters, name = node.context
    saved = node.unpack()
    grad = grads[0]
    if scatters:
        shape = (saved[0].shape[0], tp.whole, grad.shape[2])
        grad = new_tensor(node.memory, shape, grad.dtype, "gathered gradient")
        tp.send(node.memory, "all_gather", f"output gradient of {name}", shape, grad.dtype)
    if tp.ranks > 1:  # a node of its own (masked ids are written over), which frees its mask and its gradient
        grads[0] = grad = like(grad, "gradient inside the vocabulary")
        del saved[1:]
        node.saved = node.saved[:1]
    return [new_tensor(node.memory, node.metadata[0][0], grad.dtype, f"{name} weight gradient")]
