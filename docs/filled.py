"""What the hand-written pages take from the code: outputs of commands, counts, versions and the table of evidence.

A page marks such a place with a pair of comments, and what is between them is written here:

    <!-- output of: memcalc estimate … -->  a fenced block with what the command prints
    <!-- families -->111<!-- /families -->  a value by its name
"""

from __future__ import annotations

import io
import os
import re
import shlex
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import cache
from pathlib import Path
from unittest.mock import patch

import evidence

import memcalc
from memcalc.cli.main import main
from memcalc.explanation.topics import TOPICS
from memcalc.families import FAMILIES
from memcalc.inputs.gpu import all_gpus
from memcalc.inputs.model import model_names
from memcalc.tape.played import Played
from memcalc.validate.versions import ESTIMATED

ROOT = Path(__file__).resolve().parent.parent
OUTPUT = re.compile(r"(<!-- output of: memcalc (.+?) -->\n```text\n).*?(```\n<!-- end of output -->)", re.DOTALL)
VALUE = re.compile(r"<!-- ([a-z ]+) -->(.*?)<!-- /\1 -->", re.DOTALL)


VALUES: dict[str, Callable[[], str]] = {
    "models": lambda: str(len(model_names())),
    "families": lambda: str(len(FAMILIES)),
    "gpus": lambda: str(len(all_gpus())),
    "transformers": lambda: ESTIMATED["transformers"],
    "torch": lambda: ESTIMATED["torch"],
    "megatron types": lambda: str(sum(FAMILIES[name].support.architecture is not None for name in FAMILIES)),
    "ulysses types": lambda: str(sum(FAMILIES[name].support.ulysses for name in FAMILIES)),
    "log": lambda: f"{run_of_readme()['log']:,}",
    "events": lambda: f"{run_of_readme()['events']:,}",
    "deep log": lambda: f"{run_of_readme()['deep log']:,}",
    "moments": lambda: f"{run_of_readme()['moments']:,}",
    "time of the readme": lambda: f"\n```text\n{time_of_readme()}\n```\n",
    "topics": lambda: f"\n{topics()}\n",
    "quiz session": lambda: f"\n{quiz_session()}\n",
    "evidence": lambda: f"\n{evidence.table()}\n",
    "evidence zh": lambda: f"\n{evidence.table(evidence.CHINESE)}\n",
}
"""The values that a page can name. Some take seconds."""


@cache
def value(name: str) -> str:
    return VALUES[name]()


@cache
def run_of_readme() -> dict[str, int]:
    """How long the logs of llama-7b's run under ZeRO-3 are, and how many events and moments they have."""
    (profile,) = memcalc.estimate("llama-7b", gpus=8, zero=3).rank.profiles
    assert isinstance(profile, Played)
    shallow, whole = profile._recorded._shallow, profile._recorded.run
    assert shallow.noted is not None
    return {
        "log": len(shallow.log),
        "events": len(shallow.noted.events),
        "deep log": len(whole.log),
        "moments": len(profile.moments),
    }


def time_of_readme() -> str:
    """The line on the time of a step that the README's estimate prints."""
    printed = output("estimate --model llama-7b --zero 3 --gpus 8 --gpu a100-80gb").splitlines()
    return next(line for line in printed if line.startswith("a step takes"))


def topics() -> str:
    """The topics of `memcalc explain` in both languages, as a table."""
    rows = [f"| `{name}` | {TOPICS[name].summary.en} | {TOPICS[name].summary.zh} |" for name in TOPICS]
    return "\n".join(["| topic | in English | in Chinese |", "|---|---|---|", *rows])


def quiz_session() -> str:
    """A quiz of three questions: one answered right at once, one after a hint, one by the rule of thumb alone."""
    typed = "57.2 GB\n?\n32\n58.2 GB\n"
    with patch("sys.stdin", io.StringIO(typed)):
        printed = output("quiz --topic zero --seed 2 --questions 3 --lang en")
    return f"```text\n{printed}```"


def pages(written: set[Path]) -> list[Path]:
    """The hand-written pages: those beside the READMEs and those of docs that no other function writes whole."""
    found = [*ROOT.glob("*.md"), *sorted((ROOT / "docs").rglob("*.md"))]
    return [path for path in found if path not in written]


def filled(text: str) -> str:
    """The text of a page with fresh outputs and values; KeyError for a name that is no value."""
    text = VALUE.sub(lambda match: f"<!-- {match[1]} -->{value(match[1])}<!-- /{match[1]} -->", text)
    return OUTPUT.sub(lambda match: match[1] + output(match[2]) + match[3], text)


@cache
def output(arguments: str) -> str:
    """What a command prints, as in a terminal of 100 columns."""
    out = io.StringIO()
    with redirect_stdout(out), patch.dict(os.environ, {"COLUMNS": "100"}):
        assert main(shlex.split(arguments)) == 0, arguments
    return "\n".join(line.rstrip() for line in out.getvalue().rstrip().splitlines()) + "\n"
