"""The order in which a pipeline rank runs forwards and backwards, and the micro-batches in flight meanwhile.

1F1B and interleaved 1F1B follow megatron/core/pipeline_parallel/schedules.py. GPipe is all forwards, then all
backwards. Zero-bubble has an order and a bubble here, but no states: Megatron-Core has no such schedule. torch's orders
are in memcalc/pipelining/orders.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from typing import Final, Literal, NamedTuple

from memcalc.megatron.between_stages import Action, Kind, between

Part = Literal["forward", "backward of inputs", "backward of weights"]


class State(NamedTuple):
    """One forward or backward of a model chunk, and what the rank keeps of other micro-batches meanwhile."""

    kind: Kind
    chunk: int
    in_flight: tuple[int, ...]
    """The micro-batches of each chunk whose forward is done and whose backward is not, without the running one."""
    between: int = 0
    """The number of hidden states and gradients of them that no forward has saved (between_stages.py)."""


def states(
    schedule: str, rank: int, ranks: int, micro_batches: int, chunks: int = 1, group: int | None = None
) -> list[State]:
    """Return the distinct states of one pipeline rank in a step."""
    if schedule != "gpipe":  # the states repeat after this many micro-batches
        micro_batches = _few(micro_batches, _ENOUGH, group or ranks)
    return list(_states(schedule, rank, ranks, micro_batches, chunks, group))


def _few(micro_batches: int, groups: int, size: int) -> int:
    """Return that many groups of micro-batches and as large a last group as there is, or all if these are fewer."""
    return min(micro_batches, groups * size + micro_batches % size)


@lru_cache(maxsize=8192)
def _states(
    schedule: str, rank: int, ranks: int, micro_batches: int, chunks: int, group: int | None
) -> tuple[State, ...]:
    live: Counter[int] = Counter()
    found: dict[State, None] = {}
    order = list(actions(schedule, rank, ranks, micro_batches, chunks, group))
    warmup = warmup_of(schedule, rank, ranks, micro_batches, chunks, group)
    for (kind, chunk), kept in zip(order, between(order, warmup, rank, ranks, chunks, group), strict=True):
        if kind == "backward":
            live[chunk] -= 1
        found.setdefault(State(kind, chunk, tuple(live[c] for c in range(chunks)), kept))
        if kind == "forward":
            live[chunk] += 1
    return tuple(found)


_ENOUGH: Final = 4
"""The micro-batches per rank after which the states of a schedule repeat. tests/megatron/test_between_stages.py looks
further."""
MOST_AT_ONCE: Final = 64
"""The most micro-batches of gpipe that are played. All are in flight, and the time grows faster than their number."""


def warmup_of(schedule: str, rank: int, ranks: int, micro_batches: int, chunks: int, group: int | None = None) -> int:
    """Return the number of forwards before the first backward."""
    if schedule == "gpipe":
        return micro_batches
    if chunks == 1:
        return min(ranks - rank - 1, micro_batches)
    return min((ranks - rank - 1) * 2 + (chunks - 1) * (group or ranks), micro_batches * chunks)


def actions(
    schedule: str, rank: int, ranks: int, micro_batches: int, chunks: int = 1, group: int | None = None
) -> Iterator[Action]:
    """Yield a rank's forwards and backwards of model chunks, in their order.

    Groups of `group` micro-batches, by default of `ranks`, go through one chunk after the other (get_schedule_table). What
    is left over is a smaller group.
    """
    warmup, total = warmup_of(schedule, rank, ranks, micro_batches, chunks, group), micro_batches * chunks
    size = group or ranks
    whole, rest = micro_batches // size * size * chunks, micro_batches % size

    def chunk_of(i: int) -> int:
        return i % (size * chunks) // size if i < whole or not rest else (i - whole) // rest

    for i in range(warmup):
        yield "forward", chunk_of(i)
    for i in range(total - warmup):
        yield "forward", chunk_of(warmup + i)
        yield "backward", chunks - 1 - chunk_of(i)
    for i in range(total - warmup, total):
        yield "backward", chunks - 1 - chunk_of(i)


class Turn(NamedTuple):
    """A forward or backward of a model chunk, and the number of tensors between stages meanwhile, as in State."""

    kind: Kind
    chunk: int
    between: int = 0


def turns(
    schedule: str, rank: int, ranks: int, micro_batches: int, chunks: int = 1, group: int | None = None
) -> tuple[Turn, ...]:
    """Return the turns of a rank's step."""
    order = list(actions(schedule, rank, ranks, micro_batches, chunks, group))
    warmup = warmup_of(schedule, rank, ranks, micro_batches, chunks, group)
    kept = between(order, warmup, rank, ranks, chunks, group)
    return tuple(Turn(kind, chunk, count) for (kind, chunk), count in zip(order, kept, strict=True))


@lru_cache(maxsize=8192)
def turns_to_play(
    schedule: str, rank: int, ranks: int, micro_batches: int, chunks: int = 1, group: int | None = None
) -> tuple[Turn, ...]:
    """Return the turns of a step with so many micro-batches that more would not raise the number in flight. Return ()
    if these are too many to be played."""
    if schedule == "gpipe" and micro_batches > MOST_AT_ONCE:
        return ()
    if schedule == "gpipe":
        few = micro_batches
    elif chunks == 1:
        few = min(micro_batches, ranks - rank + 2)
    else:
        few = _few(micro_batches, chunks + 3, group or ranks)
    return turns(schedule, rank, ranks, few, chunks, group)


