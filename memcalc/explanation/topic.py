"""A topic: what it is, the rules of thumb that people quote about it, and the exact number beside each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from memcalc.errors import InputError
from memcalc.estimation.estimate import estimate
from memcalc.estimation.sizing import DECIDES
from memcalc.explanation.arithmetic import evaluated, with_numbers
from memcalc.explanation.defaults import completed
from memcalc.explanation.letters import LETTERS, letters_in, meanings, parameters_of, values
from memcalc.explanation.step import Section, Step, Unit
from memcalc.explanation.words import Words
from memcalc.formats.given import with_files
from memcalc.inputs.model import load_model
from memcalc.inputs.options import check_options, option_name
from memcalc.units import show_count

if TYPE_CHECKING:
    from memcalc.estimation.report import Report

Number = int | float


FORMULA: Final = " (formula)"
"""The end of a source that has the formula or its terms, but does not print the value."""


class Quoted(NamedTuple):
    """An example of a rule: its numbers, its value, how far the source's rounding is from the formula, and the source."""

    numbers: Mapping[str, Number]
    value: Number
    within: Number
    source: str

    @property
    def published(self) -> bool:
        """Return True if the source prints the value."""
        return not self.source.endswith(FORMULA)


@dataclass(frozen=True)
class Rule:
    """A formula that people quote, in the letters of `memcalc.explanation.letters`."""

    title: Words
    formula: str
    unit: Unit
    counts: Words
    leaves_out: Words
    quoted: Quoted

    def value(self, numbers: Mapping[str, Number]) -> Number:
        """Return the formula's value for these numbers: an integer if it counts something."""
        exact = evaluated(self.formula, numbers)
        return float(exact) if self.unit in ("ratio", "seconds") else round(exact)

    def step(self, what: str, numbers: Mapping[str, Number], source: str = "") -> Step:
        """Return the formula with these numbers put in."""
        return Step(what, self.formula, with_numbers(self.formula, numbers), self.value(numbers), self.unit, "", source)


class Asked(NamedTuple):
    """A setup that a rule is compared in, and the way to others that differ from it."""

    report: Report
    again: Callable[..., Report]
    """The function that estimates the setup with other options."""
    language: str


Exact = Callable[[Asked], Step]
"""A function that reads the exact number off a report."""


@dataclass(frozen=True)
class Case:
    """A rule beside the exact number, in the reader's setup with these options."""

    rule: Rule
    exact: Exact | None
    """None if memcalc has no such engine, or if the rule needs a measurement."""
    differs: Words
    """The reason why the exact number differs, or why there is none."""
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    apart: Callable[[Asked], tuple[Step, ...]] = lambda _: ()
    """Returns what exists besides and is no part of the comparison, each with its own name."""


