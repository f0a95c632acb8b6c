"""Questions that compare rules of thumb (level 2): how many times, how much more, the fewest that suffice, whether it fits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, Final, NamedTuple

from memcalc.estimation.estimate import estimate
from memcalc.explanation.letters import letters_in, values
from memcalc.explanation.step import Section, Step
from memcalc.explanation.topic import COUNTS, Rule, Topic
from memcalc.explanation.words import Words
from memcalc.quiz.facts import given
from memcalc.quiz.numbers import Draw
from memcalc.quiz.of_cases import joined, quantity_of
from memcalc.quiz.question import PERCENT_OF_A_RULE, Kind, Quantity, Question, percent_of
from memcalc.units import show_gb

_BY_RULES: Final = Words("By the rules of thumb: {asks}", "按经验法则：{asks}")
_RATIO: Final = Words("one over the other", "两者之比")
_DIFFERENCE: Final = Words("one less the other", "两者之差")
_SUM: Final = Words("together", "合计")
_CAPACITY: Final = Words("memory of the GPU", "GPU 显存")
_ENOUGH: Final = Words("with {count}, at most {limit}:", "取 {count}，不超过 {limit}：")
_TOO_FEW: Final = Words("with {count}, more than {limit}:", "取 {count}，超过 {limit}：")


class Put(NamedTuple):
    """A rule with numbers for its letters, and words that name it where one rule is put in twice."""

    rule: Rule
    numbers: Mapping[str, int | float]
    words: Words | None = None

    def step(self, language: str) -> Step:
        """Return the rule with the numbers put in."""
        return self.rule.step((self.words or self.rule.title).said(language), self.numbers)


class Two(NamedTuple):
    """Two rules to compare, and the values for the placeholders of the question."""

    first: Put
    second: Put
    values: Mapping[str, object] = {}


Pairs = Callable[[Draw], Two]
"""Draws two rules with their numbers."""


def one(topic: Topic, rule: Rule, asks: Words, puts: Callable[[Draw], Put]) -> Kind:
    """Return the kind of question of level 1 that asks for what a rule gives, with numbers that no setup has."""

    def make(draw: Draw, language: str) -> Question:
        put = puts(draw)
        step = put.step(language)
        made = question(
            topic, rule.title.en, asks.said(language), (put,), (step,), step.result, quantity_of(rule.unit), language
        )
        return replace(made, level=1)

    return Kind(topic.name, 1, rule.title.en, make)


def times(topic: Topic, name: str, asks: Words, pairs: Pairs) -> Kind:
    """Return the kind of question that asks how many times one rule's number is another's."""

    def together(first: Step, second: Step, language: str) -> Step:
        numbers = f"{_plain(first.result)}/{_plain(second.result)}"
        return Step(_RATIO.said(language), "a/b", numbers, first.result / second.result, "ratio")

    return _compared(topic, name, asks, pairs, together)


def less(topic: Topic, name: str, asks: Words, pairs: Pairs) -> Kind:
    """Return the kind of question that asks by how much one rule's number exceeds another's."""

    def together(first: Step, second: Step, language: str) -> Step:
        numbers = f"{_plain(first.result)} - {_plain(second.result)}"
        return Step(_DIFFERENCE.said(language), "a - b", numbers, first.result - second.result, first.unit)

    return _compared(topic, name, asks, pairs, together)


def both(topic: Topic, name: str, asks: Words, pairs: Pairs) -> Kind:
    """Return the kind of question that asks for the sum of what two rules give."""

    def together(first: Step, second: Step, language: str) -> Step:
        numbers = f"{_plain(first.result)} + {_plain(second.result)}"
        return Step(_SUM.said(language), "a + b", numbers, first.result + second.result, first.unit)

    return _compared(topic, name, asks, pairs, together)


def _compared(topic: Topic, name: str, asks: Words, pairs: Pairs, together: Callable[[Step, Step, str], Step]) -> Kind:
    def make(draw: Draw, language: str) -> Question:
        two = pairs(draw)
        steps = two.first.step(language), two.second.step(language)
        result = together(*steps, language)
        return question(
            topic, name, asks.said(language, **two.values), (two.first, two.second), (*steps, result), result.result,
            quantity_of(result.unit), language,
        )  # fmt: skip

    return Kind(topic.name, 2, name, make)


class Least(NamedTuple):
    """A search for the smallest count at which a rule's number is at most a limit."""

    rule: Rule
    letter: str
    counts: Iterable[int]
    numbers: Mapping[str, int | float]
    limit: int | float
    values: Mapping[str, object] = {}


