"""Tensor-parallel layers (megatron/core/tensor_parallel/layers.py, mappings.py) over sizes, with the collectives that
they send.

Activations are (batch, sequence, …) here and (sequence, batch, …) there: the same bytes. With sequence parallelism the
tensors between the layers are shards of the sequence. A column-parallel layer gathers its input into a buffer that is
never freed, keeps the shard, and gathers again for the gradient of its weight. A row-parallel layer reduces and
scatters its output. Gradients of weights are added to the main gradients by the kernel that computes them
(gradient_accumulation_fusion), or are autograd's own.

A layer whose weight is frozen keeps the weight alone (LinearWithFrozenWeight): it gathers its input into a tensor that dies
with the product, and backward neither gathers the input again nor computes a gradient of the weight.
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


def short_name(m: Module) -> str:
    """Return a module's path within its layer."""
    return m.path.split("*.")[-1]


def column_parallel(
    m: Module, tp: TensorParallel, x: Tensor, weight: Tensor, bias: Tensor | None = None, name: str = ""
) -> Tensor:
    """Run ColumnParallelLinear: weight (out/tp, in). `bias` is added by a separate kernel, unless a later kernel takes
    it.

    `name` is the name of a product that belongs to `m` but to no module of its own.
    """
    if is_frozen(weight):
        return _frozen_column_parallel(m, tp, x, weight, bias, name)
    batch, _, width = x.shape
    if tp.sequence_parallel:
        tp.send(x.memory, "all_gather", f"input of {short_name(m)}", (batch, tp.whole, width), x.dtype)
    with m:
        works(x.memory, name, (batch, tp.whole, width, weight.shape[0]), x.dtype)
        out = new_tensor(x.memory, (batch, tp.whole, weight.shape[0]), x.dtype, "column-parallel output")
        if bias is not None:
            out = like(out, "with its bias")
        inputs = (x, weight) if bias is None else (x, weight, bias)
        if recording(*inputs):
            out.node = Node(x.memory, _column_parallel_backward, inputs, (x, weight), (tp, name, name or short_name(m)))
    return out


def _column_parallel_backward(node: Node, grads: list[Tensor]) -> list[Tensor | None]:
    tp, own, name = node.context
    x, weight = node.unpack()
    grad = grads[0]
    whole = (x.shape[0], tp.whole, x.shape[2])
    works(node.memory, own, (*whole, weight.shape[0]), grad.dtype, 2)  # both gradients, whoever needs them
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


def is_frozen(weight: Tensor) -> bool:
    """Tell whether a weight wants no gradient."""
    return weight.node is None


def _frozen_column_parallel(
    m: Module, tp: TensorParallel, x: Tensor, weight: Tensor, bias: Tensor | None, name: str
) -> Tensor:
    """Run ColumnParallelLinear over a frozen weight (linear_with_frozen_weight)."""
    x = gathered_sequence(tp, x, name or short_name(m))
    with m:
        works(x.memory, name, (*x.shape, weight.shape[0]), x.dtype)
        out = new_tensor(x.memory, (*x.shape[:2], weight.shape[0]), x.dtype, "column-parallel output")
        if bias is not None:
            out = like(out, "with its bias")
        if recording(x):
            out.node = Node(
                x.memory, _frozen_column_parallel_backward, (x, weight), (weight,), (tp, name, name or short_name(m))
            )
    return out


def _frozen_column_parallel_backward(node: Node, grads: list[Tensor]) -> list[Tensor | None]:
    tp, own, name = node.context
    (weight,) = node.unpack()
    shape, dtype = node.metadata[0]
    works(node.memory, own, (*shape, weight.shape[0]), dtype)
    grad_x = new_tensor(node.memory, shape, dtype, "input gradient")
    if not tp.sequence_parallel:
        tp.send(node.memory, "all_reduce", f"input gradient of {name}", shape, dtype)
    return [grad_x, None]


def gathered_sequence(tp: TensorParallel, x: Tensor, name: str) -> Tensor:
    """Run gather_from_sequence_parallel_region: shards of the sequence -> all of it, in a tensor of its own. Backward sums the
    ranks' gradients into shards."""
    if not tp.sequence_parallel:
        return x
    whole = (x.shape[0], tp.whole, x.shape[2])
    out = new_tensor(x.memory, whole, x.dtype, "gathered input")
    tp.send(x.memory, "all_gather", f"input of {name}", whole, x.dtype)
    if recording(x):
        out.node = Node(x.memory, _gathered_sequence_backward, (x,), (), (tp, name))
    return out


def _gathered_sequence_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    tp, name = node.context
    shape, dtype = node.metadata[0]
    shard = new_tensor(node.memory, shape, dtype, "shard of the input gradient")
    tp.send(node.memory, "reduce_scatter", f"input gradient of {name}", grads[0].shape, dtype)
    return [shard]


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
    saved = (weight,) if is_frozen(weight) else (x, weight)
    with m:
        node = (
            Node(x.memory, _row_parallel_backward, (x, weight), saved, (tp, short_name(m)))
            if recording(x, weight)
            else None
        )
        works(x.memory, "", (*shape, weight.shape[1]), x.dtype)
        out = new_tensor(x.memory, shape, x.dtype, "row-parallel output")
        if tp.sequence_parallel:
            partial, out = out, new_tensor(x.memory, (batch, tp.shard, weight.shape[0]), x.dtype, "shard of the sum")
            tp.send(x.memory, "reduce_scatter", f"output of {short_name(m)}", shape, x.dtype)
            del partial
        else:
            tp.send(x.memory, "all_reduce", f"output of {short_name(m)}", shape, x.dtype)
    out.node = node
    return out


def _row_parallel_backward(node: Node, grads: list[Tensor]) -> list[Tensor | None]:
    tp, name = node.context
    weight = node.unpack()[-1]
    grad, x = grads[0], node.metadata[0][0]
    if tp.sequence_parallel:
        shape = (x[0], tp.whole, weight.shape[0])
        grad = new_tensor(node.memory, shape, grad.dtype, "gathered gradient")
        tp.send(node.memory, "all_gather", f"output gradient of {name}", shape, grad.dtype)
    works_backward(node, "", (x[0], tp.whole, *weight.shape), grad.dtype)
    grad_x = new_tensor(node.memory, x, grad.dtype, "input gradient") if node.needs(0) else None
    return [grad_x, tp.gradient_of(weight) if node.needs(1) else None]


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
            Node(memory, _embedding_backward, (table,), saved, (tp, scatters, short_name(m)))
            if recording(table)
            else None
        )
        if scatters:
            batch_first, out = out, like(out, "sequence first")
            del batch_first
            partial, out = out, new_tensor(memory, (ids.shape[0], tp.shard, shape[2]), out.dtype, "shard of the sum")
            tp.send(memory, "reduce_scatter", f"output of {short_name(m)}", shape, out.dtype)
            del partial
        else:
            tp.send(memory, "all_reduce", f"output of {short_name(m)}", shape, out.dtype)
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
