"""A step by stretches of a shallow run against every block of a run at the real depth."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import memcalc
from memcalc import played as over_runs
from memcalc.dims import Dim
from memcalc.played import Played
from memcalc.profile import Profile
from memcalc.ranks import ranks
from memcalc.tape import Tape
from memcalc.unrolled import NotPeriodic

if TYPE_CHECKING:
    from memcalc.runs import Trace

SMALL = {"reduce_bucket_size": 10**7, "max_live_parameters": 10**8, "prefetch_bucket_size": 10**7}


def played(name: str, **options: object) -> list[Played]:
    """The profiles of the ranks that a setup looks at."""
    model = memcalc.load_model(name)
    report = memcalc.estimate(model, engine="deepspeed", seq_len=100, **options)
    made = [profile for rank in ranks(model, report.setup) for profile in rank.profiles]
    return [profile for profile in made if isinstance(profile, Played)]


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
    assert depths == [6]


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
