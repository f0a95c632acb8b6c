"""The part of docs/accuracy.md that is made of tests/measured/*.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from textwrap import wrap
from typing import Any

from memcalc.validate.recording import name_of, read_record
from memcalc.validate.records import STATED, errors_of, rows_of, time_error_of, verdicts_of
from memcalc.validate.versions import others

FOLDER = Path(__file__).resolve().parent.parent / "tests" / "measured"

HEAD = """## Runs recorded with memcalc

`memcalc validate --backend cuda` runs what was estimated. Records of it are in tests/measured, and the tests compare today's
estimates with every recorded row. A row may be off by at most:

{stated}
- calls and payload of a collective 0%
"""

OWED = """No run is recorded yet: the rows of a GPU are owed, and the bounds are goals. One command makes them:
`memcalc validate --backend cuda --suite gpu --record tests/measured/NAME.json` (CONTRIBUTING.md, "Measuring on a GPU").
"""

_WIDTH = 128
SHOWN = ("saved_activations", "peak", "allocated", "reserved", "device")


def section(folder: Path = FOLDER) -> list[str]:
    """The lines."""
    bounds: dict[float, list[str]] = {}
    for name, bound in STATED.items():
        bounds.setdefault(bound, []).append(name)
    stated = "\n".join(f"- {', '.join(names)} {100 * bound:g}%" for bound, names in bounds.items())
    lines = HEAD.format(stated=stated).splitlines()
    if not records(folder):
        return [*lines, "", *OWED.splitlines(), ""]
    for record in records(folder):
        lines += ["", *of_record(record.stem, read_record(record))]
    return [*lines, ""]


def records(folder: Path = FOLDER) -> list[Path]:
    """The files, by name."""
    return sorted(folder.glob("*.json"))


def of_record(name: str, cases: Sequence[Mapping[str, Any]]) -> list[str]:
    """A record: where it was made, its errors by kind of row, its verdicts, its cases."""
    kernels = sorted({kernel for made in cases for kernel in made.get("attention", ())})
    attention = [f"attention by {', '.join(kernels)}"] if kernels else []
    lines = [f"### {name}", ""]
    places = [made["environment"] for made in cases if "environment" in made]
    for where, note in {_shown(place): others(place) for place in places}.items():
        said = [" · ".join([*where, *attention]), *([f"It {note}."] if note else [])]
        lines += [line for one in said for line in (*wrap(one, _WIDTH, break_on_hyphens=False), "")]
    rows = [row for made in cases for row in rows_of(made)]
    lines += [
        "| row | cases | median error | worst | too high, too low | worst case |",
        "|---|---|---|---|---|---|",
        *(
            f"| {kind} | {e.cases} | {e.median:.2%} | {e.worst:+.2%} | {e.over}, {e.under} | {e.where} |"
            for kind, e in errors_of(rows).items()
        ),
        "",
        *_verdicts(cases),
        *_times(cases),
        "",
        f"| case | {' | '.join(SHOWN)} | seconds |",
        "|---" * (len(SHOWN) + 2) + "|",
    ]
    return [*lines, *(_case(made) for made in cases)]


def _shown(place: Mapping[str, str]) -> tuple[str, ...]:
    """Where a case ran: a record that went on elsewhere has several. `source` says the versions again."""
    return tuple(f"{key} {value}" for key, value in place.items() if key != "source")


def _verdicts(cases: Sequence[Mapping[str, Any]]) -> list[str]:
    right, fits, does_not = verdicts_of(cases)
    return [
        f"Verdicts: {right} right; {len(fits)} said to fit and out of memory; {len(does_not)} said not to fit and ran.",
        "",
        *(f"- {case}: said to fit" for case in fits),
        *(f"- {case}: said not to fit" for case in does_not),
    ]


def _times(cases: Sequence[Mapping[str, Any]]) -> list[str]:
    """What the predicted times are worth. One GPU of many waits for no other, so cases with an engine have none."""
    errors = [error for made in cases if (error := time_error_of(made)) is not None]
    if not errors:
        return []
    least, middle, most = min(errors), median(map(abs, errors)), max(errors)
    return [
        f"Seconds of a step, {len(errors)} cases without an engine: {least:+.0%} to {most:+.0%}, median error {middle:.0%}."
    ]


def _case(made: Mapping[str, Any]) -> str:
    """Bytes measured, and the error of today's prediction."""
    if made["outcome"] != "measured":
        return f"| {name_of(made['case'])} | {made['outcome']} |" + " |" * len(SHOWN)
    rows = {row.compared.name: row.compared for row in rows_of(made)}
    cells = [f"{rows[name].measured:,} B, {rows[name].error:+.2%}" if name in rows else "" for name in SHOWN]
    error = time_error_of(made)
    seconds = "" if made["seconds"] is None else f"{made['seconds']:.3f}" + ("" if error is None else f", {error:+.0%}")
    return f"| {name_of(made['case'])} | {' | '.join(cells)} | {seconds} |"
