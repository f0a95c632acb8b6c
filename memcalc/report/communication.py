"""The table of communication: every collective of a step, and the time that the step waits for communication."""

from __future__ import annotations

from itertools import zip_longest
from typing import TYPE_CHECKING, Final

from rich.console import RenderableType
from rich.text import Text

from memcalc.estimation.report import PHASES
from memcalc.report.memory_table import titled
from memcalc.units import show_bytes, show_seconds

if TYPE_CHECKING:
    from memcalc.estimation.report import Report

_WIDE: Final = 90  # columns that the table needs with times; in fewer, a collective takes two lines


def communication_table(report: Report, width: int) -> list[RenderableType]:
    """Return the table of every collective, and a line that names the columns left out for the width."""
    table, timed = titled("Communication per step and GPU"), report.gpu is not None
    from memcalc.report.collectives import Numbers

    numbers, left_out = Numbers(("ranks", "calls", "payload", "wire", *(["time"] if timed else []))), ""
    if width < _WIDE:
        numbers, left_out = numbers.that_fit(width)
    from memcalc.report.collectives import add_words

    words_of = add_words(table, ("phase", "collective", "what"), on_one_line=width >= _WIDE)
    for name in numbers.names:
        table.add_column(name, justify="right", no_wrap=True)

    def add(words: tuple[str, str, str], counts: tuple[str, str], sizes: tuple[int, int], time: str) -> None:
        cells = [*counts, *(show_bytes(size) for size in sizes), time]
        table.add_row(*words_of(words), *cells[: len(numbers.names)], style="" if words[1] else "bold")

    from memcalc.hardware.cost import Unknown, step_time

    both = zip_longest(report.collectives, report.costs)
    for c, cost in sorted(both, key=lambda pair: PHASES.index(pair[0].phase)):
        time = "?" if cost is None or isinstance(cost, Unknown) else show_seconds(cost.seconds)
        time = time if c.overlap == "exposed" else f"({time})"
        add((c.phase, c.collective, c.name), (str(c.group_size), str(c.calls)), (c.payload, c.wire), time)
    total = step_time(report.collectives, report.costs) if timed else None
    sizes = sum(c.payload for c in report.collectives), sum(c.wire for c in report.collectives)
    add(("all", "", ""), ("", ""), sizes, show_seconds(total.total) if total else "")
    return [table, *([Text(left_out)] if left_out else [])]


def communication_lines(report: Report) -> list[Text]:
    return [layer_line(report), *time_lines(report), *textbook_lines(report)]


def layer_line(report: Report) -> Text:
    payload, wire = report.per_layer()
    return Text(f"per layer: payload {show_bytes(payload)}, wire {show_bytes(wire)}")


def textbook_lines(report: Report) -> list[Text]:
    """Return what papers count; [] if the engine sends just that."""
    if not report.textbook:
        return []
    wire = sum(c.wire for c in report.textbook)
    kinds = " + ".join(f"{c.collective} {show_bytes(c.payload)}" for c in report.textbook)
    return [Text(f"textbook: {kinds}; wire {show_bytes(wire)} (the table has what the engine sends)")]


def time_lines(report: Report, *, bracketed: bool = True) -> list[Text]:
    """Return the time of the communication that nothing can hide, and of that which compute can hide; [] without a GPU.

    `bracketed`: True if the table has times in brackets for collectives that can hide behind compute.
    """
    if report.gpu is None:
        return []
    from memcalc.hardware.cost import Unknown, step_time

    unknown = [cost.missing for cost in report.costs if isinstance(cost, Unknown)]
    if unknown:
        return [Text(f"time: not known, because {unknown[0]}")]
    time = step_time(report.collectives, report.costs)
    assert time is not None
    hides = [("forward", time.forward), ("backward", time.backward)]
    behind = " and ".join(f"{show_seconds(seconds)} with {phase}" for phase, seconds in hides if seconds)
    if not behind:
        return [Text(f"time: the step waits {show_seconds(time.exposed)}")]
    if not time.exposed:
        return [Text(f"time: all of it can overlap, {behind}")]
    hidden = f"{'what is in brackets' if bracketed else 'the rest'} can overlap, {behind}"
    return [Text(f"time: the step waits at least {show_seconds(time.exposed)}; {hidden}")]
