"""An engine's blocks between the events of a recorded run."""

from __future__ import annotations

from memcalc.core.dims import Dim
from memcalc.core.dtypes import fp32
from memcalc.core.tensor import Sent, StorageRow
from memcalc.tape.rewritten import Rewriting
from memcalc.tape.runs import NO_MIDDLE, Trace


def row(name: str) -> StorageRow:
    return StorageRow((Dim("n", 1),), fp32, "activation", "", name, None)


def recorded() -> Trace:
    """Two blocks; the first goes on as a third; all are freed."""
    rows = [row("a"), row("b"), row("a, renamed")]
    segments = [(0, "forward", None), (2, "backward", None), (6, "", None)]
    return Trace([0, 1, ~0, 2, ~1, ~2], rows, segments, 2, NO_MIDDLE, renamed=frozenset({2}))


def test_nothing_between_leaves_the_run_as_it_is() -> None:
    run = recorded()
    assert Rewriting(run).finished() == run


def test_a_block_between_moves_what_follows() -> None:
    out = Rewriting(recorded())
    out.reach(2)
    bucket = out.block("bucket", "n", 1, fp32)
    out.reach(4)
    del bucket
    run = out.finished()
    assert run.log == [0, 1, 2, ~0, 3, ~2, ~1, ~3]
    assert [one.name for one in run.rows] == ["a", "b", "bucket", "a, renamed"]
    assert run.segments == [(0, "forward", None), (2, "backward", None), (8, "", None)]
    assert (run.forward_end, run.renamed) == (2, {3})


def test_what_the_engine_keeps_goes_when_it_lets_go() -> None:
    out = Rewriting(recorded())
    out.reach(4)
    kept = out.block_of_run(2)
    out.reach(6)
    del kept
    assert out.finished().log == [0, 1, ~0, 2, ~1, ~2]
    assert Rewriting(recorded()).finished().log == [0, 1, ~0, 2, ~1, ~2]


def test_what_something_else_still_has_stays() -> None:
    out = Rewriting(recorded())
    out.reach(4)
    kept = out.block_of_run(2)
    del kept
    between = out.block("between", "n", 1, fp32)
    assert out.finished().log == [0, 1, ~0, 2, between.number, ~1, ~2]


def test_what_the_engine_sends_comes_between_what_the_run_sends() -> None:
    first, second, own = (Sent("cp", "all_to_all", name, "forward", None, (), fp32) for name in "abc")
    out = Rewriting(recorded()._replace(sent=(first, second)))
    out.send(own, after=1)
    assert out.finished().sent == (first, own, second)
