"""Selective checkpointing: of what a checkpointed function does, the results of some ops are kept and not recomputed.

Source: torch/utils/checkpoint.py, create_selective_checkpoint_contexts. In the first run a policy is asked about every op;
what it keeps is held besides what autograd saves. The second run takes the kept results in their order, each once, and
recomputes the others. What is not taken, because the recomputation ends before, stays as long as the checkpoint does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from memcalc.core.tensor import Tensor

if TYPE_CHECKING:
    from memcalc.core.tensor import Contexts, Memory

Results = tuple[Tensor, ...]
Policy = Callable[[str, int], bool]
"""Whether the results of an op's call of this number, counted from 0 within one checkpoint, are kept."""

PRODUCT: Final = "mm"
"""Of two matrices."""
ATTENTION: Final = "scaled_dot_product_attention"
"""As one kernel."""
REDUCE_SCATTER: Final = "reduce_scatter"
"""Between tensor-parallel ranks."""
MAXIMUM: Final = "max"
"""Of a whole tensor."""


def per_op(op: str, call: int) -> bool:
    """torchtitan 0.2.2, torchtitan/distributed/activation_checkpoint.py, _apply_op_sac, with the ops of its Llama 3: fused
    attention is kept, and every second product of two matrices, the first one included. A linear layer with a bias is
    another op (addmm), and so are batched and grouped products. What ranks have reduced and scattered is kept."""
    return op in (ATTENTION, REDUCE_SCATTER, MAXIMUM) or (op == PRODUCT and call % 2 == 0)


def selected(memory: Memory, op: str, run: Callable[[], Results]) -> Results:
    """The results of an op that a policy may keep. It runs, unless a checkpoint has kept them."""
    return run() if memory.contexts is None else memory.contexts.call(op, run)


class Keeping:
    """The context of the first run (_CachingTorchDispatchMode)."""

    __slots__ = ("calls", "kept", "outer", "policy")

    def __init__(self, policy: Policy, outer: Contexts | None) -> None:
        self.policy, self.outer = policy, outer
        self.calls: Counter[str] = Counter()
        self.kept: dict[tuple[str, int], Results | None] = {}
        """The results of each call; None is to be recomputed."""

    def call(self, op: str, run: Callable[[], Results]) -> Results:
        results = run() if self.outer is None else self.outer.call(op, run)
        number = self.calls[op]
        self.calls[op] += 1
        self.kept[op, number] = tuple(map(_detached, results)) if self.policy(op, number) else None
        return results


class Taking:
    """The context of the recomputation (_CachedTorchDispatchMode)."""

    __slots__ = ("calls", "kept", "outer")

    def __init__(self, kept: dict[tuple[str, int], Results | None], outer: Contexts | None) -> None:
        self.kept, self.outer = kept, outer
        self.calls: Counter[str] = Counter()

    def call(self, op: str, run: Callable[[], Results]) -> Results:
        results = self.kept.pop((op, self.calls[op]))
        self.calls[op] += 1
        if results is not None:
            return results
        return run() if self.outer is None else self.outer.call(op, run)


def _detached(tensor: Tensor) -> Tensor:
    return Tensor(tensor.storage, tensor.shape, tensor.strides, tensor.dtype)
