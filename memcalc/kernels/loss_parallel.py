"""torch's `loss_parallel`: cross-entropy of logits that stay split over the vocabulary
(torch/distributed/tensor/parallel/loss.py). Ranks exchange three numbers of each token.

log_softmax and nll_loss keep what the ordinary ones keep. The backward of log_softmax does nothing, because that of
nll_loss has done its part.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcalc.core.autograd import Node
from memcalc.core.dims import ONE_DIM, Shape, merge
from memcalc.core.dtypes import boolean, fp32, int64
from memcalc.core.ops.elementwise import cast, like, recording
from memcalc.core.ops.selection import where
from memcalc.core.ops.shape import view
from memcalc.core.tensor import Tensor, new_tensor
from memcalc.families.base.blocks import shifted_labels

if TYPE_CHECKING:
    from memcalc.families.base.module import Run


def causal_lm_loss(run: Run, logits: Tensor, labels: Tensor) -> Tensor:
    """Compute ForCausalLMLoss (transformers' loss/loss_utils.py) under `loss_parallel()`: logits (batch, seq,
    vocab/tp)."""
    run.memory.scope = "loss"
    logits = cast(logits, fp32)
    _padded, shift_labels = shifted_labels(run, labels)
    logits = view(logits, merge(*logits.shape[:-1]), logits.shape[-1])
    return _nll_loss(run, _log_softmax(run, logits), shift_labels)


def _log_softmax(run: Run, logits: Tensor) -> Tensor:
    each = (logits.shape[0], ONE_DIM)
    maximum = new_tensor(run.memory, each, fp32, "maximum")
    maximum = _all_reduced(run, maximum, "maxima of the logits")
    shifted = like(logits, "logits, shifted")
    exponentials = like(logits, "exponentials")
    total = new_tensor(run.memory, each, fp32, "sum of the exponentials")
    del exponentials
    total = _all_reduced(run, total, "sums of the exponentials")
    _logarithms = like(total, "logarithms of the sums")
    out = like(shifted, "log-probabilities")
    if recording(logits):
        saved = Tensor(out.storage, out.shape, out.strides, out.dtype)
        out.node = Node(run.memory, _log_softmax_backward, (logits,), (saved,))
    return out


def _log_softmax_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    _result = node.unpack()
    return grads


def _nll_loss(run: Run, log_probabilities: Tensor, targets: Tensor) -> Tensor:
    memory, each = run.memory, (*targets.shape, ONE_DIM)
    _safe_target = _not_ignored(targets, targets, "targets")
    outside, _within = _in_the_shard(targets)
    partial = new_tensor(memory, each, fp32, "log-probabilities of the targets")
    del outside
    _reduced = _all_reduced(run, partial, "log-probabilities of the targets")
    result = new_tensor(memory, targets.shape, fp32, "losses of the tokens")
    result = _not_ignored(targets, result, "losses of the tokens")
    weight = new_tensor(memory, (), fp32, "total weight of the targets")
    loss = new_tensor(memory, (), fp32, "loss")
    if recording(log_probabilities):
        loss.node = Node(memory, _nll_loss_backward, (log_probabilities,), (log_probabilities, targets, weight))
    return loss


def _nll_loss_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    log_probabilities, targets, _weight = node.unpack()
    memory = node.memory
    grad_output = new_tensor(memory, (), fp32, "gradient of the sum")
    _safe_target = _not_ignored(targets, targets, "targets")
    grad_input = like(log_probabilities, "minus one at the targets")
    outside, _within = _in_the_shard(targets)
    update = like(outside, "update", fp32)
    update = like(update, "update")
    _arange = like(targets, "rows")
    grad_output = _not_ignored(targets, grad_output, "gradients of the tokens", (*targets.shape, ONE_DIM))
    exponentials = like(log_probabilities, "exponentials")
    total = like(grad_input, "softmax minus one at the targets")
    del exponentials
    return [like(total, "logits gradient")]


def _not_ignored(targets: Tensor, value: Tensor, name: str, shape: Shape | None = None) -> Tensor:
    """Compute `torch.where(targets != ignore_index, value, 0)`."""
    mask = like(targets, "not ignored", boolean)
    if shape is None:
        return where(mask, value, name)
    scalar = new_tensor(targets.memory, (), value.dtype, name)
    out = new_tensor(targets.memory, shape, value.dtype, name)
    del scalar
    return out


def _in_the_shard(targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return a mask of the targets of other ranks, and the targets counted from this rank's first
    (_MaskPartial._mask_tensor)."""
    below, above = like(targets, "targets below the shard", boolean), like(targets, "targets above the shard", boolean)
    outside = like(targets, "targets outside the shard", boolean)
    del below, above
    copied = like(targets, "targets, copied")
    within = new_tensor(targets.memory, targets.shape, int64, "targets within the shard")
    del copied
    return outside, within


def _all_reduced(run: Run, partial: Tensor, name: str) -> Tensor:
    assert run.tensor_parallel is not None
    run.tensor_parallel.send(run.memory, "all_reduce", name, partial.shape, partial.dtype)
    return like(partial, f"{name}, reduced")
