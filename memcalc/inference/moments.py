"""The highest moment of a run on paper that trains nothing: the blocks of a rollout's phase that are alive then."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final, NamedTuple

from memcalc.core.dims import numel
from memcalc.core.rows import Row
from memcalc.inference.heights import KV, STATE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memcalc.core.tensor import Memory, StorageRow
    from memcalc.setup.setup import Setup

SOURCE: Final = "TRL 1.16 trl/trainer/grpo_trainer.py; transformers 5.23 generation/utils.py, _sample"
LIFE: Final = "rollout"


class Sizes(NamedTuple):
    """The numbers of a rollout on one rank."""

    together: int
    """The completions that are generated together."""
    prompt: int
    completion: int


def sizes_of(setup: Setup) -> Sizes:
    assert setup.seq_len is not None and setup.completion_len is not None
    together = setup.micro_batch_size * (setup.steps_per_generation or 1)
    return Sizes(together, setup.seq_len - setup.completion_len, setup.completion_len)


class Played(NamedTuple):
    """A run, and the place in its log from which on blocks count."""

    memory: Memory
    log: list[int]
    start: int


def highest(run: Played) -> tuple[Row, ...]:
    """Return the rows of the moment of a run with most bytes, of the blocks that count."""
    rows = run.memory.rows
    sizes = [numel(row.shape)[0] * row.dtype.itemsize for row in rows]
    live = most = 0
    place = run.start
    for i in range(run.start, len(run.log)):
        event = run.log[i]
        live += sizes[event] if event >= 0 else -sizes[~event]
        if live > most:
            most, place = live, i + 1
    alive: dict[int, None] = {}
    for event in run.log[run.start : place]:
        if event >= 0:
            alive[event] = None
        else:
            alive.pop(~event, None)
    return tuple(_counted(rows[i] for i in alive))


def _counted(rows: Iterator[StorageRow]) -> Iterator[Row]:
    """Yield equal blocks once, with their number."""
    counts = Counter((_name(row), row.shape, row.dtype) for row in rows)
    for (name, shape, dtype), copies in counts.items():
        yield Row("temporaries", name, shape, dtype, copies, LIFE, "exact", SOURCE)


def _name(row: StorageRow) -> str:
    """Return the name of a block; that of a cache says so."""
    kind = {KV: "KV cache: ", STATE: "state cache: "}.get(row.component, "")
    return kind + row.label
