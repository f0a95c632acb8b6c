"""Orders of one forward and one backward in turn behind a warm-up of some forwards."""

from __future__ import annotations

from memcalc.pipelining.actions import Action


def one_forward_one_backward(warmup: int, micro_batches: int) -> list[Action]:
    """Return `warmup` forwards, then a backward and a forward in turn, then the backwards that are left."""
    first = min(warmup, micro_batches)
    out = [Action("forward", 0, i) for i in range(first)]
    for i in range(micro_batches):
        out.append(Action("backward", 0, i))
        if first + i < micro_batches:
            out.append(Action("forward", 0, first + i))
    return out
