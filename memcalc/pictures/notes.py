"""Notes of a timeline: what it leaves out, and where it differs from the report's table."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from memcalc.core.rows import COMPONENTS
from memcalc.units import show_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memcalc.device.replay import Replay
    from memcalc.estimation.report import Report
    from memcalc.pictures.timeline import Timeline


def notes_of(timeline: Timeline, report: Report, played: Replay) -> Iterator[str]:
    """Yield the notes of a report's timeline, a sentence each. `played` is the whole run that it is the last step of."""
    yield from _left_out(timeline, report)
    if played.allocated > timeline.peak:
        more = show_bytes(played.allocated - timeline.peak)
        yield f"an earlier step allocates {more} more than the step shown; the table has the most of all steps"
    yield from _other_components(timeline, report)


def _left_out(timeline: Timeline, report: Report) -> Iterator[str]:
    """Yield the note of micro-batches that are not shown."""
    whole = report.setup.micro_batches
    shown = micro_batches_of(timeline, report)
    if shown < whole:
        yield f"{shown} of {whole} micro-batches are shown; the others repeat what these do"


def micro_batches_of(timeline: Timeline, report: Report) -> int:
    """Return the number of micro-batches that a timeline shows."""
    if report.rank.on_paper > 1:
        return report.rank.on_paper
    return len({span.micro_batch for span in timeline.spans if span.micro_batch is not None})


def _other_components(timeline: Timeline, report: Report) -> Iterator[str]:
    """Yield the note of components that have other bytes at the peak than in the report's table."""
    table: Counter[str] = Counter()
    for item in report.items:
        table[item.component] += item.at_peak
    live, moment = timeline.live(), timeline.peak_event
    differs = {name: live[name][moment] - table[name] for name in COMPONENTS if live[name][moment] != table[name]}
    if differs and not sum(differs.values()):
        words = ", ".join(
            f"{show_bytes(abs(nbytes))} {'more' if nbytes > 0 else 'less'} {name.replace('_', ' ')}"
            for name, nbytes in differs.items()
        )
        yield f"a block counts whole, as what it becomes: at the peak {words} than in the table"
