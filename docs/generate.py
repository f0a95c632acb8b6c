"""Writes what the documents take from the code, memcalc/hardware/figures.json from the records in tests/measured, and
memcalc/timing/errors.json from tests/published_step_times.json.

docs/options.md, accuracy.md, families.md, number.md, formulas.md, json.md and references.md are written whole; in the other
pages the places that filled.py names.

python docs/generate.py            writes them
python docs/generate.py --check    exits with 1 if one of them is stale
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import accuracy
import families
import filled
import formulas
import measured
import number
import references
import schema
import step_times

import memcalc
from memcalc.cli.main import COMMANDS, build
from memcalc.hardware.figures import FILE, document_of, parsed, using
from memcalc.timing import ranges
from memcalc.validate.figures import figures_of
from memcalc.validate.recording import read_record

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"


def options() -> str:
    """docs/options.md: every command with its options."""
    import typer.main

    lines = ["# Commands and options", "", "Written by `docs/generate.py` from the commands themselves.", ""]
    group = typer.main.get_command(build(list(COMMANDS)))
    for name, command in group.commands.items():  # type: ignore[attr-defined]
        lines += [f"## memcalc {name}", "", command.help or "", "", "| option | what |", "|---|---|"]
        for parameter in command.params:
            if parameter.name == "help":
                continue
            names = ", ".join(f"`{n}`" for n in [*parameter.opts, *parameter.secondary_opts])
            lines.append(f"| {names} | {parameter.help} |")
        lines.append("")
    return "\n".join(lines)


def figures() -> str:
    """memcalc/hardware/figures.json: what the records in tests/measured have that no rule gives."""
    cases = [case for record in measured.records() for case in read_record(record)]
    return json.dumps(document_of(figures_of(cases)), indent=1) + "\n"


def whole() -> dict[Path, str]:
    """The pages that are written whole."""
    return {
        DOCS / "options.md": options(),
        DOCS / "accuracy.md": accuracy.page(),
        DOCS / "number.md": number.page(),
        DOCS / "families.md": families.page(),
        DOCS / "formulas.md": formulas.page(),
        DOCS / "json.md": schema.page(memcalc.estimate("llama-7b").to_dict()["setup"]),
        DOCS / "references.md": references.page(),
    }


def documents() -> dict[Path, str]:
    """Every document with its fresh text."""
    made = figures()
    with using(parsed(json.loads(made))):  # the tables of the others are estimates
        pages = whole()
        for path in filled.pages(set(pages)):
            pages[path] = filled.filled(path.read_text(encoding="utf-8"))
    return {FILE: made, ranges.FILE: step_times.errors(), **pages}


def run(check: bool) -> int:
    """Write the documents, or say which are stale."""
    stale = 0
    for path, fresh in documents().items():
        old = path.read_text(encoding="utf-8") if path.exists() else ""
        if old == fresh:
            continue
        if check:
            print(f"{path.relative_to(ROOT)} is stale: run python docs/generate.py")
            stale = 1
        else:
            path.write_text(fresh, encoding="utf-8")
            print(f"wrote {path.relative_to(ROOT)}")
    return stale


if __name__ == "__main__":
    sys.exit(run("--check" in sys.argv[1:]))
