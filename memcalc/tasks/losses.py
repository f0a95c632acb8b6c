"""Reductions and functions of log-probabilities, which only losses of preferences have.

Sources of what each op saves and what its backward allocates: tools/autograd/derivatives.yaml and FunctionsManual.cpp.
"""

from __future__ import annotations

from memcalc.core.autograd import Node
from memcalc.core.dtypes import boolean, int64
from memcalc.core.ops.elementwise import like, of_two, recording
from memcalc.core.tensor import Tensor, new_tensor


def sum_of_positions(a: Tensor) -> Tensor:
    """Compute `a.sum(dim=1)` of (sequences, positions) in fp32. The gradient is the incoming one, expanded."""
    out = new_tensor(a.memory, a.shape[:1], a.dtype, "log-probabilities of sequences")
    if recording(a):
        out.node = Node(a.memory, _sum_backward, (a,), (), a.shape)
    return out


def _sum_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    return [Tensor(grads[0].storage, node.context, (*grads[0].strides, 0), grads[0].dtype)]


def mean_all(a: Tensor) -> Tensor:
    """Compute `a.mean()`. Backward divides the expanded gradient."""
    out = new_tensor(a.memory, (), a.dtype, "mean")
    if recording(a):
        out.node = Node(a.memory, _mean_backward, (a,), (), a.shape)
    return out


def _mean_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    return [new_tensor(node.memory, node.context, grads[0].dtype, "mean gradient")]


def log_sigmoid(a: Tensor) -> Tensor:
    """Compute `logsigmoid(a)` on CUDA, where there is no buffer. It saves a."""
    node = Node(a.memory, _log_sigmoid_backward, (a,), (a,)) if recording(a) else None
    out = like(a, "log of the sigmoid")
    out.node = node
    return out


def _log_sigmoid_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    (a,) = node.unpack()
    return [of_two(a, grads[0], "gradient of the log of the sigmoid")]


def of_sequences(a: Tensor, where: Tensor) -> Tensor:
    """Compute `a.index_select(0, where)` of one number for each sequence. It saves the places."""
    node = Node(a.memory, _of_sequences_backward, (a,), (where,)) if recording(a) else None
    out = new_tensor(a.memory, where.shape[:1], a.dtype, "log-probabilities of some sequences")
    out.node = node
    return out


def _of_sequences_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    _where = node.unpack()
    return [new_tensor(node.memory, node.metadata[0][0], grads[0].dtype, "gradient of all sequences")]


def mean_without_nan(a: Tensor) -> Tensor:
    """Compute `a.nanmean()`. It saves a, and the number of its elements that count."""
    memory = a.memory
    counted = like(a, "elements that count", boolean)
    number = new_tensor(memory, (), int64, "number of elements that count")
    del counted
    total = new_tensor(memory, (), a.dtype, "sum")
    if recording(a):
        total.node = Node(memory, _sum_without_nan_backward, (a,), (a,))
    node = Node(memory, _divided_backward, (total,), (number,)) if recording(total) else None
    out = like(total, "mean")
    out.node = node
    return out


def _divided_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    _number = node.unpack()
    return [like(grads[0], "gradient of the sum")]


def _sum_without_nan_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    (a,) = node.unpack()
    _counted = like(a, "elements that count", boolean)
    return [like(a, "gradient of the elements")]


def smaller(a: Tensor, b: Tensor) -> Tensor:
    """Compute `torch.min(a, b)`. It saves both."""
    node = Node(a.memory, _smaller_backward, (a, b), (a, b)) if recording(a, b) else None
    out = of_two(a, b, "minimum")
    out.node = node
    return out


def _smaller_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    a, b = node.unpack()
    return [_share_of(a, b, grads[0]), _share_of(b, a, grads[0])]


def _share_of(a: Tensor, b: Tensor, grad: Tensor) -> Tensor:
    """Compute `where(a == b, grad / 2, grad).masked_fill_(a > b, 0)`."""
    equal, half = of_two(a, b, "equal", boolean), like(grad, "half of the gradient")
    share = like(grad, "minimum gradient")
    _larger = of_two(a, b, "larger", boolean)
    del equal, half
    return share
