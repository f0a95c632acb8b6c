"""The list of topics."""

from __future__ import annotations

from typing import IO, Any, Final

from rich.table import Table

from memcalc.explanation.printed import WIDTH
from memcalc.explanation.topics import TOPICS
from memcalc.explanation.words import Words
from memcalc.report.consoles import console_for

HOW: Final = Words(
    "memcalc explain TOPIC explains one of them, for a setup of your own with --model, --gpus and the other options; "
    "memcalc explain --model NAME derives an estimate.",
    "memcalc explain TOPIC 解释其中一个主题，可用 --model、--gpus 等选项代入自己的设置；"
    "memcalc explain --model NAME 推导一次估算。",
)


def print_topics(language: str, file: IO[str]) -> None:
    """Write a line for each topic, and how to ask for one."""
    console = console_for(file, WIDTH)
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    for name in TOPICS:
        table.add_row(name, TOPICS[name].summary.said(language))
    console.print(table)
    console.print()
    console.print(HOW.said(language))


def list_document(language: str) -> dict[str, Any]:
    """Return the topics for `--json`."""
    topics = [{"name": name, "summary": TOPICS[name].summary.said(language)} for name in TOPICS]
    return {"schema_version": 1, "language": language, "topics": topics}
