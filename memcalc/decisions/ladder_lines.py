"""The ladder of `memcalc fit --ladder` in a terminal: a line for each rung."""

from __future__ import annotations

from collections.abc import Mapping
from typing import IO, TYPE_CHECKING, Any, Final

from rich.console import Group, RenderableType
from rich.text import Text

from memcalc.decisions.compare_rows import ANSWERS, NOTHING, REFUSED
from memcalc.inputs.options import option_name
from memcalc.report.consoles import console_for
from memcalc.report.fitting import Column, fitting, table_of
from memcalc.report.folding import Folded
from memcalc.report.title import title
from memcalc.report.verdict import EXPANDABLE
from memcalc.timing.kernels import Unknown
from memcalc.units import show_bytes, show_seconds

if TYPE_CHECKING:
    from memcalc.decisions.ladder import Ladder, Rung

_WIDTH: Final = 100
_FIRST_TO_GO: Final = ("peak", "host", "saves")


def print_ladder(found: Ladder, file: IO[str]) -> None:
    """Print the setup as given and each rung: its memory, what it saves over the rung below, and what it costs in time."""
    console = console_for(file, _WIDTH)
    first = found.rungs[0].report
    assert first is not None
    columns, left_out = fitting(_columns(found), console.width, _FIRST_TO_GO)
    parts: list[RenderableType] = [Folded(title(first)), Folded(Text(_answer(found), "bold")), ""]
    parts.append(table_of(columns, bold=found.first_fit))
    parts += [Folded(line) for line in (*([left_out] if left_out else []), "", *_legend(found), *_refusals(found))]
    console.print(Group(*parts))


def _answer(found: Ladder) -> str:
    place = found.first_fit
    if place is None:
        return f"no rung fits{_only_expandable(found)}"
    if not place:
        return "the setup fits as it is given"
    return f"the lowest rung that fits adds {_words(found.rungs[place].flags)}"


def _only_expandable(found: Ladder) -> str:
    """Return what would let a rung fit whose memory is enough but for fragments; "" if there is none."""
    verdicts = (rung.report.verdict for rung in found.rungs if rung.report is not None)
    if any(verdict is not None and verdict.answer == "expandable" for verdict in verdicts):
        return f" as it is; those marked {ANSWERS['expandable']} do with {EXPANDABLE}"
    return ""


def _columns(found: Ladder) -> list[Column]:
    rungs = found.rungs
    return [
        Column("rung", [_name(rung) for rung in rungs], "left"),
        Column("peak", [NOTHING if rung.report is None else show_bytes(rung.report.peak) for rung in rungs]),
        Column("device", [_device(rung) for rung in rungs]),
        Column("saves", [_saves(rung) for rung in rungs]),
        Column("host", [_host(rung) for rung in rungs]),
        Column("step", [_time(rung) for rung in rungs]),
        Column("verdict", [_verdict(rung) for rung in rungs], "left"),
    ]


def _name(rung: Rung) -> str:
    return f"+ {_words(rung.adds)}" if rung.adds else rung.name


def _words(options: Mapping[str, Any]) -> str:
    return " ".join(f"{option_name(name)} {value}" for name, value in options.items() if value is not None)


def _device(rung: Rung) -> str:
    return NOTHING if rung.report is None else show_bytes(rung.report.device)


def _saves(rung: Rung) -> str:
    if rung.saves is None:
        return NOTHING
    return show_bytes(rung.saves) + ("*" if rung.saves_of == "allocated" else "")


def _host(rung: Rung) -> str:
    from memcalc.offload.host import totals

    if rung.report is None:
        return NOTHING
    return show_bytes(sum(totals(rung.report.host).values())) if rung.report.host else NOTHING


def _time(rung: Rung) -> str:
    if rung.report is None or isinstance(rung.report.time, Unknown):
        return NOTHING
    longer = "" if rung.takes is None else f" ({rung.takes - 1:+.0%})"
    return show_seconds(rung.report.time.seconds) + longer


def _verdict(rung: Rung) -> str:
    if rung.report is None:
        return REFUSED
    return NOTHING if rung.report.verdict is None else ANSWERS[rung.report.verdict.answer]


def _legend(found: Ladder) -> list[str]:
    lines = [
        "device: as nvidia-smi shows it; saves: less on the device than the rung before; host: bytes of a node",
        "step: its time, and how much longer than the step as given",
        "each rung keeps those before it; a refused one is left out of what follows",
    ]
    if any(rung.saves_of == "allocated" for rung in found.rungs):
        lines.append(
            "saves*: less that is allocated; fragments are assumed on one of both rungs and played on the other, so `device` "
            "compares unlike things"
        )
    missing = dict.fromkeys(
        rung.report.time.missing
        for rung in found.rungs
        if rung.report is not None and isinstance(rung.report.time, Unknown)
    )
    return [*lines, *(f"time not known: {reason}" for reason in missing)]


def _refusals(found: Ladder) -> list[str]:
    return [f"{REFUSED}: {error}" for error in dict.fromkeys(rung.error for rung in found.rungs) if error]
