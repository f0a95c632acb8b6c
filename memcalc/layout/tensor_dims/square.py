"""Layers on squares of q·q ranks: two dimensions (Optimus, arXiv:2104.05343), and two and a half, d squares of which
each has its own sequences and the same weights (Tesseract, arXiv:2105.14500).

Sources: colossalai/legacy/nn/layer/parallel_2d/{layers,_operation}.py and parallel_2p5d. In two dimensions a bias and a
norm's weight are cut into q² parts, gathered along the column when they are used. In two and a half every rank has one of q
parts, and only the first of a column holds what counts: it is broadcast.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from memcalc.core.autograd import Node
from memcalc.core.dims import Dim, divided
from memcalc.core.ops.elementwise import like, of_two, recording
from memcalc.core.ops.embedding import embedding
from memcalc.core.ops.shape import transpose
from memcalc.core.tensor import Tensor, new_tensor
from memcalc.families.base.module import Weight
from memcalc.layout.tensor_dims.sending import own_sequences, per_token, send
from memcalc.layout.tensor_dims.summa import times, times_transposed
from memcalc.layout.tensor_dims.tables import of_own_rows, scattered

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memcalc.core.dims import Shape
    from memcalc.families.base.module import Module
    from memcalc.layout.tensor_dims.grid import Grid


class Square(NamedTuple):
    """The layers of one rank."""

    grid: Grid

    loss_group = "row"
    batch_groups = ("column",)
    """The groups over which the loss is averaged, one after the other."""

    # --- weights

    def vector(self, dim: Dim) -> Dim:
        """Return a rank's part of a bias or of a norm's weight."""
        parts = self.grid.side**2 if self.grid.dims == "2" else self.grid.side
        return divided(dim, parts)

    def linear_weights(self, name: str, fan_in: Dim, fan_out: Dim, component: str) -> Iterator[Weight]:
        q = self.grid.side
        yield Weight(f"{name}.weight", (divided(fan_in, q), divided(fan_out, q)), component)
        yield Weight(f"{name}.bias", (self.vector(fan_out),), component)

    def rows_of(self, rows: Dim, width: Dim) -> Shape:
        """Return a rank's part of a table whose rows are shared."""
        return divided(rows, self.grid.side), divided(width, self.grid.side)

    def columns_of(self, rows: Dim, width: Dim) -> Shape:
        """Return a rank's part of a table whose rows are whole."""
        return rows, divided(width, self.grid.side**2)

    # --- forward

    def heads(self, heads: Dim) -> Dim:
        return divided(heads, self.grid.side)

    def linear(self, m: Module, x: Tensor, *, second: bool) -> Tensor:
        """Run Linear2D or Linear2p5D. Its frame holds the product until the bias is added."""
        with m:
            output = times(x, m.weight(), self.grid.side, _short(m))
            return self.with_bias(output, m.weight("bias"), f"{_short(m)}.bias")

    def with_bias(self, x: Tensor | None, bias: Tensor, name: str) -> Tensor:
        """Run add_bias_2d or add_bias_2p5d: the sum, or the whole bias of the column if there is nothing to add to."""
        two, q = self.grid.dims == "2", self.grid.side
        whole = (_all(bias.shape[0], q),) if two else bias.shape
        send(bias.memory, "column", "all_gather" if two else "broadcast", name, whole, bias.dtype)
        temp = new_tensor(bias.memory, whole, bias.dtype, "bias of the column")
        out = temp if x is None else of_two(x, temp, "with its bias")
        inputs = (bias,) if x is None else (bias, x)
        if recording(*inputs):
            out.node = Node(bias.memory, _bias_backward, inputs, (), (two, name))
        return out

    def norm(self, m: Module, x: Tensor) -> Tensor:
        """Run LayerNorm2D or LayerNorm2p5D: sums over the row of ranks, which two all-reduces add up."""
        with m:
            name = _short(m)
            e_x = per_token(x, "sum")
            send(x.memory, "row", "all_reduce", f"{name}: sum", e_x.shape, x.dtype)
            squares = like(x, "squares")
            var_x = per_token(x, "sum of squares")
            del squares
            send(x.memory, "row", "all_reduce", f"{name}: sum of squares", var_x.shape, x.dtype)
            product = per_token(x, "squared mean")
            var_x = per_token(x, "variance")
            del product
            shifted = per_token(x, "variance + epsilon")
            root = per_token(x, "deviation")
            del shifted
            var_x = per_token(x, "inverse deviation")
            del root
            output = _normalised(x, var_x, name)
            scale = self.with_bias(None, m.weight(), f"{name}.weight")
            bias = self.with_bias(None, m.weight("bias"), f"{name}.bias")
            out = _addcmul(bias, scale, output)
            del e_x
            return out

    def words(self, m: Module, ids: Tensor) -> Tensor:
        """Run VocabParallelEmbedding2D: all sequences of the square in the rank's rows, then its own of the sum."""
        with m:
            found = of_own_rows(m.weight(), ids)
            own = divided(ids.shape[0], self.grid.side)
            return scattered(found[0], own, "column", f"output of {_short(m)}")

    def positions(self, m: Module, ids: Tensor) -> Tensor:
        """Run Embedding2D: its own sequences in a table whose columns are gathered."""
        with m:
            own = own_sequences(ids, self.grid.side)
            return embedding(_columns_gathered(m.weight(), self.grid.side, _short(m)), own)

    def logits(self, m: Module, table: Tensor, x: Tensor) -> Tensor:
        """Run VocabParallelClassifier2D."""
        with m:
            return times_transposed(x, table, self.grid.side, _short(m))