def fewest(topic: Topic, name: str, asks: Words, searches: Callable[[Draw], Least], quantity: Quantity) -> Kind:
    """Return the kind of question that asks for the smallest number of something with which a rule's number is small enough."""

    def make(draw: Draw, language: str) -> Question:
        search = searches(draw)
        steps: list[Step] = []
        for count in search.counts:
            value = search.rule.value({**search.numbers, search.letter: count})
            enough = value <= search.limit
            words = _ENOUGH if enough else _TOO_FEW
            limit = _shown(search.limit, search.rule.unit)
            step = search.rule.step(
                words.said(language, count=count, limit=limit), {**search.numbers, search.letter: count}
            )
            steps = [*steps[-1:], step]
            if enough:
                break
        else:
            raise AssertionError(f"{name}: no count is enough for {search.numbers}")
        put = Put(search.rule, search.numbers)
        return question(
            topic, name, asks.said(language, **search.values), (put,), tuple(steps), count, quantity, language
        )

    return Kind(topic.name, 2, name, make)


class Room(NamedTuple):
    """A rule with its numbers, and the memory that its bytes have to fit in."""

    put: Put
    capacity: int
    values: Mapping[str, object] = {}


def fits(topic: Topic, name: str, asks: Words, rooms: Callable[[Draw], Room]) -> Kind:
    """Return the kind of question that asks whether a rule's bytes fit a GPU: yes or no."""

    def make(draw: Draw, language: str) -> Question:
        room = rooms(draw)
        step = room.put.step(language)
        memory = Step(_CAPACITY.said(language), "", "", room.capacity, "bytes")
        fit = step.result <= room.capacity
        return question(
            topic, name, asks.said(language, **room.values), (room.put,), (step, memory), fit, "truth", language
        )

    return Kind(topic.name, 2, name, make)


def question(
    topic: Topic,
    name: str,
    asks: str,
    puts: tuple[Put, ...],
    steps: tuple[Step, ...],
    answer: int | float | bool,
    quantity: Quantity,
    language: str,
) -> Question:
    """Return the question whose answer the steps lead to."""
    rules = list({id(put.rule): put.rule for put in puts}.values())
    return Question(
        topic=topic.name,
        level=2,
        kind=name,
        text=_BY_RULES.said(language, asks=asks),
        given=given(_common(puts), language),
        quantity=quantity,
        answer=answer,
        percent=percent_of(quantity, PERCENT_OF_A_RULE),
        hint=joined(tuple(COUNTS.said(language, words=rule.counts.said(language)) for rule in rules), language),
        derivation=(Section(topic.title.said(language), steps),),
        command=f"memcalc explain {topic.name}",
    )


def _common(puts: tuple[Put, ...]) -> dict[str, int | float]:
    """Return the letters that have the same number in every rule that has them."""
    found: dict[str, set[int | float]] = {}
    for put in puts:
        for letter in letters_in(put.rule.formula):
            if letter in put.numbers:
                found.setdefault(letter, set()).add(put.numbers[letter])
    return {letter: numbers.pop() for letter, numbers in found.items() if len(numbers) == 1}


def letters_of(rules: tuple[Rule, ...], model: str, **options: Any) -> dict[str, int]:
    """Return the letters of rules in a setup of a model."""
    report = estimate(model, **options)
    return {letter: number for rule in rules for letter, number in values(rule.formula, report).items()}


def _plain(number: int | float) -> str:
    return str(int(number)) if number == int(number) else repr(number)


def _shown(number: int | float, unit: str) -> str:
    return show_gb(number) if unit == "bytes" else f"{number:.4g}"
