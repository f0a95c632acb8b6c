"""A quiz from the first question to the score: lines are read, judged and counted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Literal

from memcalc.explanation.words import Words
from memcalc.quiz.answers import NotANumber
from memcalc.quiz.judged import judge
from memcalc.quiz.printed import Printer
from memcalc.quiz.question import Question

ReadLine = Callable[[], str | None]
"""Returns the next line without its end; None at the end of the input."""
Outcome = Literal["right", "wrong", "skipped"]

_HINT: Final = "?"
_END: Final = ("q", "quit", "exit", "退出")
_SKIP: Final = ("", "s", "skip", "跳过")
_RIGHT: Final = Words("Right.", "正确。")
_WRONG: Final = Words("Not right.", "不对。")
_SKIPPED: Final = Words("Skipped.", "已跳过。")
_MOST_TRIES: Final = 8
"""After so many lines that are no answer a question is skipped: input of another program may never have one."""
_AGAIN: Final = Words("Not read: {why} Try again.", "无法识别：{why}请重新输入。")


class Score:
    """The outcome of every question so far."""

    def __init__(self) -> None:
        self._outcomes: list[tuple[str, Outcome]] = []

    def count(self, topic: str, outcome: Outcome) -> None:
        """Add the outcome of a question."""
        self._outcomes.append((topic, outcome))

    def number(self, outcome: Outcome) -> int:
        """Return how many questions had an outcome."""
        return sum(each == outcome for _, each in self._outcomes)

    @property
    def to_read(self) -> list[str]:
        """Return the topics of the questions that were not answered right, each once."""
        return list(dict.fromkeys(topic for topic, outcome in self._outcomes if outcome != "right"))


def play(questions: Sequence[Question], read: ReadLine, printer: Printer, score: Score) -> None:
    """Ask the questions until all are asked, the input ends or "q" is typed. The score is counted as it comes."""
    for number, question in enumerate(questions, 1):
        printer.question(question, number, len(questions))
        outcome = _asked(question, read, printer)
        if outcome is None:
            return
        score.count(question.topic, outcome)


def _asked(question: Question, read: ReadLine, printer: Printer) -> Outcome | None:
    """Ask until there is an answer that can be read; None at the end of the quiz."""
    for _ in range(_MOST_TRIES):
        printer.prompt()
        line = read()
        if line is None or line.strip().lower() in _END:
            return None
        if line.strip() in (_HINT, "？"):
            printer.text(question.hint)
            continue
        if line.strip().lower() in _SKIP:
            break
        try:
            judged = judge(question, line)
        except NotANumber as error:
            printer.say(_AGAIN, why=error.words.said(printer.language))
            continue
        printer.text(_RIGHT.said(printer.language) if judged.right else _said_wrong(judged.words, printer.language))
        printer.derivation(question)
        return "right" if judged.right else "wrong"
    printer.say(_SKIPPED)
    printer.derivation(question)
    return "skipped"


def _said_wrong(why: Words | None, language: str) -> str:
    words = (_WRONG.said(language), "" if why is None else why.said(language))
    return ("" if language == "zh" else " ").join(word for word in words if word)
