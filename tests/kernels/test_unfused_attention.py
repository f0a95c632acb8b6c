"""Attention without a fused kernel, against Transformer Engine's own."""

from __future__ import annotations

import pytest
import torch
from kernel_bytes import Arg, Bytes, Kernel, in_torch, on_paper
from oracle import LiveBytes
from unfused_attention_oracle import attention

from memcalc.core.dims import Dim
from memcalc.core.dtypes import DType, bf16, boolean, fp16, fp32
from memcalc.core.ops.shape import transpose
from memcalc.core.tensor import Tensor, new_tensor
from memcalc.kernels.unfused_attention import has_kernel, unfused_attention

Case = tuple[DType, bool, int, int, int, int, int, int]
CASES: list[Case] = [
    # dtype, with the batch's mask, batch, seq, heads, kv_heads, head_dim, width of values
    (bf16, True, 2, 64, 4, 4, 16, 16),
    (bf16, False, 1, 256, 4, 4, 8, 8),
    (fp16, True, 2, 48, 4, 2, 16, 16),
    (fp32, True, 2, 64, 4, 4, 16, 16),
    (fp32, False, 3, 40, 2, 2, 8, 8),
    (fp32, True, 2, 20, 6, 2, 8, 8),
    (bf16, True, 2, 20, 6, 2, 8, 8),  # sizes that the fused softmax does not take
    (bf16, False, 1, 64, 2, 2, 16, 16),
    (bf16, True, 2, 64, 4, 4, 24, 16),
    (fp32, True, 2, 64, 4, 4, 24, 16),
    (bf16, True, 2, 1, 4, 2, 16, 16),
    (fp32, True, 2, 1, 2, 2, 8, 8),
]


class OnTheGPU(LiveBytes):
    """Without a scale of the softmax, a number that is never moved to the device."""

    def register(self, tensor: torch.Tensor) -> int:
        return 0 if tensor.numel() == 1 else super().register(tensor)


def kernel(
    dtype: DType, masked: bool, batch: int, seq: int, heads: int, kv_heads: int, width: int, v_width: int
) -> Kernel:
    """Of operands (seq, batch, …), as Megatron has them."""

    def ours(*qkv: Tensor) -> Tensor:
        q, k, v = (transpose(transpose(x, 0, 1), 1, 2) for x in qkv)
        tokens = q.shape[2]
        mask = new_tensor(q.memory, (q.shape[0], Dim("1", 1), tokens, tokens), boolean, "mask") if masked else None
        return unfused_attention(q, k, v, mask, 0.0)

    def theirs(*qkv: torch.Tensor) -> torch.Tensor:
        return attention(*qkv, torch.ones((batch, 1, seq, seq), dtype=torch.bool) if masked else None, 0.0)

    sizes = ((heads, width), (kv_heads, width), (kv_heads, v_width))
    return Kernel(ours, theirs, tuple(Arg((seq, batch, *size), dtype) for size in sizes))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_saves_and_allocates_what_the_real_one_does(case: Case) -> None:
    made = kernel(*case)
    real: Bytes = in_torch(made, OnTheGPU())
    assert on_paper(made) == real


def test_which_sizes_its_softmax_takes() -> None:
    assert has_kernel(bf16, 4, 4096) and has_kernel(fp16, 32, 16376)
    assert not has_kernel(fp32, 4, 4096)
    assert not has_kernel(bf16, 4, 16384) and not has_kernel(bf16, 6, 4096) and not has_kernel(bf16, 4, 4092)