@dataclass(frozen=True)
class Topic:
    """A page of explanation. `model` and `options` are used if the reader gives none."""

    name: str
    title: Words
    summary: Words
    text: tuple[Words, ...]
    cases: tuple[Case, ...]
    model: str | Mapping[str, Any] = "llama-7b"
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    micro_batches: int = 1
    beside: Callable[[Asked], Section] | None = None
    """Returns a section that compares the setup with others. It is the last one."""

    def completed(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the reader's options, completed by the topic's own."""
        return completed(self.options, given, self.micro_batches)


EXAMPLE: Final = Words("for example", "举例")
PUBLISHED: Final = Words("as published", "已发表的数值")
HERE: Final = Words("the rule for {setup}", "代入 {setup}")
WHERE: Final = Words("Letters: {letters}.", "符号：{letters}。")
COUNTS: Final = Words("It counts: {words}", "计入：{words}")
LEAVES_OUT: Final = Words("It leaves out: {words}", "未计入：{words}")
DIFFERS: Final = Words(
    "The exact number is {times:.4f} times the rule's. {words}", "精确值是经验法则的 {times:.4f} 倍。{words}"
)
AGREES: Final = Words("The rule and the exact number agree.", "经验法则与精确值一致。")
_MEASURED: Final = {
    "F": Words("FLOP that a GPU does in a second", "一张 GPU 每秒完成的 FLOP"),
    "P": Words("FLOP that it could do", "该 GPU 的峰值 FLOP/s"),
}
"""Letters whose values no setup has."""
_FORMULA: Final = Words(" (the formula; the numbers are an example)", "（公式出处；数值是示例）")
_AGREE: Final = 1e-4
NOT_HERE: Final = Words("No exact number for this setup: {error}", "该设置没有精确值：{error}")


def sections_of(
    topic: Topic, model: Any, params: Any, options: Mapping[str, Any], language: str
) -> tuple[Section, ...]:
    """Return a topic's text, a section for each rule, and the comparison with other setups if the topic has one.

    Raise InputError if an option or the model is wrong, or if no rule applies to the given setup."""
    model, options, _ = with_files(model, dict(options))
    check_options(dict(options))
    if model is not None:
        model = load_model(model)
    text = tuple(words.said(language) for words in topic.text)
    sections = [Section(topic.title.said(language), (), text)]
    errors: list[InputError] = []
    fitting: list[Case] = []
    for case in topic.cases:
        try:
            sections.append(_compared(topic, case, model, params, options, language))
            fitting.append(case)
        except InputError as error:
            errors.append(error)
            sections.append(_quoted_alone(case.rule, NOT_HERE.said(language, error=error), language))
    if topic.cases and not fitting:
        raise InputError(f"explain {topic.name}: {_why_none(topic, params, options, errors[0])}")
    if topic.beside is not None:
        sections.append(topic.beside(asked_in(topic, fitting[0], model, params, options, language)))
    return tuple(sections)


def _why_none(topic: Topic, params: Any, options: Mapping[str, Any], error: InputError) -> str:
    """Return the reason why no rule applies to the given setup, with the options that the topic has added."""
    if params is not None and not str(error).startswith("--params "):
        return f"--params {params}: has model states alone, and the topic is about more; allowed: --model"
    chosen = topic.completed(options)
    own = [f"{option_name(name)} {value}" for name, value in chosen.items() if name not in options]
    return f"{error} (the topic's own: {', '.join(own)})" if own and options else str(error)


def _compared(topic: Topic, case: Case, model: Any, params: Any, options: Mapping[str, Any], language: str) -> Section:
    if not is_told(case.rule):
        section = _quoted_alone(case.rule, case.differs.said(language), language)
        if case.exact is None:
            return section
        exact = case.exact(asked_in(topic, case, model, params, options, language))
        return section._replace(steps=(*section.steps, exact))
    return compared(case, asked_in(topic, case, model, params, options, language))


def is_told(rule: Rule) -> bool:
    """Return True if a setup has a number for every letter of a rule."""
    return all(letter in LETTERS for letter in letters_in(rule.formula))


def asked_in(topic: Topic, case: Case, model: Any, params: Any, options: Mapping[str, Any], language: str) -> Asked:
    """Return the setup of a case: the given model and options, and the topic's own for the others."""
    chosen = {} if params is not None else {"model": topic.model if model is None else model}
    own = {**topic.completed(options), **case.options}
    if params is not None:  # the topic's and the case's own options may be about more than model states
        own = {name: value for name, value in own.items() if name in options or name in DECIDES}

    def again(**changes: Any) -> Report:
        return estimate(**chosen, params=params, **{**own, **changes})

    return Asked(again(), again, language)


def put_in(rule: Rule, report: Report, language: str) -> Step:
    """Return a rule with the numbers of a setup."""
    return rule.step(HERE.said(language, setup=_named(report, language)), values(rule.formula, report))


def compared(case: Case, asked: Asked) -> Section:
    """Return a rule where it is published and in a setup, and the exact number of that setup if there is one."""
    rule, language = case.rule, asked.language
    here = put_in(rule, asked.report, language)
    steps = (_quoted(rule, language), *([here] if letters_in(rule.formula) else []))
    if case.exact is None:
        return Section(rule.title.said(language), steps, (*said_of(rule, language), case.differs.said(language)))
    exact = case.exact(asked)
    words = _beside(here.result, exact.result, case.differs, language)
    return Section(rule.title.said(language), (*steps, exact, *case.apart(asked)), (*said_of(rule, language), words))


def _beside(rule: Number, exact: Number, differs: Words, language: str) -> str:
    """Return whether two numbers agree, to a part in ten thousand, or how and why they do not."""
    if abs(exact - rule) <= _AGREE * abs(exact):
        return AGREES.said(language)
    times = exact / rule if rule else float("inf")
    return DIFFERS.said(language, times=times, words=differs.said(language))


_PARAMETERS: Final = Words("{count} parameters", "{count} 个参数")
_GPUS: Final = Words("{gpus} GPUs", "{gpus} 张 GPU")


def _named(report: Report, language: str) -> str:
    """Return a model and the options that decide its layout."""
    setup = report.setup
    degrees = [f"{name} {getattr(setup, name)}" for name in ("tp", "pp", "cp", "ep") if getattr(setup, name) > 1]
    zero = [f"ZeRO {setup.zero}"] if setup.zero or setup.engine == "deepspeed" else []
    engine = [] if setup.engine == "none" else [setup.engine]
    gpus = [_GPUS.said(language, gpus=setup.gpus)] if setup.gpus > 1 else []
    count = _PARAMETERS.said(language, count=show_count(parameters_of(report)))
    name = f"{report.model.name} ({count})" if report.model.name else count
    return ", ".join([name, *gpus, *engine, *zero, *degrees, setup.precision])


def _quoted_alone(rule: Rule, words: str, language: str) -> Section:
    return Section(rule.title.said(language), (_quoted(rule, language),), (*said_of(rule, language), words))


def _quoted(rule: Rule, language: str) -> Step:
    words = PUBLISHED if rule.quoted.published else EXAMPLE
    quoted = rule.quoted
    source = quoted.source if quoted.published else quoted.source.removesuffix(FORMULA) + _FORMULA.said(language)
    return rule.step(words.said(language), quoted.numbers, source)


def said_of(rule: Rule, language: str) -> tuple[str, ...]:
    """Return the sentences about a rule: its letters, what it counts, what it leaves out."""
    letters = letters_in(rule.formula)
    where = (WHERE.said(language, letters=meanings(letters, language, _MEASURED)),) if letters else ()
    counts = COUNTS.said(language, words=rule.counts.said(language))
    return (*where, counts, LEAVES_OUT.said(language, words=rule.leaves_out.said(language)))
