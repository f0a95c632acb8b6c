"""The loss over a vocabulary that tensor-parallel ranks share, against Megatron-Core's own."""

from __future__ import annotations

import pytest
import torch
from kernel_bytes import Arg, Bytes, Kernel, in_torch, on_paper
from megatron_oracle import one_rank
from records import on_record

from memcalc.core.dtypes import DType, bf16, fp16, fp32, int64
from memcalc.core.ops.elementwise import scale
from memcalc.core.tensor import Tensor, new_tensor
from memcalc.kernels.megatron import _cross_entropy  # pyright: ignore[reportPrivateUsage]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("dtype", [bf16, fp16, fp32], ids=lambda dtype: dtype.name)
def test_it_saves_and_allocates_what_the_real_one_does(dtype: DType, ranks: int) -> None:
    """fp32 logits are not copied: the softmax is written over them."""

    def ours(logits: Tensor) -> Tensor:
        made = scale(logits, "mul")
        return _cross_entropy(made, new_tensor(logits.memory, logits.shape[:2], int64, "targets"))

    assert on_paper(Kernel(ours, theirs, (Arg((12, 3, 40), dtype),))) == real(dtype, ranks)


def theirs(logits: torch.Tensor) -> torch.Tensor:
    from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy

    targets = torch.zeros(logits.shape[:2], dtype=torch.int64)
    return vocab_parallel_cross_entropy(logits * 1.0, targets).view(-1)


@on_record
def real(dtype: DType, ranks: int) -> Bytes:
    with one_rank(ranks):
        return in_torch(Kernel(scale, theirs, (Arg((12, 3, 40), dtype),)))
