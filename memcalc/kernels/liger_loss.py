"""Liger-Kernel's cross-entropy over logits (liger_kernel 0.8.5, ops/cross_entropy.py), which `cross_entropy=True` of
`apply_liger_kernel_to_*` puts in the place of torch's.

transformers casts the logits to fp32 as ever. Their gradient is written over them in forward, so there are no
log-probabilities and no second matrix of gradients.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcalc.core.autograd import Node
from memcalc.core.dims import merge
from memcalc.core.dtypes import boolean, fp32, int64
from memcalc.core.ops.elementwise import cast, recording
from memcalc.core.ops.shape import view
from memcalc.core.tensor import Tensor, new_tensor
from memcalc.families.base import blocks
from memcalc.kernels.liger import alias

if TYPE_CHECKING:
    from memcalc.families.base.module import Run


def causal_lm_loss(run: Run, logits: Tensor, labels: Tensor) -> Tensor:
    """Run ForCausalLMLoss (transformers' loss/loss_utils.py) with LigerCrossEntropyFunction."""
    run.memory.scope = "loss"
    if run.shift_labels is not None:
        run.logits = logits
    logits = cast(logits, fp32)
    _padded, target = blocks.shifted_labels(run, labels)
    return _cross_entropy(view(logits, merge(*logits.shape[:-1]), logits.shape[-1]), target)


def _cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """Compute the mean loss: logits (tokens, vocab), target (tokens) -> a scalar."""
    memory, tokens = logits.memory, target.shape
    _losses = new_tensor(memory, tokens, logits.dtype, "loss of each token")
    _counted = new_tensor(memory, tokens, boolean, "tokens that count")
    count = new_tensor(memory, (), int64, "how many count")
    del count
    for bound in ("largest", "smallest"):
        checked = new_tensor(memory, tokens, int64, "targets that count")
        found = new_tensor(memory, (), int64, f"{bound} target")
        del checked, found
    loss = new_tensor(memory, (), logits.dtype, "loss")
    if recording(logits):
        loss.node = Node(memory, _cross_entropy_backward, (logits,), (alias(logits),))
    return loss


def _cross_entropy_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    _one = new_tensor(node.memory, (), fp32, "one")  # compared with the incoming gradient
    (gradient,) = node.unpack()
    return [alias(gradient)]
