"""Sections as text that folds to the width of the terminal, and as a document."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import IO, TYPE_CHECKING, Any, Final

from rich.console import Console
from rich.text import Text

from memcalc.explanation.words import Words
from memcalc.report.consoles import console_for
from memcalc.report.folding import lines_of
from memcalc.units import KIB, show_bytes, show_count, show_flops, show_gb, show_seconds, to_bytes

if TYPE_CHECKING:
    from memcalc.explanation.step import Section, Step

WIDTH: Final = 100
SOURCE: Final = Words("source: {source}", "来源：{source}")
_UNITS: Final = {
    "gpus": Words("GPUs", "张 GPU"),
    "parameters": Words("parameters", "个参数"),
    "elements": Words("elements", "个元素"),
}


def print_sections(title: str, sections: Iterable[Section], language: str, file: IO[str]) -> None:
    """Write a title and the sections with their steps, each formula in names and then in numbers."""
    console = console_for(file, WIDTH)
    print_line(console, Text(title, style="bold"), 0)
    for section in sections:
        console.print()
        print_section(console, section, language)


def print_section(console: Console, section: Section, language: str) -> None:
    """Write the title of a section, its steps and its sentences."""
    print_line(console, Text(section.title, style="bold underline"), 0)
    said: set[str] = set()
    for step in section.steps:
        for line, indent in _lines(step, language, said):
            print_line(console, line, indent)
        said.update((step.why, step.source))
    for sentence in section.text:
        print_line(console, Text(sentence), 2)


def _lines(step: Step, language: str, said: set[str]) -> Iterator[tuple[Text, int]]:
    """Yield a step's lines and their indents. What a step before it has said is not said again."""
    head = Text(step.what, style="bold")
    head.append(f"  {shown(step, language)}", style="not bold")
    yield head, 2
    if step.formula:
        yield Text(step.formula), 4
    if step.numbers:
        yield Text(f"= {step.numbers}"), 4
    if step.why and step.why not in said:
        yield Text(step.why), 4
    if step.source and step.source not in said:
        yield Text(SOURCE.said(language, source=step.source), style="dim"), 4


def print_line(console: Console, line: Text, indent: int) -> None:
    """Write a line, folded to the width behind an indent."""
    for part in lines_of(line, console, max(console.width - indent, 1)):
        console.print(Text(" " * indent).append_text(part), soft_wrap=True)


def shown(step: Step, language: str = "en") -> str:
    """Return a result with its unit: bytes exactly, in binary and in decimal units."""
    if step.unit == "bytes":
        nbytes = round(step.result)
        binary = f" = {show_bytes(nbytes)}" if abs(nbytes) >= KIB else ""
        decimal = f" = {show_gb(nbytes)}" if abs(nbytes) >= to_bytes(1, "GB") else ""
        return f"{nbytes:,} B{binary}{decimal}"
    if step.unit == "flop":
        return f"{round(step.result):,} FLOP = {show_flops(round(step.result))}"
    if step.unit == "seconds":
        return show_seconds(step.result)
    if step.unit == "ratio":
        return f"{step.result:.4g}"
    count = round(step.result)
    larger = f" = {show_count(count)}" if step.unit != "gpus" and count >= 10**6 else ""
    return f"{count:,} {_UNITS[step.unit].said(language)}{larger}"


def document(title: str, sections: Iterable[Section], language: str) -> dict[str, Any]:
    """Return the sections for `--json`: what is printed, each result a number in the step's unit."""
    return {
        "schema_version": 1,
        "title": title,
        "language": language,
        "sections": [section_document(section) for section in sections],
    }


def section_document(section: Section) -> dict[str, Any]:
    """Return a section for `--json`."""
    return {"title": section.title, "steps": [step._asdict() for step in section.steps], "text": list(section.text)}
