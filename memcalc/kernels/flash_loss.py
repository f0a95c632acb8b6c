"""The cross-entropy of the flash-attn package with `inplace_backward=True` (flash_attn 2.8.3, losses/cross_entropy.py and
ops/triton/cross_entropy.py).

It takes the logits in the model's dtype. No fp32 copy and no log-probabilities are made. The logits are kept for
backward, which writes their gradient over them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcalc.core.autograd import Node
from memcalc.core.dims import merge
from memcalc.core.dtypes import boolean, fp32, int64
from memcalc.core.ops.elementwise import over, recording
from memcalc.core.ops.shape import view
from memcalc.core.tensor import Tensor, new_tensor
from memcalc.families.base import blocks
from memcalc.kernels.liger import alias

if TYPE_CHECKING:
    from memcalc.families.base.module import Run


def causal_lm_loss(run: Run, logits: Tensor, labels: Tensor) -> Tensor:
    """Run CrossEntropyLoss over the logits and the next tokens, shifted as in ForCausalLMLoss."""
    run.memory.scope = "loss"
    if run.shift_labels is not None:
        run.logits = logits
    _padded, target = blocks.shifted_labels(run, labels)
    return _mean_loss(view(logits, merge(*logits.shape[:-1]), logits.shape[-1]), target)


def _mean_loss(logits: Tensor, target: Tensor) -> Tensor:
    losses, _z_losses = _cross_entropy(logits, target)
    total = new_tensor(logits.memory, (), fp32, "sum of the losses")
    if recording(losses):
        total.node = Node(logits.memory, _sum_backward, (losses,), (), losses.shape)
    counted = new_tensor(logits.memory, target.shape, boolean, "tokens that count")
    count = new_tensor(logits.memory, (), int64, "how many count")
    del counted
    return over(total, count)


def _sum_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    return [Tensor(grads[0].storage, node.context, (0,) * len(node.context), grads[0].dtype)]


def _cross_entropy(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return the loss and the z-loss of each token. The logits, the logarithm of each token's sum and the targets are
    kept."""
    losses, sums, z_losses = (
        new_tensor(logits.memory, target.shape, fp32, name)
        for name in ("loss of each token", "logarithm of each sum", "z-loss of each token")
    )
    if recording(logits):
        losses.node = Node(logits.memory, _cross_entropy_backward, (logits,), (logits, sums, target))
    return losses, z_losses


def _cross_entropy_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    logits, _sums, _target = node.unpack()
    return [alias(logits)]
