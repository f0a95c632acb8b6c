"""Log-probabilities of tokens from logits, as TRL's trainers without a head of their own compute them: `selective_log_softmax`
(trl/trainer/utils.py), behind a division in place by the temperature.

Sources of what each op saves and what its backward allocates: tools/autograd/derivatives.yaml,
torch/csrc/autograd/FunctionsManual.cpp (logsumexp_backward), torch/csrc/autograd/custom_function.cpp (CopySlices).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcalc.core.autograd import Node
from memcalc.core.dims import ONE_DIM, Dim
from memcalc.core.dtypes import fp32
from memcalc.core.ops.axes import narrow, squeeze, unbind
from memcalc.core.ops.elementwise import like, recording, sub
from memcalc.core.ops.loss import log_softmax
from memcalc.core.ops.routing import gather
from memcalc.core.ops.shape import unsqueeze
from memcalc.core.tensor import Tensor, contiguous_strides, new_tensor

if TYPE_CHECKING:
    from collections.abc import Sequence


def divided_in_place(base: Tensor, positions: Dim) -> tuple[Tensor, Tensor]:
    """Compute `view = base[:, a:b]; view /= number`. Returns the base and the view behind the division."""
    node = Node(base.memory, _divided_backward, (base,), (), positions) if recording(base) else None
    divided = Tensor(base.storage, base.shape, base.strides, base.dtype, node)
    return divided, narrow(divided, 1, positions)


def _divided_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    """Run CopySlices: a copy of the gradient, of which the view's part is cloned, divided and copied back."""
    result = like(grads[0], "gradient of the base")
    batch, _seq, vocab = result.shape
    of_the_view = new_tensor(node.memory, (batch, node.context, vocab), result.dtype, "gradient of the view")
    _quotient = like(of_the_view, "quotient gradient")
    return [result]


def selective_log_softmax(logits: Tensor, index: Tensor) -> Tensor:
    """Compute the log-probability of each token: logits (batch, positions, vocab), index (batch, positions). In fp32 from
    logsumexp of each sequence, else from its log_softmax."""
    memory, batch = logits.memory, logits.shape[0]
    index = unsqueeze(index, 2)
    if logits.dtype is fp32:
        selected = gather(logits, index)
        sums = _stacked([logsumexp(row) for row in unbind(logits, 0)], batch)
        per_token = sub(selected, unsqueeze(sums, 2))
        return squeeze(per_token, 2)
    of_rows: list[Tensor] = []
    for row, labels in zip(unbind(logits, 0), unbind(index, 0), strict=True):
        row_logps = log_softmax(row)
        of_rows.append(gather(row_logps, labels))
    out = _stacked(of_rows, batch)
    del of_rows, memory
    return squeeze(out, 2)


def logsumexp(x: Tensor) -> Tensor:
    """Compute `torch.logsumexp(x, -1)` (logsumexp_out_impl in aten/src/ATen/native/ReduceOps.cpp). It saves x and its
    result."""
    largest = new_tensor(x.memory, (*x.shape[:-1], ONE_DIM), x.dtype, "largest logits")
    rest = like(x, "logits below the largest")
    out = new_tensor(x.memory, x.shape[:-1], x.dtype, "logsumexp")
    del largest, rest
    if recording(x):
        result = Tensor(out.storage, out.shape, out.strides, out.dtype)
        out.node = Node(x.memory, _logsumexp_backward, (x,), (x, result))
    return out


def _logsumexp_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    x, _result = node.unpack()
    # grad * (self - result).exp(): one C++ expression
    _temporaries = [like(x, "logsumexp gradient") for _ in ("sub", "exp")]
    return [like(x, "logsumexp gradient")]


def _stacked(rows: Sequence[Tensor], count: Dim) -> Tensor:
    """Compute `torch.stack(rows)`. Backward is a view for each row."""
    first = rows[0]
    out = new_tensor(first.memory, (count, *first.shape), first.dtype, "stack")
    if recording(*rows):
        out.node = Node(first.memory, _stacked_backward, rows)
    return out


def _stacked_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    """Run unbind of the gradient."""
    (grad,) = grads
    shape = grad.shape[1:]
    row = Tensor(grad.storage, shape, contiguous_strides(shape), grad.dtype)
    return [row for _ in node.edges]
