"""The questions of a quiz: which kinds, in which order, with which numbers."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Final

from memcalc.errors import InputError, nearest, one_line
from memcalc.explanation.topics import TOPICS, topic_named
from memcalc.quiz.kinds import all_kinds
from memcalc.quiz.numbers import Draw
from memcalc.quiz.question import LEVELS, Kind, Question

_ALIKE_IN_A_ROW: Final = 20
"""After so many draws that are questions which were asked already, a quiz has no new ones."""


def kinds_of(topic: str | None, level: int | None) -> list[Kind]:
    """Return the kinds of a topic and a level; None is any. InputError where there are none."""
    topic = topic if topic is None or topic in TOPICS else topic_named(topic)
    if topic is not None and topic not in TOPICS:
        close = nearest(topic, TOPICS)
        hint = f"did you mean {', '.join(close)}?" if close else f"allowed: {', '.join(TOPICS)}"
        raise InputError(f"--topic {one_line(topic)}: no such topic; {hint}")
    of_topic = [kind for kind in all_kinds() if topic in (None, kind.topic)]
    found = [kind for kind in of_topic if level in (None, kind.level)]
    if not found and of_topic:
        levels = sorted({kind.level for kind in of_topic})
        raise InputError(f"--level {level}: {topic} has no questions of it; allowed: {', '.join(map(str, levels))}")
    if not found:
        raise InputError(f"--topic {topic}: has no questions; allowed: {', '.join(topics_of(level))}")
    return found


def topics_of(level: int | None = None) -> list[str]:
    """Return the topics that have questions of a level."""
    found = {kind.topic for kind in all_kinds() if level in (None, kind.level)}
    return [name for name in TOPICS if name in found]


def deal(kinds: list[Kind], seed: int, questions: int, language: str) -> Iterator[Question]:
    """Yield so many different questions, the levels in turn from the easy one up; fewer where there are no more.

    The kinds and numbers follow from the seed alone. No kind comes twice before all of its level have come.
    """
    by_level = [[kind for kind in kinds if kind.level == level] for level in LEVELS]
    used = [own for own in by_level if own]
    shares = [questions // len(used) + (i < questions % len(used)) for i in range(len(used))]
    for own, share in zip(used, shares, strict=True):
        yield from _of_level(own, seed, share, language)


def _of_level(kinds: list[Kind], seed: int, questions: int, language: str) -> Iterator[Question]:
    draw = Draw(f"{seed}/{kinds[0].level}")
    asked: set[tuple[str, str]] = set()
    alike = 0
    waiting: list[Kind] = []
    for number in count():
        if len(asked) == questions or alike == _ALIKE_IN_A_ROW:
            return
        waiting = waiting or _topics_in_turn(draw.shuffled(kinds))
        kind = waiting.pop(0)
        question = kind.make(Draw(f"{seed}/{kind.topic}/{kind.level}/{kind.name}/{number}"), language)
        if (question.text, question.given) in asked:
            alike += 1
            continue
        asked.add((question.text, question.given))
        alike = 0
        yield question


def _topics_in_turn(kinds: list[Kind]) -> list[Kind]:
    """Return kinds so that every topic comes once before one comes twice."""
    turns: dict[str, int] = {}
    placed: list[tuple[int, Kind]] = []
    for kind in kinds:
        turns[kind.topic] = turns.get(kind.topic, 0) + 1
        placed.append((turns[kind.topic], kind))
    return [kind for _, kind in sorted(placed, key=lambda each: each[0])]
