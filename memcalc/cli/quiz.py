"""`memcalc quiz`: sizing questions, typed answers, and how each is derived."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

if TYPE_CHECKING:
    from memcalc.quiz.question import Question

EPILOG = """Examples:

memcalc quiz

memcalc quiz --topic zero --level 1

memcalc quiz --seed 7 --questions 3

memcalc quiz --json --lang zh
"""
_MOST_QUESTIONS: Final = 100
_SEEDS: Final = 2**32
_LONGEST_LINE: Final = 10_000


def _topics(incomplete: str) -> list[str]:
    """Return the topics that begin with the typed text, for shell completion."""
    from memcalc.quiz.dealt import topics_of

    return [name for name in topics_of() if name.startswith(incomplete)]


def _option(help: str, *names: str, **more: Any) -> object:
    return typer.Option(*names, help=help, show_default=False, **more)


def quiz(
    topic: Annotated[
        str | None,
        _option("A topic of `memcalc explain --list`. (default: all)", "--topic", autocompletion=_topics),
    ] = None,
    level: Annotated[
        int | None,
        _option("1: the rule of thumb. 2: rules compared. 3: what the engine really does. (default: all)", "--level"),
    ] = None,
    questions: Annotated[int | None, _option("1 to 100. (default: 10)", "--questions", "-n")] = None,
    seed: Annotated[
        int | None, _option("A whole number; the same seed asks the same questions. (default: random)", "--seed")
    ] = None,
    lang: Annotated[
        str | None, _option("en or zh. (default: zh where LC_ALL or LANG is Chinese, else en)", "--lang")
    ] = None,
    json: Annotated[
        bool, _option("One JSON document: the questions, answers, tolerances, derivations. Nothing is asked.", "--json")
    ] = False,
) -> None:
    """Ask sizing questions with random numbers. Type an answer with its unit, and see how it is derived.

    Answers are read from the terminal or, a line each, from a pipe.
    """
    from memcalc.cli.language import language_option
    from memcalc.cli.waiting import waiting

    language = language_option(lang)
    number = _number("--questions", questions, 10, 1, _MOST_QUESTIONS)
    kinds = _kinds(topic, level)
    chosen = _number("--seed", seed, None, 0, _SEEDS - 1)
    with waiting("the questions"):
        from memcalc.quiz.dealt import deal

        dealt = list(deal(kinds, chosen, number, language))
    if json:
        from json import dumps

        from memcalc.quiz.printed import document

        print(dumps(document(dealt, chosen, language), indent=1, ensure_ascii=False))
    else:
        _ask(dealt, chosen, language)


def _number(flag: str, given: object, default: int | None, low: int, high: int) -> int:
    """Return an option that is a whole number. The default None is a random number."""
    from memcalc.errors import InputError, one_line

    if given is None:
        if default is not None:
            return default
        from secrets import randbelow

        return randbelow(1_000_000)
    if not isinstance(given, int) or not low <= given <= high:
        raise InputError(f"{flag} {one_line(given)}: allowed: a whole number from {low} to {high}")
    return given


def _kinds(topic: str | None, level: int | None) -> list[Any]:
    from memcalc.errors import InputError, one_line
    from memcalc.quiz.dealt import kinds_of
    from memcalc.quiz.question import LEVELS

    if level is not None and level not in LEVELS:
        raise InputError(f"--level {one_line(level)}: allowed: {', '.join(map(str, LEVELS))}")
    return kinds_of(topic, level)


def _ask(questions: list[Question], seed: int, language: str) -> None:
    """Ask the questions. Ctrl-C and Ctrl-D end the quiz with the score so far."""
    from memcalc.cli.streams import interrupts_raise, read_any_bytes
    from memcalc.quiz.printed import Printer
    from memcalc.quiz.session import Score, play

    read_any_bytes()
    printer, score = Printer(sys.stdout, language), Score()
    with interrupts_raise():
        try:
            printer.title(len(questions), seed)
            play(questions, lambda: _line(printer), printer, score)
        except KeyboardInterrupt:
            printer.line()
    printer.score(score)


def _read() -> str:
    """Return what stdin has up to the next end of a line; '' at its end, or where it cannot be read."""
    if sys.stdin is None:
        return ""
    try:
        return sys.stdin.readline(_LONGEST_LINE)
    except OSError:
        return ""


def _line(printer: Any) -> str | None:
    """Return the next line of stdin; None at its end. A line that no terminal echoes is printed."""
    line = _read()
    if not line:
        printer.line()
        return None
    text = line.rstrip("\r\n")
    if not sys.stdin.isatty():
        printer.line("".join(c for c in text if c.isprintable())[:200])
    return text
