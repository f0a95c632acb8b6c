"""Steps of recurrent layers, as ATen computes them on a GPU without cuDNN (aten/src/ATen/native/RNN.cpp).

The cell of an LSTM or a GRU is one kernel over the gates of input and state. It saves all its operands, an LSTM's also
the new cell state, and a workspace (tools/autograd/derivatives.yaml, _thnn_fused_lstm_cell, _thnn_fused_gru_cell):
backward needs the workspace, a second derivative the operands. The cell of a simple RNN is a sum and a tanh or a relu.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcalc.core.autograd import Node, no_kernel
from memcalc.core.dims import Dim
from memcalc.core.ops.autocast import autocast
from memcalc.core.ops.elementwise import recording
from memcalc.core.ops.shape import cat
from memcalc.core.tensor import Tensor, new_tensor

if TYPE_CHECKING:
    from collections.abc import Sequence


@autocast("_thnn_fused_lstm_cell")
def lstm_cell(
    of_input: Tensor, of_state: Tensor, cell: Tensor, input_bias: Tensor | None, state_bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Compute `_thnn_fused_lstm_cell`: gates (batch, 4·hidden) of the input and of the state, and the cell state (batch,
    hidden) -> the next state and cell state."""
    memory = of_input.memory
    workspace = new_tensor(memory, of_input.shape, of_input.dtype, "gates")
    state = new_tensor(memory, cell.shape, cell.dtype, "state")
    following = new_tensor(memory, cell.shape, cell.dtype, "cell state")
    inputs = [t for t in (of_input, of_state, cell, input_bias, state_bias) if t is not None]
    if recording(*inputs):
        kept = Tensor(following.storage, following.shape, following.strides, following.dtype)
        node = Node(memory, _lstm_cell_backward, inputs, [*inputs, kept, workspace], outputs=2)
        state.node = following.node = node
        following.output = 1
    return state, following


def _lstm_cell_backward(node: Node, grads: list[Tensor]) -> list[Tensor | None]:
    saved = node.unpack()
    cell, workspace = saved[2], saved[-1]
    gates = new_tensor(node.memory, workspace.shape, workspace.dtype, "gradient of the gates")
    of_cell = new_tensor(node.memory, cell.shape, cell.dtype, "gradient of the cell state")
    if len(node.edges) == 3:
        return [gates, gates, of_cell]
    bias = new_tensor(node.memory, workspace.shape[1:], workspace.dtype, "gradient of the bias")
    return [gates, gates, of_cell, bias, bias]


@autocast("_thnn_fused_gru_cell")
def gru_cell(
    of_input: Tensor, of_state: Tensor, state: Tensor, input_bias: Tensor | None, state_bias: Tensor | None
) -> Tensor:
    """Compute `_thnn_fused_gru_cell`: gates (batch, 3·hidden) of the input and of the state, and the state (batch,
    hidden) -> the next state. The workspace has five values for each of the state's (native/cuda/RNN.cu,
    GRU_WORKSPACE_MULTIPLIER)."""
    memory, (batch, hidden) = of_input.memory, state.shape
    workspace = new_tensor(memory, (batch, Dim("5·hidden", 5 * hidden.size)), state.dtype, "gates")
    out = new_tensor(memory, state.shape, state.dtype, "state")
    inputs = [t for t in (of_input, of_state, state, input_bias, state_bias) if t is not None]
    if recording(*inputs):
        out.node = Node(memory, _gru_cell_backward, inputs, [*inputs, workspace])
    return out


def _gru_cell_backward(node: Node, grads: list[Tensor]) -> list[Tensor | None]:
    _saved = node.unpack()
    (gates, dtype), _, (state, _dtype) = node.metadata[:3]
    of_gates = [new_tensor(node.memory, gates, dtype, f"gradient of the gates of the {s}") for s in ("input", "state")]
    of_state = new_tensor(node.memory, state, dtype, "gradient of the state")
    biases = [new_tensor(node.memory, shape, kind, "gradient of the bias") for shape, kind in node.metadata[3:]]
    return [*of_gates, of_state, *biases]


def unbind(a: Tensor) -> tuple[Tensor, ...]:
    """Compute `a.unbind(0)`: views with one grad_fn. Backward stacks their gradients in one new tensor."""
    count = a.shape[0].size
    node = Node(a.memory, _unbind_backward, (a,), (), a.shape, outputs=count) if recording(a) else None
    return tuple(Tensor(a.storage, a.shape[1:], a.strides[1:], a.dtype, node, i) for i in range(count))


@no_kernel
def _unbind_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    given = [grad for grad in grads if grad is not None]  # type: ignore[redundant-expr]
    _zeros = [
        new_tensor(node.memory, node.context[1:], given[0].dtype, "zeros")
        for grad in grads
        if grad is None  # type: ignore[redundant-expr]
    ]
    return [new_tensor(node.memory, node.context, given[0].dtype, "gradient of the steps")]


def stack_first(tensors: Sequence[Tensor], count: Dim) -> Tensor:
    """Compute `torch.stack(tensors, 0)`, contiguous. Backward is a view for each."""
    first = tensors[0]
    out = new_tensor(first.memory, (count, *first.shape), first.dtype, "steps")
    if recording(*tensors):
        out.node = Node(first.memory, _stack_first_backward, tensors)
    return out


def _stack_first_backward(node: Node, grads: list[Tensor]) -> list[Tensor | None]:
    (grad,) = grads
    piece = Tensor(grad.storage, grad.shape[1:], grad.strides[1:], grad.dtype)
    return [piece if node.needs(i) else None for i in range(len(node.edges))]


def both_ways(forth: Tensor, back: Tensor, width: Dim) -> Tensor:
    """Compute the output of a bidirectional layer: the two directions side by side."""
    return cat((forth, back), width)
