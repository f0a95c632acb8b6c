"""The peaks of a rank: the largest sum of what it holds, what a moment of the run has alive, and what other micro-batches wait
with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcalc.core.dims import evaluate
from memcalc.estimation.rank_peaks import NOWHERE, At, RankPeaks, buffers_after_backward

if TYPE_CHECKING:
    from collections.abc import Iterable

    from memcalc.core.rows import Row
    from memcalc.engines.rank import Rank
    from memcalc.megatron.schedules import State


def peaks_on(rank: Rank, batch: int, seq: int) -> RankPeaks:
    """Return a rank with the peak of each phase in bytes, where each is, and the rows of backward's peak if it is after the last
    moment."""
    sums, held = rank.sums, rank.holdings
    always = evaluate(sums.always, batch, seq)
    left = sum(row.bytes_at(batch, seq) for row in buffers_after_backward(rank))
    flush = evaluate(sums.flush, batch, seq)
    most = {"forward": 0, "backward": 0}
    at = {"forward": NOWHERE, "backward": NOWHERE, "step": NOWHERE}
    gradients_count, flushed = held.keeps_gradients, held.flush
    for state, waiting in _worst_states(rank, batch, seq):
        kind, profile = state.kind, rank.profiles[state.chunk]
        is_backward, highest = kind == "backward", most[kind]
        for moment in profile.backward if is_backward else profile.forward:
            (c0, c1, c2, b0, b1, b2), gradients, _ = moment  # as `evaluate`, for the many moments of many estimates
            size = c0 + seq * (c1 + seq * c2) + batch * (b0 + seq * (b1 + seq * b2)) + waiting
            flushes = False
            if gradients_count:
                size += gradients  # an earlier micro-batch's, in forward
            if is_backward and flushed is not None and gradients >= flushed.after:
                flushes = True
                size += flush
            if size > highest:
                highest, at[kind] = size, At(state, moment, flushes)
        most[kind] = highest
    forward = always + evaluate(sums.forward, batch, seq) + most["forward"]
    backward = always + evaluate(sums.backward, batch, seq) + most["backward"]
    last: tuple[Row, ...] = ()
    for i, rows in enumerate(sums.after_backward):
        after = always + left + evaluate(rows, batch, seq)
        if after > backward:
            backward, at["backward"] = after, NOWHERE
            last = held.after_backward[i]
    step = always + left + evaluate(sums.step, batch, seq)
    return RankPeaks(rank, {"forward": forward, "backward": backward, "step": step}, at, last)


def _worst_states(rank: Rank, batch: int, seq: int) -> Iterable[tuple[State, int]]:
    """Return for each kind (forward, backward) and chunk the state with the most bytes in flight, and these bytes."""
    worst: dict[tuple[str, int], tuple[State, int]] = {}
    saved = [evaluate(profile.saved.poly, batch, seq) for profile in rank.profiles]
    between = rank.between.bytes_at(batch, seq) if rank.between else 0
    for state in rank.states:
        own, waiting = (state.kind, state.chunk), _in_flight(state, saved, between)
        if own not in worst or waiting > worst[own][1]:
            worst[own] = state, waiting
    return worst.values()


def _in_flight(state: State, saved: Iterable[int], between: int) -> int:
    """Return the bytes in flight in a state: what other micro-batches have saved in each chunk, and the tensors between stages.
    `saved` and `between` are the bytes of one of each."""
    return sum(count * each for count, each in zip(state.in_flight, saved, strict=True)) + between * state.between
