# pyright: basic
"""What forwards leave for backward: saved activations, by the storages that they made."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memcalc.validate.gathered import Gathered
    from memcalc.validate.live import Live


class Left:
    """Of a step: what its forwards have made, is there when one of them ends, and is gone when backward is over.

    What stays is there for something else: the loss, which the caller has, or a state that a layer keeps. What an earlier
    step has left was not made by these forwards: that it goes while one of them runs takes nothing from what they leave.
    Weights that were gathered are none of it.
    """

    def __init__(self, live: Live, weights: Gathered, *, in_flight: bool) -> None:
        """`in_flight`: whether a forward may end before the last one's backward, as in a pipeline."""
        self._live, self._weights, self._in_flight = live, weights, in_flight
        self._phase = ""
        self._ends: list[dict[int, int]] = []
        """What is there at the end of each forward: a storage's number -> its bytes."""
        live.made.clear()

    def enter(self, phase: str) -> None:
        """A phase begins, and the one before it is over."""
        if self._phase == "forward":
            whole = self._weights.storages()
            end = {made.number: made.nbytes for key, made in self._live.made.items() if key not in whole}
            self._ends = [*self._ends, end] if self._in_flight else [end]
        if phase == "step":
            stays = {made.number for made in self._live.made.values()}
            self._ends = [{i: nbytes for i, nbytes in end.items() if i not in stays} for end in self._ends]
        self._phase = phase
        self._live.in_forward = phase == "forward"

    def most(self) -> int:
        """Bytes: of the forwards the one with most."""
        return max(sum(end.values()) for end in self._ends)
