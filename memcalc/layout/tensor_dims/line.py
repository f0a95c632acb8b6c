"""Layers on a line of p ranks, as Megatron-LM cuts them (colossalai/legacy/nn/layer/parallel_1d/{layers,_operation}.py).

The first linear layer of a pair is cut by its outputs, the second by its inputs. Hidden states between two layers are whole on
every rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from memcalc.core.autograd import Node
from memcalc.core.dims import Dim, divided
from memcalc.core.ops import norm as norms
from memcalc.core.ops.elementwise import like, of_two, recording
from memcalc.core.ops.embedding import embedding
from memcalc.core.ops.matmul import linear
from memcalc.core.ops.work import works
from memcalc.core.tensor import Tensor, new_tensor
from memcalc.families.base.module import Weight
from memcalc.layout.tensor_dims.sending import flat, many, send
from memcalc.layout.tensor_dims.tables import of_own_rows

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memcalc.core.dims import Shape
    from memcalc.families.base.module import Module
    from memcalc.layout.tensor_dims.grid import Grid

SECOND = ("attn.dense", "mlp.linear_2")
"""The layers that are cut by their inputs."""


class Line(NamedTuple):
    """The layers of one rank."""

    grid: Grid

    loss_group = "all"
    batch_groups = ()

    # --- weights

    def vector(self, dim: Dim) -> Dim:
        """Return a norm's weight, which is whole."""
        return dim

    def linear_weights(self, name: str, fan_in: Dim, fan_out: Dim, component: str) -> Iterator[Weight]:
        p = self.grid.side
        if name in SECOND:
            yield Weight(f"{name}.weight", (fan_out, divided(fan_in, p)), component)
            yield Weight(f"{name}.bias", (fan_out,), component)
            return
        yield Weight(f"{name}.weight", (divided(fan_out, p), fan_in), component)
        yield Weight(f"{name}.bias", (divided(fan_out, p),), component)

    def rows_of(self, rows: Dim, width: Dim) -> Shape:
        """Return a rank's part of a table whose rows are shared."""
        return divided(rows, self.grid.side), width

    def columns_of(self, rows: Dim, width: Dim) -> Shape:
        """Return a rank's part of a table whose rows are whole."""
        return rows, divided(width, self.grid.side)

    # --- forward

    def heads(self, heads: Dim) -> Dim:
        return divided(heads, self.grid.side)

    def linear(self, m: Module, x: Tensor, *, second: bool) -> Tensor:
        """Run Linear1D_Row for the second layer of a pair, else Linear1D_Col."""
        with m:
            if not second:
                return _column_parallel(x, m.weight(), m.weight("bias"), _short(m))
            output = linear(x, m.weight())
            send(x.memory, "all", "all_reduce", f"output of {_short(m)}", output.shape, output.dtype)
            return output + m.weight("bias")

    def norm(self, m: Module, x: Tensor) -> Tensor:
        """Run the whole layer norm (MixedFusedLayerNorm1D saves what torch's does)."""
        with m:
            return norms.layer_norm(x, m.weight(), m.weight("bias"))

    def words(self, m: Module, ids: Tensor) -> Tensor:
        """Run VocabParallelEmbedding1D. The sum over the ranks is made in place."""
        with m:
            found = of_own_rows(m.weight(), ids)
            name = f"output of {_short(m)}"
            send(ids.memory, "all", "all_reduce", name, found[0].shape, found[0].dtype)
            return found[0]

    def positions(self, m: Module, ids: Tensor) -> Tensor:
        """Run Embedding1D: every rank's columns, gathered behind the look-up."""
        with m:
            return _side_by_side(embedding(m.weight(), ids), self.grid.side, _short(m))

    def logits(self, m: Module, table: Tensor, x: Tensor) -> Tensor:
        """Run VocabParallelClassifier1D. Backward sums the gradient of its input in place."""
        with m:
            return linear(_gradient_summed(x, _short(m)), table)


def _short(m: Module) -> str:
    return m.path.split("*.")[-1]


def _column_parallel(x: Tensor, weight: Tensor, bias: Tensor, name: str) -> Tensor:
    """Run LinearWithAsyncCommunication: a product, then its bias. It saves x and the weight."""
    rows = flat(x)
    works(x.memory, "", (*x.shape[:-1], *weight.shape), x.dtype)
    product = new_tensor(x.memory, (*x.shape[:-1], weight.shape[0]), x.dtype, "column-parallel output")
    output = of_two(product, Tensor(bias.storage, bias.shape, bias.strides, bias.dtype), "with its bias")
    del rows, product
    if recording(x, weight, bias):
        output.node = Node(x.memory, _column_parallel_backward, (x, weight, bias), (x, weight), name)
    return output


def _column_parallel_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    x, weight = node.unpack()
    grad = grads[0]
    works(node.memory, "", (*x.shape[:-1], *weight.shape), grad.dtype, 2)
    grad_input = new_tensor(node.memory, x.shape, grad.dtype, "input gradient")
    send(node.memory, "all", "all_reduce", f"input gradient of {node.context}", x.shape, grad.dtype)
    grad_weight = new_tensor(node.memory, weight.shape, grad.dtype, "weight gradient")
    return [grad_input, grad_weight, new_tensor(node.memory, (grad.shape[-1],), grad.dtype, "bias gradient")]


def _gradient_summed(x: Tensor, name: str) -> Tensor:
    """Run _ReduceGrad: nothing in forward, an all-reduce in place in backward."""
    if not recording(x):
        return x
    return Tensor(x.storage, x.shape, x.strides, x.dtype, Node(x.memory, _sum_in_place, (x,), (), name))


def _sum_in_place(node: Node, grads: list[Tensor]) -> list[Tensor]:
    grad = grads[0]
    send(node.memory, "all", "all_reduce", f"input gradient of {node.context}", grad.shape, grad.dtype)
    return [grad]


def _side_by_side(x: Tensor, ranks: int, name: str) -> Tensor:
    """Run gather_forward_split_backward along the last dim: a list of all ranks' tensors, then one tensor of them."""
    whole = (*x.shape[:-1], many(x.shape[-1], ranks))
    send(x.memory, "all", "all_gather", f"output of {name}", whole, x.dtype)
    received = [like(x, f"{name}: columns of a rank") for _ in range(ranks - 1)]
    out = new_tensor(x.memory, whole, x.dtype, f"{name}: columns side by side")
    received.clear()
    if recording(x):
        out.node = Node(x.memory, _side_by_side_backward, (x,), ())
    return out


def _side_by_side_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    shape, dtype = node.metadata[0]
    return [new_tensor(node.memory, shape, dtype, "own columns of the gradient")]
