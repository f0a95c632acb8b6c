"""The first matrix product of a thread: cuBLAS allocates its workspace there, once its result is allocated.

Source: aten/src/ATen/cuda/CublasHandlePool.cpp (getCurrentCUDABlasHandle). The thread that runs forward has a handle, and
autograd's thread, which also recomputes, has another. Which cached block the workspace takes decides whether the next step
finds a block for its logits: a workspace that is cut from such a block leaves too small a rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from memcalc.megatron.between_stages import Kind
from memcalc.tape.runs import Trace

_GRADIENTS = ("weight gradient", "input gradient")


def first_products(run: Trace, log: Sequence[int], rows: Sequence[int], backward: int) -> dict[Kind, int]:
    """Return the index in `log` of the allocation of the first product in forward and in backward; none for a phase that
    multiplies no matrices.

    `log` holds i where block i is allocated, as row `rows[i]` of the run, and ~i where it is freed; `backward` is the index
    at which backward begins.
    """
    products = {(work.scope, work.name) for work in run.work if work.kind == "matmul"}
    gradients = {f"{name} {which}" for _, name in products for which in _GRADIENTS} | {"bmm gradient"}
    parts: Mapping[Kind, range] = {"forward": range(backward), "backward": range(backward, len(log))}
    out: dict[Kind, int] = {}
    for kind, part in parts.items():
        for place in part:
            if log[place] >= 0:
                row = run.rows[rows[log[place]]]
                if (row.scope, row.name) in products or (kind == "backward" and row.name in gradients):
                    out[kind] = place
                    break
    return out
