"""Cross-entropy as PyTorch computes it: log_softmax over the logits, then the negative log-likelihood.

log_softmax is told to keep the logits' dtype, so autocast does not cast it (cross_entropy_loss in LossNLL.cpp).
log_softmax saves its result. nll_loss saves the same result, the targets and a total weight. Each backward allocates
the full (tokens, vocab) matrix.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcalc.core.autograd import Node
from memcalc.core.ops.autocast import autocast
from memcalc.core.ops.elementwise import recording
from memcalc.core.tensor import Tensor, new_tensor

if TYPE_CHECKING:
    from memcalc.core.dtypes import DType


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Compute the mean loss: logits (tokens, vocab), targets (tokens) -> a scalar."""
    return _nll_loss(log_softmax(logits), targets)


def log_softmax(logits: Tensor) -> Tensor:
    """Compute `log_softmax(logits, -1)` in the logits' dtype. It saves its result."""
    out = new_tensor(logits.memory, logits.shape, logits.dtype, "log-probabilities")
    if recording(logits):
        saved = Tensor(out.storage, out.shape, out.strides, out.dtype)
        out.node = Node(out.memory, _log_softmax_backward, (logits,), (saved,))
    return out


def _log_softmax_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    (result,) = node.unpack()
    return [new_tensor(node.memory, result.shape, result.dtype, "logits gradient")]


@autocast("nll_loss")
def _nll_loss(log_probabilities: Tensor, targets: Tensor) -> Tensor:
    dtype: DType = log_probabilities.dtype
    loss = new_tensor(targets.memory, (), dtype, "loss")
    weight = new_tensor(targets.memory, (), dtype, "total weight of the targets")
    if recording(log_probabilities):
        loss.node = Node(loss.memory, _nll_loss_backward, (log_probabilities,), (log_probabilities, targets, weight))
    return loss


def _nll_loss_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    log_probabilities, _targets, _weight = node.unpack()
    return [new_tensor(node.memory, log_probabilities.shape, log_probabilities.dtype, "log-probabilities gradient")]
