"""Cross-entropy over a vocabulary that ranks share (colossalai/legacy/nn/loss/loss_{1d,2d,2p5d,3d}.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcalc.core.autograd import Node
from memcalc.core.dims import merge, plus
from memcalc.core.dtypes import boolean, int64
from memcalc.core.ops.elementwise import like, recording
from memcalc.core.ops.shape import contiguous, part, reshape, view
from memcalc.core.tensor import Tensor, new_tensor
from memcalc.layout.tensor_dims.sending import own_sequences, send

if TYPE_CHECKING:
    from memcalc.core.dtypes import DType


def shifted_loss(logits: Tensor, ids: Tensor, parts: int, group: str, batch_groups: tuple[str, ...]) -> Tensor:
    """Run GPTLMLoss: the mean loss of all tokens but the last of each sequence. `ids` are all sequences of the grid's
    square, cube or line, `parts` the ranks that share them. The frame holds the shifted logits."""
    later = plus(logits.shape[1], -1)
    shift_logits = contiguous(part(logits, later, 1))
    labels = contiguous(part(ids, later, 1))
    rows = merge(*shift_logits.shape[:2])
    targets = reshape(labels, merge(*labels.shape))
    own = own_sequences(targets, parts) if parts > 1 else targets
    in_place = group == "all"  # one dimension subtracts the maximum from the logits themselves
    losses = _vocab_parallel(view(shift_logits, rows, logits.shape[2]), own, group, in_place=in_place)
    mean = _mean(losses)
    for of in batch_groups:
        send(mean.memory, of, "all_reduce", "mean loss", (), mean.dtype)
    return _average(mean) if batch_groups else mean


def _vocab_parallel(logits: Tensor, targets: Tensor, group: str, *, in_place: bool) -> Tensor:
    """Run _VocabParallelCrossEntropy: three all-reduces of one number for each token. It saves the softmax, the mask and
    the targets."""
    memory, tokens = logits.memory, targets.shape

    def each_token(dtype: DType, name: str) -> Tensor:
        return new_tensor(memory, tokens, dtype, name)

    for name in ("maximum of the logits", "logits of the targets", "sum of exponentials"):
        send(memory, group, "all_reduce", name, tokens, logits.dtype)
    logits_max, places = each_token(logits.dtype, "maximum"), each_token(int64, "place of the maximum")
    del places
    less = logits if in_place else like(logits, "logits less their maximum")
    below, above = each_token(boolean, "below the vocabulary"), each_token(boolean, "above the vocabulary")
    target_mask = each_token(boolean, "outside the vocabulary")
    del below, above
    copied = each_token(int64, "targets")
    masked_target = each_token(int64, "targets")
    del copied
    rows = each_token(int64, "rows")
    predicted = each_token(logits.dtype, "logits of the targets")
    exp_logits = like(logits, "softmax")
    sums = each_token(logits.dtype, "sums")
    logarithms = each_token(logits.dtype, "logarithms of the sums")
    losses = each_token(logits.dtype, "loss of each token")
    del less, logits_max, rows, predicted, sums, logarithms
    if recording(logits):
        losses.node = Node(memory, _vocab_parallel_backward, (logits,), (exp_logits, target_mask, masked_target))
    return losses


def _vocab_parallel_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    """Write the gradient over the softmax."""
    softmax, _mask, masked_target = node.unpack()
    rows = new_tensor(node.memory, masked_target.shape, int64, "rows")
    update = new_tensor(node.memory, masked_target.shape, softmax.dtype, "update of the targets")
    del rows, update
    return [Tensor(softmax.storage, softmax.shape, softmax.strides, softmax.dtype)]


def _mean(losses: Tensor) -> Tensor:
    out = new_tensor(losses.memory, (), losses.dtype, "mean loss of the rank")
    if recording(losses):
        out.node = Node(losses.memory, _mean_backward, (losses,), (), losses.shape)
    return out


def _mean_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    return [new_tensor(node.memory, node.context, grads[0].dtype, "gradient of each token's loss")]


def _average(mean: Tensor) -> Tensor:
    """Run reduce_by_batch: a copy of the sum over the ranks, divided by their number."""
    copied = new_tensor(mean.memory, (), mean.dtype, "sum of the ranks' losses")
    out = new_tensor(mean.memory, (), mean.dtype, "loss")
    del copied
    if recording(mean):
        out.node = Node(mean.memory, _average_backward, (mean,), ())
    return out


def _average_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    return [new_tensor(node.memory, (), grads[0].dtype, "gradient over the ranks")]
