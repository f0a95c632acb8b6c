"""Forwards and backwards that are found in a run of several micro-batches."""

from __future__ import annotations

from memcalc.pictures.spans import spans_of
from memcalc.pictures.timeline import Span


def parts(*passes: tuple[str, list[int | None]]) -> list[Span]:
    """Parts of a moment each."""
    flat = [(phase, layer) for phase, layers in passes for layer in layers]
    return [Span(phase, 0, 0, layer, i, i + 1) for i, (phase, layer) in enumerate(flat)]


UP, DOWN = [None, 0, 1, 2, None], [None, 2, 1, 0, None]


def found(spans: list[Span]) -> list[tuple[str, int | None]]:
    return [(span.phase, span.micro_batch) for span in spans]


def test_one_after_the_other() -> None:
    spans = spans_of(parts(("forward", UP), ("backward", DOWN), ("", [None]), ("forward", UP), ("backward", DOWN)), 2)
    assert found(spans) == [("forward", 0), ("backward", 0), ("forward", 1), ("backward", 1)]
    assert spans[2].first == 10  # the batch belongs to its forward
    assert spans[-1].last == 21


def test_forwards_in_a_row_are_one_span() -> None:
    spans = spans_of(
        parts(("forward", [*UP, *UP]), ("backward", DOWN), ("forward", UP), ("backward", [*DOWN, *DOWN])), 3
    )
    assert found(spans) == [("forward", None), ("backward", 0), ("forward", 2), ("backward", None)]


def test_what_does_not_add_up_has_no_micro_batch() -> None:
    """Chunks of several layers: the second chunk goes on upwards."""
    spans = spans_of(parts(("forward", UP), ("backward", DOWN)), 4)
    assert found(spans) == [("forward", None), ("backward", None)]
