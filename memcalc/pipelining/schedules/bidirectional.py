"""The eight parts of DualPipe's and DualPipeV's order (deepseek-ai/DualPipe, dualpipe.py and dualpipev.py, `step`).

`near` is the chunk whose micro-batches come in at this end of the pipeline, `far` the one whose micro-batches come back. A
rank's depth is the number of ranks between it and the end at which micro-batches come in; `deep` is the number of ranks
from that end to the middle.

In the middle of a step a forward of one chunk and a backward of the other overlap. What both make is sent when both are
over (`_forward_backward_chunk`). So they are played as one action, which takes as long as both.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from memcalc.pipelining.actions import Action
from memcalc.pipelining.schedules import in_their_order


def both_directions(depth: int, deep: int, of_each: int, near: int, far: int) -> Overlapped:
    """Return the order of a rank, with `of_each` micro-batches in each of its chunks."""
    order = _Order()
    above = deep - depth - 1
    for _ in range(2 * above):
        order.forward(near)
    for _ in range(depth + 1):
        order.forward(near)
        order.forward(far)
    for _ in range(above):
        order.inputs(far)
        order.weights()
        order.forward(far)
    for i in range(of_each - 2 * deep + depth + 1):
        order.both(near, far, apart=i == 0 and above == 0)
        order.both(far, near)
    for _ in range(above):
        order.backward(far)
        order.both(far, near)
    whole = depth + 1  # the first half of these backwards are whole, the others leave the weights for later
    for i in range(2 * (depth + 1)):
        chunk = near if i % 2 else far
        (order.backward if i < whole else order.inputs)(chunk)
    for _ in range(above):
        order.weights()
        order.inputs(near)
    order.all_weights()
    return Overlapped(in_their_order(order.steps), frozenset(order.joined))


class Overlapped(NamedTuple):
    """The order of a rank, and the places of the forwards that overlap with the backward behind them."""

    order: list[Action]
    joined: frozenset[int]


class _Order:
    """The steps so far, and the backwards whose weights wait, first in, first out."""

    def __init__(self) -> None:
        self.steps: list[tuple[str, int]] = []
        self.waiting: deque[int] = deque()
        self.joined: list[int] = []

    def both(self, forward: int, backward: int, *, apart: bool = False) -> None:
        """Add a forward and a backward that overlap, if not `apart`."""
        if not apart:
            self.joined.append(len(self.steps))
        self.forward(forward)
        self.backward(backward)

    def forward(self, chunk: int) -> None:
        self.steps.append(("forward", chunk))

    def backward(self, chunk: int) -> None:
        self.steps.append(("backward", chunk))

    def inputs(self, chunk: int) -> None:
        self.steps.append(("backward of inputs", chunk))
        self.waiting.append(chunk)

    def weights(self) -> None:
        if self.waiting:
            self.steps.append(("backward of weights", self.waiting.popleft()))

    def all_weights(self) -> None:
        while self.waiting:
            self.weights()
