"""Layers on a cube of l·l·l ranks (Bian et al. 2021, arXiv:2105.14450; colossalai/legacy/nn/layer/parallel_3d/layers.py
and _operation.py).

A linear layer gathers its input along one edge of the cube and its weight along another, multiplies once, and reduces
and scatters the result along the third. What it has gathered is what it saves: l times a rank's part. The gradients of weights
are sent while backward goes on: the function returns zeros, to which a hook of the parameter adds the result. NCCL keeps the
tensors of such a call until it is waited for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from memcalc.core.autograd import Node
from memcalc.core.dims import Dim, divided
from memcalc.core.ops.elementwise import like, recording
from memcalc.core.ops.embedding import embedding
from memcalc.core.ops.work import works
from memcalc.core.tensor import Tensor, new_tensor
from memcalc.families.base.module import Weight
from memcalc.layout.tensor_dims.cube_norm import layer_norm
from memcalc.layout.tensor_dims.sending import along_first, own_sequences, send
from memcalc.layout.tensor_dims.tables import gathered, of_own_rows, scattered

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memcalc.core.dims import Shape
    from memcalc.families.base.module import Module
    from memcalc.layout.tensor_dims.grid import Grid


class Cube(NamedTuple):
    """The layers of one rank."""

    grid: Grid

    loss_group = "output"
    batch_groups = ("input", "weight")
    """The groups over which the loss is averaged, one after the other."""

    # --- weights

    def vector(self, dim: Dim) -> Dim:
        """Return a rank's part of a bias or of a norm's weight, which l² ranks have."""
        return divided(dim, self.grid.side)

    def linear_weights(self, name: str, fan_in: Dim, fan_out: Dim, component: str) -> Iterator[Weight]:
        side = self.grid.side
        yield Weight(f"{name}.weight", (divided(fan_in, side**2), divided(fan_out, side)), component)
        yield Weight(f"{name}.bias", (self.vector(fan_out),), component)

    def rows_of(self, rows: Dim, width: Dim) -> Shape:
        """Return a rank's part of a table whose rows are shared."""
        return divided(rows, self.grid.side**2), divided(width, self.grid.side)

    def columns_of(self, rows: Dim, width: Dim) -> Shape:
        """Return a rank's part of a table whose rows are whole, which l² ranks have."""
        return rows, divided(width, self.grid.side)

    # --- forward

    def heads(self, heads: Dim) -> Dim:
        return divided(heads, self.grid.side)

    def linear(self, m: Module, x: Tensor, *, second: bool) -> Tensor:
        """Run Linear3D. Its hook sums the gradient of the bias over the ranks that have the same part."""
        with m:
            output = _linear(x, m.weight(), self.grid.side, _short(m), transposed=False)
            return output + _copied_and_summed(m.weight("bias"), f"gradient of {_short(m)}.bias")

    def norm(self, m: Module, x: Tensor) -> Tensor:
        """Run LayerNorm3D."""
        with m:
            return layer_norm(x, m.weight(), m.weight("bias"), _short(m))

    def words(self, m: Module, ids: Tensor) -> Tensor:
        """Run VocabParallelEmbedding3D: l parts of the sequences in l ranks' rows, then its own part of the sum."""
        with m:
            side, name = self.grid.side, _short(m)
            ids = own_sequences(ids, side)
            # The frame holds the mask, the masked ids and the gathered table until it returns.
            table = gathered(m.weight(), side, "weight", f"{name}: table")
            found = of_own_rows(table, ids)
            return scattered(found[0], divided(ids.shape[0], side), "input", f"output of {name}")

    def positions(self, m: Module, ids: Tensor) -> Tensor:
        """Run Embedding3D. Its hook copies the gradient of the table, and sums the copy."""
        with m:
            own = own_sequences(ids, self.grid.side**2)
            return embedding(_copied_and_summed(m.weight(), f"gradient of {_short(m)}.weight"), own)

    def logits(self, m: Module, table: Tensor, x: Tensor) -> Tensor:
        """Run VocabParallelClassifier3D."""
        with m:
            return _linear(x, table, self.grid.side, _short(m), transposed=True)


def _short(m: Module) -> str:
    return m.path.split("*.")[-1]


def _copied_and_summed(weight: Tensor, name: str) -> Tensor:
    """Return a parameter with the hook `all_reduce(grad.clone())` over the ranks that have the same part."""
    if not recording(weight):
        return weight
    node = Node(weight.memory, _copied_and_summed_backward, (weight,), (), name)
    out = Tensor(weight.storage, weight.shape, weight.strides, weight.dtype, node)
    out.name = weight.name
    return out


def _copied_and_summed_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    grad = grads[0]
    if len(grad.shape) > len(node.metadata[0][0]):  # autograd sums before the hook
        grad = new_tensor(node.memory, node.metadata[0][0], grad.dtype, "sum over tokens")
    send(node.memory, "plane", "all_reduce", node.context, grad.shape, grad.dtype)
    return [like(grad, "copy of the gradient")]


def _linear(x: Tensor, weight: Tensor, side: int, name: str, *, transposed: bool) -> Tensor:
    """Run _Linear3D: x (…, in/l), weight (in/l², out/l); or, `transposed`, a table (out/l², in/l)."""
    memory = x.memory
    whole = along_first(x, side)
    send(memory, "input", "all_gather", f"{name}: input", whole, x.dtype)
    all_x = new_tensor(memory, whole, x.dtype, "input, gathered")
    send(memory, "weight", "all_gather", f"{name}: weight", along_first(weight, side), weight.dtype)
    all_weight = new_tensor(memory, along_first(weight, side), weight.dtype, "weight, gathered")
    fan_out = all_weight.shape[0 if transposed else 1]
    works(memory, "", (*whole[:-1], fan_out, whole[-1]), x.dtype)
    partial = new_tensor(memory, (*whole[:-1], fan_out), x.dtype, "partial sum")
    send(memory, "output", "reduce_scatter", f"{name}: output", partial.shape, x.dtype)
    output = new_tensor(memory, (divided(partial.shape[0], side), *partial.shape[1:]), x.dtype, "own part of the sum")
    del partial
    if recording(x, weight):
        output.node = Node(memory, _linear_backward, (x, weight), (all_x, all_weight), (side, name, transposed))
    return output


def _linear_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    side, name, transposed = node.context
    all_x, all_weight = node.unpack()
    memory, dtype = node.memory, grads[0].dtype
    whole = along_first(grads[0], side)
    send(memory, "output", "all_gather", f"{name}: output gradient", whole, dtype)
    all_grad = new_tensor(memory, whole, dtype, "output gradient, gathered")
    works(memory, "", (*all_x.shape, all_grad.shape[-1]), dtype, 2)
    send(memory, "input", "reduce_scatter", f"{name}: input gradient", all_x.shape, dtype)
    _sent = [new_tensor(memory, all_x.shape, dtype, "input gradient, whole")]  # until the wait at the end
    grad_x = new_tensor(memory, node.metadata[0][0], dtype, "input gradient")
    product = new_tensor(memory, (all_x.shape[-1], all_grad.shape[-1]), dtype, "weight gradient, whole")
    if transposed:  # reduce_scatter makes the transpose contiguous
        _sent.append(new_tensor(memory, all_weight.shape, dtype, "weight gradient, transposed"))
    send(memory, "weight", "reduce_scatter", f"{name}: weight gradient", all_weight.shape, dtype)
    _bucket = new_tensor(memory, node.metadata[1][0], dtype, "weight gradient, reduced")  # until the hook has run
    if transposed:
        del product
    zeros = like(_bucket, "zeros of the weight gradient")
    return [grad_x, zeros]
