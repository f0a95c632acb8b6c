"""What one kernel keeps and allocates, on paper and in torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from oracle import LiveBytes
from torch._subclasses.fake_tensor import FakeTensorMode

from memcalc.core.autograd import Node, backward
from memcalc.core.dims import Dim, numel
from memcalc.core.dtypes import DType, bf16, fp16, fp32, int64
from memcalc.core.tensor import Memory, Tensor, new_tensor

if TYPE_CHECKING:
    from collections.abc import Callable

DTYPES: dict[DType, torch.dtype] = {bf16: torch.bfloat16, fp16: torch.float16, fp32: torch.float32, int64: torch.int64}


class Arg(NamedTuple):
    sizes: tuple[int, ...]
    dtype: DType = bf16
    grad: bool = True


class Kernel(NamedTuple):
    ours: Callable[..., Tensor]
    theirs: Callable[..., torch.Tensor]
    args: tuple[Arg, ...]


class Bytes(NamedTuple):
    """Above the operands: after forward without the result, and at the peaks of forward and backward."""

    kept: int
    forward: int
    backward: int
    flops: int


def on_paper(kernel: Kernel, memory: Memory | None = None) -> Bytes:
    memory = memory or Memory()
    operands: list[Tensor] = []
    for arg in kernel.args:
        operands.append(new_tensor(memory, tuple(Dim("n", n) for n in arg.sizes), arg.dtype, "operand"))
        if arg.grad:
            operands[-1].node = Node(memory, lambda node, grads: [], ())
    marks = [len(memory.log)]
    out = kernel.ours(*operands)
    marks.append(len(memory.log))
    backward(out)
    kept, forward = replay(memory, marks[0], marks[1], 0)
    _, peak = replay(memory, marks[1], len(memory.log), kept)
    return Bytes(kept, forward, peak, sum(2 * w.products * numel(w.factors)[0] for w in memory.work))


def replay(memory: Memory, first: int, last: int, now: int) -> tuple[int, int]:
    highest = now
    for event in memory.log[first:last]:
        row = memory.rows[event if event >= 0 else ~event]
        now += numel(row.shape)[0] * row.dtype.itemsize * (1 if event >= 0 else -1)
        highest = max(highest, now)
    return now, highest


def in_torch(kernel: Kernel, mode: LiveBytes | None = None) -> Bytes:
    mode = mode or LiveBytes()
    with FakeTensorMode(allow_non_fake_inputs=True):
        operands = [
            torch.empty(arg.sizes, dtype=DTYPES[arg.dtype], requires_grad=arg.grad) for arg in kernel.args
        ]  # fmt: skip
        leaves = [tensor for tensor in operands if tensor.requires_grad]
        with mode:
            for tensor in operands:
                mode.register(tensor)
            start = mode.now
            mode.begin()
            out = kernel.theirs(*operands)
            kept, forward = mode.now - start, mode.highest - start
            mode.begin()
            torch.autograd.grad(out, leaves, torch.empty(out.shape, dtype=out.dtype))
            return Bytes(kept, forward, mode.highest - start, sum(mode.flops.values()))
