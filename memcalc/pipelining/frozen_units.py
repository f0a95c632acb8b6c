"""FSDP2's units of frozen layers in a pipeline: a backward does not reach them, or gathers one of them for nothing.

A stage's backward ends at the first layer that needs a gradient, if the stage's input needs none. The hook before that layer's
backward gathers the layer before it ahead (_backward_prefetch in torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py).
Nobody waits for this gather, so its result stays until the layer's next forward, which takes it, or until the step's reduction
(finalize_backward).
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from memcalc.pipelining.actions import Action
    from memcalc.pipelining.orders import Wanted

Part = Literal["has a backward", "is gathered for it", "has none"]
"""The part of a layer in its stage's backward."""


def gathers_of_frozen(actions: Sequence[Action], *, reshards: bool, ahead: bool) -> Counter[tuple[int, Wanted]]:
    """Return how often a unit of each chunk that has no backward is gathered, by the action that needs it or gathers it.

    `reshards`: parameters are freed after every forward. `ahead`: the unit is gathered ahead in each backward, for nothing.
    """
    calls: Counter[tuple[int, Wanted]] = Counter()
    whole: set[int] = set()
    waiting: set[int] = set()
    for kind, chunk, _ in actions:
        if kind in ("reshard", "reduce"):
            whole.discard(chunk)
            if kind == "reduce":
                waiting.discard(chunk)
        elif kind in ("unshard", "forward"):
            if chunk not in whole | waiting:
                calls[chunk, kind] += 1
            waiting.discard(chunk)
            whole.add(chunk)
            if kind == "forward" and reshards:
                whole.discard(chunk)
        elif ahead and kind in ("backward", "backward of inputs") and chunk not in whole | waiting:
            calls[chunk, "backward"] += 1
            waiting.add(chunk)
    return calls
