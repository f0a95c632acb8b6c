"""The loss of each token, and what tensor-parallel ranks send each other for it (core/tensor_parallel/cross_entropy.py,
core/fusions/fused_cross_entropy.py, transformer_engine/pytorch/cross_entropy.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcalc.core.dims import Dim
from memcalc.core.dtypes import fp32
from memcalc.kernels import megatron as kernels

if TYPE_CHECKING:
    from memcalc.core.tensor import Tensor
    from memcalc.families.base.module import Run
    from memcalc.megatron.layers import TensorParallel


def losses(loss: str, run: Run, tp: TensorParallel, logits: Tensor, labels: Tensor) -> Tensor:
    """Return the loss of each token. `loss` is the name of its option `--cross-entropy`."""
    tokens = (run.batch, tp.whole)
    if loss == "vocab-parallel":
        for name in ("maximum of the logits", "logits of the targets", "sum of exponentials"):
            tp.send(run.memory, "all_reduce", name, tokens, fp32)
    elif loss == "vocab-parallel-fused":
        tp.send(run.memory, "all_reduce", "maximum of the logits", tokens, fp32)
        both = (Dim("2", 2), *tokens)
        tp.send(run.memory, "all_reduce", "logits of the targets and sums of exponentials", both, fp32)
    else:
        three = (*tokens, Dim("3·tp", 3 * tp.ranks))
        tp.send(run.memory, "all_gather", "softmax statistics", three, fp32)
    return kernels.TOKEN_LOSSES[loss](run, logits, labels)
