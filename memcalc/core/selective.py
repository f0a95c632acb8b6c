"""Selective checkpointing: inside a checkpointed function, the results of some ops are kept and not recomputed.

Source: torch/utils/checkpoint.py, create_selective_checkpoint_contexts. In the first run a policy is asked about every
op. The results that it keeps are alive besides the tensors that autograd saves. The recomputation takes the kept
results in their order, each once, and computes the others again. If it ends early, results that it has not taken stay
as long as the checkpoint does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from memcalc.core.tensor import Tensor

if TYPE_CHECKING:
    from memcalc.core.hooks import Contexts
    from memcalc.core.tensor import Memory

Results = tuple[Tensor, ...]
Policy = Callable[[str, int], bool]
"""Called with an op and the number of its call, counted from 0 within one checkpoint. Returns whether the call's
results are kept."""

PRODUCT: Final = "mm"
"""The product of two matrices."""
ATTENTION: Final = "scaled_dot_product_attention"
"""Attention as one fused kernel."""
REDUCE_SCATTER: Final = "reduce_scatter"
"""The reduce-scatter between tensor-parallel ranks."""
MAXIMUM: Final = "max"
"""The maximum of a whole tensor."""


def per_op(op: str, call: int) -> bool:
    """Tell whether torchtitan keeps the results of an op (torchtitan 0.2.2,
    torchtitan/distributed/activation_checkpoint.py, _apply_op_sac, with the ops of its Llama 3).

    Fused attention is kept, and so is every second product of two matrices, beginning with the first. A linear layer
    with a bias is another op (addmm), and so are batched and grouped products: these are recomputed. The results of a
    reduce-scatter between ranks are kept.
    """
    return op in (ATTENTION, REDUCE_SCATTER, MAXIMUM) or (op == PRODUCT and call % 2 == 0)


def selected(memory: Memory, op: str, run: Callable[[], Results]) -> Results:
    """Return the results of an op that a policy may keep. The op runs unless a checkpoint has kept its results."""
    return run() if memory.contexts is None else memory.contexts.call(op, run)


class Keeping:
    """The context of the first run (_CachingTorchDispatchMode)."""

    __slots__ = ("calls", "kept", "outer", "policy")

    def __init__(self, policy: Policy, outer: Contexts | None) -> None:
        self.policy, self.outer = policy, outer
        self.calls: Counter[str] = Counter()
        self.kept: dict[tuple[str, int], Results | None] = {}
        """The results of each call by op and number; None if they are to be recomputed."""

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