def _short(m: Module) -> str:
    return m.path.split("*.")[-1]


def _all(part: Dim, q: int) -> Dim:
    """Return what a column has of a vector that is cut into q² parts."""
    name = part.name.removesuffix(f"/{q * q}")
    return Dim(f"{name}/{q}" if name != part.name else f"{q}·{part.name}", part.size * q)


def _bias_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    """Return the gradient of a bias (or of a norm's weight), and the incoming one if the bias was added to a tensor.

    Of a column in two and a half dimensions all ranks but the first return zeros; this is one of them.
    """
    two, name = node.context
    (shape, dtype), memory = node.metadata[0], node.memory
    grad = grads[0]
    summed = grad if len(grad.shape) == 1 else new_tensor(memory, (grad.shape[-1],), grad.dtype, "sum over tokens")
    kind = "reduce_scatter" if two else "reduce"
    send(memory, "column", kind, f"gradient of {name}", summed.shape, summed.dtype)
    own = new_tensor(memory, shape, dtype, "own part of the gradient" if two else "zeros of the gradient")
    return [own, grad][: len(node.edges)]


def _normalised(x: Tensor, deviation: Tensor, name: str) -> Tensor:
    """Run _Layernorm2D. It saves its result and the inverse deviations."""
    centred = like(x, "less the mean")
    output = like(centred, "normalised")
    if recording(x):
        saved = Tensor(output.storage, output.shape, output.strides, output.dtype)
        output.node = Node(x.memory, _normalised_backward, (x,), (saved, deviation), name)
    return output


def _normalised_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    x, _deviation = node.unpack()
    grad, name = grads[0], node.context
    output_grad_sum = per_token(grad, "sum of the gradient")
    send(node.memory, "row", "all_reduce", f"{name}: sum of the gradient", output_grad_sum.shape, grad.dtype)
    product = of_two(grad, x, "gradient times normalised")
    output_grad_mul_x_sum = per_token(grad, "sum of the products")
    del product
    send(node.memory, "row", "all_reduce", f"{name}: sum of the products", output_grad_mul_x_sum.shape, grad.dtype)
    input_grad = like(grad, "input gradient")
    product = of_two(x, output_grad_mul_x_sum, "normalised times the sum")
    del product
    return [input_grad]


def _addcmul(bias: Tensor, scale: Tensor, x: Tensor) -> Tensor:
    """Compute `torch.addcmul(bias, scale, x)`. It saves scale and x."""
    out = like(x, "scaled and shifted")
    if recording(bias, scale, x):
        out.node = Node(x.memory, _addcmul_backward, (bias, scale, x), (scale, x))
    return out


def _addcmul_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    """Return the gradients of addcmul: grad, grad · (x · 1), grad · (scale · 1) (derivatives.yaml)."""
    scale, x = node.unpack()
    times_one = like(x, "times the value")
    of_scale = like(times_one, "gradient of the scale")
    del times_one
    summed = new_tensor(node.memory, scale.shape, scale.dtype, "gradient of the scale, summed")
    del of_scale
    times_one = like(scale, "times the value")
    of_x = like(grads[0], "gradient of the normalised")
    del times_one
    return [grads[0], summed, of_x]


def _columns_gathered(table: Tensor, ranks: int, name: str) -> Tensor:
    """Run all_gather_tensor_2d along the columns: over the transposed table, whose result is transposed again."""
    rows, width = table.shape
    whole = _all(width, ranks)
    sent = new_tensor(table.memory, (width, rows), table.dtype, f"{name}: transposed")
    send(table.memory, "column", "all_gather", f"{name}: table", (whole, rows), table.dtype)
    got = new_tensor(table.memory, (whole, rows), table.dtype, f"{name}: columns gathered")
    del sent
    out = Tensor(got.storage, (rows, whole), (1, rows.size), table.dtype)
    if recording(table):
        out.node = Node(table.memory, _columns_gathered_backward, (table,), (), name)
    return out


def _columns_gathered_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    name, memory = node.context, node.memory
    (shape, dtype), grad = node.metadata[0], grads[0]
    sent = new_tensor(memory, (grad.shape[1], grad.shape[0]), dtype, f"{name}: gradient transposed")
    send(memory, "column", "reduce_scatter", f"{name}: gradient of the table", sent.shape, dtype)
    got = new_tensor(memory, (shape[1], shape[0]), dtype, f"{name}: own columns of the gradient")
    del sent
    return [transpose_copy(got)]


def transpose_copy(x: Tensor) -> Tensor:
    """Return a contiguous copy of the transpose of a matrix that requires no gradient."""
    turned = transpose(x, 0, 1)
    return new_tensor(x.memory, turned.shape, x.dtype, "gradient, contiguous")
