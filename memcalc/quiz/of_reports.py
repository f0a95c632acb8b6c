"""Questions about a component of a report (level 3), derived from its rows as `memcalc explain --model` does."""

from __future__ import annotations

from typing import Final

from memcalc.estimation.estimate import estimate
from memcalc.explanation.memory import component_section
from memcalc.explanation.topic import Topic
from memcalc.explanation.words import Words
from memcalc.quiz.facts import setup_of
from memcalc.quiz.numbers import Draw, Setups
from memcalc.quiz.of_cases import EXACTLY
from memcalc.quiz.question import PERCENT_OF_A_REPORT, Kind, Question

_HINT: Final = Words(
    "Count the elements that one GPU holds, and multiply by the bytes of an element. The engine decides both.",
    "先算一张 GPU 持有多少个元素，再乘以每个元素的字节数；两者都取决于引擎。",
)


def total_of(topic: Topic, component: str, asks: Words, setups: Setups) -> Kind:
    """Return the kind of question that asks for the bytes of a component on a GPU of a drawn setup."""
    name = f"total of {component}"

    def make(draw: Draw, language: str) -> Question:
        setup = setups(draw)
        report = estimate(setup.model, params=setup.params, **setup.options)
        return Question(
            topic=topic.name,
            level=3,
            kind=name,
            text=EXACTLY.said(language, asks=asks.said(language)),
            given=setup_of(report, language),
            quantity="bytes",
            answer=report.total(component),
            percent=PERCENT_OF_A_REPORT,
            hint=_HINT.said(language),
            derivation=(component_section(report, component, language),),
            command=setup.command(),
        )

    return Kind(topic.name, 3, name, make)
