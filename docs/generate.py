"""Writes what the documents take from the code: the README's output and counts, docs/options.md and docs/accuracy.md; and
memcalc/hardware/figures.json from the records in tests/measured.

python docs/generate.py            writes them
python docs/generate.py --check    exits with 1 if one of them is stale
"""

from __future__ import annotations

import io
import json
import re
import sys
from contextlib import redirect_stdout
from pathlib import Path

import accuracy
import measured

from memcalc.cli.main import COMMANDS, build, main
from memcalc.families import FAMILIES
from memcalc.hardware.figures import FILE, document_of, parsed, using
from memcalc.inputs.model import model_names
from memcalc.validate.figures import figures_of
from memcalc.validate.recording import read_record

ROOT = Path(__file__).resolve().parent.parent


def readme() -> str:
    """README.md with fresh output and counts."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    text = re.sub(r"(<!-- models -->)\d+(<!-- /models -->)", rf"\g<1>{len(model_names())}\g<2>", text)
    text = re.sub(r"(<!-- families -->)\d+(<!-- /families -->)", rf"\g<1>{len(FAMILIES)}\g<2>", text)
    return re.sub(
        r"(<!-- output of: memcalc (.+?) -->\n```text\n).*?(```\n<!-- end of output -->)",
        lambda match: match[1] + _output(match[2].split()) + match[3],
        text,
        flags=re.DOTALL,
    )


def _output(arguments: list[str]) -> str:
    out = io.StringIO()
    with redirect_stdout(out):
        assert main(arguments) == 0
    return "\n".join(line.rstrip() for line in out.getvalue().rstrip().splitlines()) + "\n"


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


def run(check: bool) -> int:
    """Write the documents, or say which are stale."""
    stale = 0
    made = figures()
    with using(parsed(json.loads(made))):  # the tables of the others are estimates
        documents = (
            (FILE, made),
            (ROOT / "README.md", readme()),
            (ROOT / "docs" / "options.md", options()),
            (ROOT / "docs" / "accuracy.md", accuracy.page()),
        )
    for path, fresh in documents:
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
