"""Questions from the cases of a topic: the rule put into numbers (level 1), the exact number beside it (level 3)."""

from __future__ import annotations

from typing import Final

from memcalc.explanation.letters import letters_in, values
from memcalc.explanation.step import Section, Step
from memcalc.explanation.topic import COUNTS, Asked, Case, Rule, Topic, asked_in, compared, put_in, said_of
from memcalc.explanation.words import Words
from memcalc.quiz.facts import given, setup_of
from memcalc.quiz.numbers import Draw, Setup, Setups
from memcalc.quiz.question import PERCENT_OF_A_REPORT, PERCENT_OF_A_RULE, Kind, Quantity, Question, percent_of

_BY_RULE: Final = Words("By the rule of thumb: {asks}", "按经验法则：{asks}")
EXACTLY: Final = Words("As the engine really does it: {asks}", "按引擎的实际做法：{asks}")
_RULE_SAYS: Final = Words("The rule of thumb: {title}. {differs}", "经验法则是：{title}。{differs}")


def by_rule(topic: Topic, rule: Rule, asks: Words, setups: Setups, quantity: Quantity | None = None) -> Kind:
    """Return the kind of question that asks for what a rule gives, with the numbers of a drawn setup."""
    case = case_of(topic, rule)
    unit = quantity or quantity_of(rule.unit)

    def make(draw: Draw, language: str) -> Question:
        setup = setups(draw)
        asked = _asked(topic, case, setup, language)
        step = put_in(rule, asked.report, language)
        return Question(
            topic=topic.name,
            level=1,
            kind=_name(rule),
            text=_BY_RULE.said(language, asks=asks.said(language)),
            given=given(_numbers(rule, asked), language),
            quantity=unit,
            answer=step.result,
            percent=percent_of(unit, PERCENT_OF_A_RULE),
            hint=COUNTS.said(language, words=rule.counts.said(language)),
            derivation=(Section(rule.title.said(language), (step,), said_of(rule, language)),),
            command=setup.command(topic.name),
        )

    return Kind(topic.name, 1, _name(rule), make)


def exactly(topic: Topic, rule: Rule, asks: Words, setups: Setups, quantity: Quantity | None = None) -> Kind:
    """Return the kind of question that asks for the exact number beside a rule, in a drawn setup."""
    case = case_of(topic, rule)
    exact = case.exact
    assert exact is not None, rule.title.en

    def make(draw: Draw, language: str) -> Question:
        setup = setups(draw)
        asked = _asked(topic, case, setup, language)
        step: Step = exact(asked)
        unit = quantity or quantity_of(step.unit)
        return Question(
            topic=topic.name,
            level=3,
            kind=_name(rule),
            text=EXACTLY.said(language, asks=asks.said(language)),
            given=setup_of(asked.report, language),
            quantity=unit,
            answer=step.result,
            percent=percent_of(unit, PERCENT_OF_A_REPORT),
            hint=_RULE_SAYS.said(language, title=rule.title.said(language), differs=case.differs.said(language)),
            derivation=(compared(case, asked),),
            command=setup.command(topic.name),
            by_rule=put_in(rule, asked.report, language).result,
        )

    return Kind(topic.name, 3, _name(rule), make)


def case_of(topic: Topic, rule: Rule) -> Case:
    """Return the case of a topic that has a rule."""
    (found,) = (case for case in topic.cases if case.rule is rule)
    return found


def quantity_of(unit: str) -> Quantity:
    """Return what is asked for where a step has this unit."""
    found: Quantity = unit  # type: ignore[assignment]
    return found


def joined(sentences: tuple[str, ...], language: str) -> str:
    """Return sentences as one text, without the empty ones."""
    return ("" if language == "zh" else " ").join(sentence for sentence in sentences if sentence)


def _name(rule: Rule) -> str:
    return rule.title.en


def _asked(topic: Topic, case: Case, setup: Setup, language: str) -> Asked:
    return asked_in(topic, case, setup.model, setup.params, setup.options, language)


def _numbers(rule: Rule, asked: Asked) -> dict[str, int]:
    return values(rule.formula, asked.report) if letters_in(rule.formula) else {}
