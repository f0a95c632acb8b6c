"""The list of topics."""

from __future__ import annotations

from typing import IO, Any, Final

from rich.text import Text

from memcalc.explanation.printed import WIDTH, print_line
from memcalc.explanation.topics import TOPICS
from memcalc.explanation.words import Words
from memcalc.report.consoles import console_for
from memcalc.report.folding import lines_of

HOW: Final = Words(
    "memcalc explain TOPIC explains one of them, for a setup of your own with --model, --gpus and the other options; "
    "memcalc explain --model NAME derives an estimate.",
    "memcalc explain TOPIC 解释其中一个主题，可用 --model、--gpus 等选项代入自己的设置；"
    "memcalc explain --model NAME 推导一次估算。",
)

_LEAST: Final = 30
"""The columns that a summary needs beside the names."""


def print_topics(language: str, file: IO[str]) -> None:
    """Write the name and the summary of each topic in two columns (one below the other if the terminal is narrow), and the
    command for one topic."""
    console = console_for(file, WIDTH)
    names = max(map(len, TOPICS)) + 2
    for name in TOPICS:
        summary = TOPICS[name].summary.said(language)
        if console.width >= names + _LEAST:
            first, *rest = lines_of(Text(summary), console, console.width - names)
            console.print(Text().append(name.ljust(names), style="bold").append_text(first), soft_wrap=True)
            for line in rest:
                console.print(Text(" " * names).append_text(line), soft_wrap=True)
        else:
            print_line(console, Text(name, style="bold"), 0)
            print_line(console, Text(summary), 2)
    console.print()
    print_line(console, Text(HOW.said(language)), 0)


def list_document(language: str) -> dict[str, Any]:
    """Return the list of topics as a document for `--json`."""
    topics = [{"name": name, "summary": TOPICS[name].summary.said(language)} for name in TOPICS]
    return {"schema_version": 1, "language": language, "topics": topics}
