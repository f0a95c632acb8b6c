"""The answer of `memcalc fit` in a terminal."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import IO, TYPE_CHECKING, Final

from rich.console import Group, RenderableType
from rich.text import Text

from memcalc.report.advice_lines import advice_lines
from memcalc.report.consoles import console_for
from memcalc.report.folding import Folded
from memcalc.report.memory_table import memory_table
from memcalc.report.title import title
from memcalc.report.verdict import EXPANDABLE, headline, why
from memcalc.units import show_bytes

if TYPE_CHECKING:
    from memcalc.decisions.fit import Fit, Next

_WIDTH: Final = 100
_SHOWN: Final = 8


def print_fit(found: Fit, file: IO[str], waiting: Callable[[str], AbstractContextManager[None]] = nullcontext) -> None:
    """Print the value, its memory, and what stops the next one; if nothing fits, also what would help.

    `waiting` returns the context for slow work, given words for that work.
    """
    console = console_for(file, _WIDTH)
    report = found.report
    parts: list[RenderableType] = [Folded(title(report)), Folded(Text(_answer(found), "bold"))]
    parts += [Folded(line) for line in (*why(report), *_next(found), *_others(found))]
    parts += ["", *memory_table(report, console.width, verbose=False)]
    console.print(Group(*parts))
    if found.value is None:
        file.flush()
        with waiting("looking for what helps most"):
            lines = advice_lines(report)
        console.print(Group(*lines))


def _answer(found: Fit) -> str:
    report = found.report
    assert report.verdict is not None and report.gpu is not None
    name, best = found.solve, "smallest" if found.smallest else "largest"
    if found.value is None:
        assert found.next is not None
        return (
            f"no {name} that was tried fits; closest is {found.next.value:,}, which {headline(report, report.verdict)}"
        )
    return f"{name} {found.value:,} is the {best} that {'leaves room: ' if report.states_only else ''}" + headline(
        report, report.verdict
    )


def _next(found: Fit) -> list[str]:
    """Return a sentence on what stops the next value, or on what else is the limit."""
    if found.next is None:
        return [f"memory is not the limit: {found.limit}"]
    if found.value is None:
        row = found.next.row
        return [f"its largest row is {row.item.name} ({row.item.component}), {show_bytes(row.nbytes)}"]
    row = found.next.row
    return [
        f"{found.solve} {found.next.value:,} {_misses(found.next)}: {row.item.name} ({row.item.component}) grows most, "
        f"by {show_bytes(row.grows_by)} to {show_bytes(row.nbytes)}"
    ]


def _misses(one: Next) -> str:
    """Return by how much the next value does not fit."""
    assert one.report.verdict is not None
    answer = one.report.verdict.answer
    over = f"needs {show_bytes(one.over_by)} more than there is" if one.over_by else "does not fit for sure"
    return f"{over} (it fits with {EXPANDABLE})" if answer == "expandable" else over


def _others(found: Fit) -> list[str]:
    """Return a sentence on the values beyond the next one."""
    if found.value is None or found.next is None:
        return []
    words = "smaller" if found.smallest else "larger"
    if found.also_fits:
        return [f"also fits, after a gap: {_list(found.also_fits)}; other {words} values are not searched"]
    if not found.tried:
        return []
    return [f"{words} values that were tried do not fit either ({_list(found.tried)}); others are not searched"]


def _list(values: tuple[int, ...]) -> str:
    more = f" and {len(values) - _SHOWN} more" if len(values) > _SHOWN else ""
    return ", ".join(f"{value:,}" for value in values[:_SHOWN]) + more