def zero_bubble_order(rank: int, ranks: int, micro_batches: int) -> Iterator[Part]:
    """Yield the order of ZB-H1 of Qi et al. 2023 (arXiv 2401.10241, section 2.3): 1F1B whose backwards are cut in two.

    A later stage waits only for the gradient of a stage's input, so the half for the inputs keeps 1F1B's place. The
    half for the weights comes `rank` micro-batches later and fills idle time. The order is that of torch's
    ScheduleInterleavedZeroBubble with one stage per rank (torch/distributed/pipelining/schedules.py).
    """
    warmup = min(ranks - rank - 1, micro_batches)
    for _ in range(warmup):
        yield "forward"
    for i in range(micro_batches):
        if i < micro_batches - warmup:
            yield "forward"
        yield "backward of inputs"
        if i >= rank:
            yield "backward of weights"
    for _ in range(min(rank, micro_batches)):
        yield "backward of weights"


def zero_bubble_in_flight(rank: int, ranks: int, micro_batches: int) -> tuple[int, int]:
    """Return the most micro-batches whose forward is done and whose backward of the inputs is not, and the same number
    for the backward of the weights."""
    done: Counter[Part] = Counter()
    inputs = weights = 0
    for part in zero_bubble_order(rank, ranks, micro_batches):
        done[part] += 1
        inputs = max(inputs, done["forward"] - done["backward of inputs"])
        weights = max(weights, done["forward"] - done["backward of weights"])
    return inputs, weights


def bubble(schedule: str, ranks: int, micro_batches: int, chunks: int = 1) -> float:
    """Return the idle time over the ideal time of a step: (p-1)/m, or (p-1)/(v·m) (Narayanan et al. 2021, arXiv
    2104.04473).

    Zero-bubble's ZB-H1 waits for (p-1)(F + B - W) of m(F + B + W). That is (p-1)/(3m) if a forward takes as long as
    each half of a backward (Qi et al. 2023). With fewer micro-batches than ranks it also waits for (p-m)W.
    """
    if schedule == "zero-bubble":
        return (ranks - 1 + max(0, ranks - micro_batches)) / (3 * micro_batches)
    return (ranks - 1) / (micro_batches * (chunks if schedule == "interleaved" else 1))


class Span(NamedTuple):
    """The layers of one chunk of the model."""

    start: int
    layers: int
    first: bool
    """True if the chunk has the embedding."""
    last: bool
    """True if the chunk has the head."""


_COUNTED = ((0, 0), (1, 1), (0, 1), (1, 0))


def layers_of_chunks(
    layers: int, chunks: int, first: int | None = None, last: int | None = None, written: str | None = None
) -> list[int]:
    """Return the number of layers of each chunk in the model's order. Raises ValueError if no split is known.

    Each chunk gets an equal number. If the layers do not divide, the embedding and the head count as a layer each, or
    one of them does (`--account-for-embedding-in-pipeline-split`, `--account-for-loss-in-pipeline-split`), and may be a
    chunk of their own (get_num_layers_to_build). Given numbers of the first and the last chunk
    (`--decoder-first-pipeline-num-layers`, `--decoder-last-pipeline-num-layers`) leave equal numbers for the others.
    `written` has the number of each chunk, with commas (`--pipeline-model-parallel-layout`).
    """
    if written is not None:
        return [int(count) for count in written.split(",")]
    if first is not None or last is not None:
        ends = [count for count in (first, last) if count is not None]
        others = chunks - len(ends)
        each, rest = divmod(layers - sum(ends), others) if others else (0, layers - sum(ends))
        if rest or (others and each < 1):
            raise ValueError(f"{layers} layers less {sum(ends)} do not divide by {others}")
        middle = [each] * others
        return [*([first] if first is not None else []), *middle, *([last] if last is not None else [])]
    for embedding, head in _COUNTED:
        each, rest = divmod(layers + embedding + head, chunks)
        if not rest and each:
            counts = [each] * chunks
            counts[0] -= embedding
            counts[-1] -= head
            return counts
    raise ValueError(f"{layers} layers, with the embedding and the head or without, do not divide by {chunks}")


def ends_of(counts: list[int], *, whole: bool) -> tuple[int | None, int | None] | None:
    """Return the layers of the first and the last chunk with which `layers_of_chunks` makes these chunks; None if none do.
    `whole`: they cannot be given."""
    given = ((counts[0], None), (None, counts[-1]), (counts[0], counts[-1]))
    for first, last in ((None, None), *(given if not whole else ())):
        try:
            if 0 not in (first, last) and layers_of_chunks(sum(counts), len(counts), first, last) == counts:
                return first, last
        except ValueError:
            continue
    return None


def spans_of(
    layers: int,
    ranks: int,
    chunks: int = 1,
    first: int | None = None,
    last: int | None = None,
    written: str | None = None,
) -> list[list[Span]]:
    """Return the chunks of each rank: chunk i of rank r is the model's chunk i·ranks + r."""
    counts = layers_of_chunks(layers, ranks * chunks, first, last, written)
    spans = [Span(sum(counts[:i]), count, i == 0, i == ranks * chunks - 1) for i, count in enumerate(counts)]
    return [spans[rank::ranks] for rank in range(ranks)]
