# pyright: basic
"""The storages that forwards leave for backward: saved activations."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memcalc.validate.gathered import Gathered
    from memcalc.validate.live import Live


class Left:
    """The storages of a step that its forwards have made, that are alive when one of them ends, and that are freed when
    backward is over.

    A storage that stays belongs to something else: the loss, which the caller has, or a state that a layer keeps. The
    gradient of a weight stays too, but one that a fused loss has made in forward is kept for backward. A storage of an
    earlier step was not made by these forwards, so its free during one of them changes nothing. Gathered weights are
    left out.
    """

    def __init__(self, live: Live, weights: Gathered, *, in_flight: bool) -> None:
        """Begin with an empty record. `in_flight`: a forward may end before the last one's backward, as in a
        pipeline."""
        self._live, self._weights, self._in_flight = live, weights, in_flight
        self._phase = ""
        self._ends: list[dict[int, int]] = []
        """The storages at the end of each forward: a storage's number -> its bytes."""
        live.made.clear()

    def enter(self, phase: str) -> None:
        """Begin a phase, and end the one before it."""
        if self._phase == "forward":
            whole = self._weights.storages()
            end = {made.number: made.nbytes for key, made in self._live.made.items() if key not in whole}
            self._ends = [*self._ends, end] if self._in_flight else [end]
        if phase == "step":
            gradients = {p.grad.untyped_storage()._cdata for p in self._weights.job.parameters() if p.grad is not None}
            stays = {made.number for key, made in self._live.made.items() if key not in gradients}
            self._ends = [{i: nbytes for i, nbytes in end.items() if i not in stays} for end in self._ends]
        self._phase = phase
        self._live.in_forward = phase == "forward"

    def most(self) -> int:
        """Return the bytes of the forward that leaves most."""
        return max(sum(end.values()) for end in self._ends)
