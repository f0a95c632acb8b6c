"""A step by stretches of a shallow run against every block of a run at the real depth."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

import memcalc
from memcalc.core.dims import Dim
from memcalc.core.noted import Begins, Holds, LetsGo, Ready
from memcalc.engines.ranks import ranks
from memcalc.tape import played as over_runs
from memcalc.tape.played import Played
from memcalc.tape.profile import Profile
from memcalc.tape.stretches import Tape
from memcalc.tape.unrolled import NotPeriodic

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from memcalc.tape.runs import Trace

SMALL = {"reduce_bucket_size": 10**7, "max_live_parameters": 10**8, "prefetch_bucket_size": 10**7}


def played(name: str, **options: object) -> list[Played]:
    """The profiles of the ranks that a setup looks at."""
    model = memcalc.load_model(name)
    report = memcalc.estimate(model, engine="deepspeed", seq_len=100, **options)
    made = [profile for rank in ranks(model, report.setup) for profile in rank.profiles]
    return [profile for profile in made if isinstance(profile, Played)]


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("zero", [2, 3])
@pytest.mark.parametrize(
    "name", ["llama-7b", "gemma-2-2b", "mixtral-8x7b", "bert-large", "recurrentgemma-2b", "mamba-370m"]
)
def test_moments_are_those_of_all_blocks(name: str, zero: int, recompute: str) -> None:
    buckets = SMALL if zero == 3 else {"reduce_bucket_size": 10**7}
    found = [p for gpus in (3, 8) for p in played(name, zero=zero, gpus=gpus, recompute=recompute, **buckets)]
    assert found
    for profile in found:
        whole = Profile(profile.run)
        assert [(m.poly, m.gradients) for m in profile.moments] == [(m.poly, m.gradients) for m in whole.moments]


def test_a_periodic_stack_is_not_run_at_its_depth(monkeypatch: pytest.MonkeyPatch) -> None:
    depths: list[int] = []
    tape_of = over_runs.tape_of

    def counted(run: Trace, weights: object) -> Tape:
        depths.append(1 + max(row.layer for row in run.rows if row.layer is not None))
        return tape_of(run, weights)  # type: ignore[arg-type]

    monkeypatch.setattr(over_runs, "tape_of", counted)
    assert played("llama-7b", zero=3, gpus=8)
    assert depths == [4]


def test_a_stack_off_the_line_is_run_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the middle periods do not do the same, nothing is guessed."""
    expected = [profile.moments for profile in played("llama-7b", zero=3, gpus=8)]
    tape_of = over_runs.tape_of

    def broken(run: Trace, weights: object) -> Tape:
        if run.middle.more:
            block = next(
                i for i, row in enumerate(run.rows) if row.layer in run.middle.late and row.component == "activation"
            )
            rows = [
                row._replace(shape=(*row.shape, Dim("twice", 2))) if i == block else row
                for i, row in enumerate(run.rows)
            ]
            with pytest.raises(NotPeriodic):
                tape_of(run._replace(rows=rows), weights)  # type: ignore[arg-type]
            raise NotPeriodic("as it should be")
        return tape_of(run, weights)  # type: ignore[arg-type]

    monkeypatch.setattr(over_runs, "tape_of", broken)
    assert [profile.moments for profile in played("llama-7b", zero=3, gpus=8)] == expected


def bare(run: Trace) -> Trace:
    """A run without its weights and buffers, which come first and are the engine's rows: of those of few layers, too few."""
    held = {i for i, row in enumerate(run.rows) if row.component in ("parameters", "buffers")}
    first = [place for place, event in enumerate(run.log) if event in held and place < run.segments[0][0]]
    gone = {run.log[place] for place in first}
    numbers = {old: new for new, old in enumerate(i for i in range(len(run.rows)) if i not in gone)}
    places = [0]
    for place in range(len(run.log)):
        places.append(places[-1] + (place not in first))
    log = [numbers[event] if event >= 0 else ~numbers[~event] for event in run.log if event not in gone]
    assert run.noted is not None
    events = []
    for event in run.noted.events:
        moved = event._replace(place=places[event.place])
        if isinstance(moved, Ready):
            moved = moved._replace(after=places[moved.after], block=numbers[moved.block])
        events.append(moved)
    return run._replace(
        log=log,
        rows=[row for i, row in enumerate(run.rows) if i not in gone],
        segments=[(places[place], phase, layer) for place, phase, layer in run.segments],
        forward_end=places[run.forward_end],
        renamed=frozenset(places[place] for place in run.renamed),
        noted=run.noted._replace(events=tuple(numbered(events))),
    )


def numbered(events: Iterable[Any]) -> Iterator[Any]:
    """References and checkpoints with numbers in the order in which they come."""
    numbers: dict[object, int] = {}
    for event in events:
        if isinstance(event, Holds | LetsGo):
            yield event._replace(number=numbers.setdefault(event.number, len(numbers)))
        elif isinstance(event, Begins) and event.within is not None:
            number = numbers.setdefault(("checkpoint", event.within.number), len(numbers))
            yield event._replace(within=event.within._replace(number=number))
        else:
            yield event


def told(row: Any) -> tuple[Any, ...]:
    """All of a row or a product, with its dims by name and size."""
    return tuple(
        tuple((dim.name, dim.size) for dim in field)
        if isinstance(field, tuple) and field and isinstance(field[0], Dim)
        else field
        for field in row
    )


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["none", "full", "op"])
@pytest.mark.parametrize("zero", [2, 3])
@pytest.mark.parametrize(
    "name", ["llama-7b", "gemma-2-2b", "mixtral-8x7b", "bert-large", "mamba-370m", "deepseek-v3", "gpt2"]
)
def test_a_run_that_is_written_out_is_one_at_the_real_depth(name: str, zero: int, recompute: str) -> None:
    """Block by block, event by event and product by product."""
    try:
        found = played(name, zero=zero, gpus=8, recompute=recompute)
    except memcalc.InputError:
        pytest.skip("refused")
    recorded = found[0]._recorded
    assert recorded._shallow.middle.more
    written, whole = bare(recorded.run), bare(recorded._whole)
    for field in ("log", "segments", "forward_end", "renamed", "sent", "middle", "noted"):
        assert getattr(written, field) == getattr(whole, field), field
    assert list(map(told, written.rows)) == list(map(told, whole.rows))
    assert Counter(map(told, written.work)) == Counter(map(told, whole.work))
