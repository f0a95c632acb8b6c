"""Every kind of question: valid for any draw, in both languages, with the report's number."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from records import examples

import memcalc
from memcalc.explanation.letters import values
from memcalc.explanation.topics import TOPICS
from memcalc.explanation.words import Words
from memcalc.quiz.judged import judge
from memcalc.quiz.kinds import FILES, all_kinds
from memcalc.quiz.numbers import Draw
from memcalc.quiz.printed import answer_of, how
from memcalc.quiz.question import LEVELS, Kind, Question

KINDS = list(all_kinds())
each_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"{kind.topic} {kind.level}: {kind.name}")
SEEDS = range(5)


@cache
def made(kind: Kind, seed: object, language: str = "en") -> Question:
    return kind.make(Draw(f"{seed}"), language)


def test_a_file_has_the_kinds_of_its_topic() -> None:
    for name in FILES:
        assert {kind.topic for kind in FILES[name]} == {name}
    assert set(FILES) == set(TOPICS)


NEW = """
from memcalc.explanation.topics.adam import SIXTEEN, TOPIC
from memcalc.explanation.words import Words
from memcalc.quiz.numbers import sizes
from memcalc.quiz.of_cases import by_rule

KINDS = (by_rule(TOPIC, SIXTEEN, Words("how many?", "多少？"), sizes),)
"""


def test_a_new_kind_is_a_new_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from memcalc.quiz import kinds

    (tmp_path / "new_kind.py").write_text(NEW, encoding="utf-8")
    monkeypatch.setattr(kinds, "__path__", [*kinds.__path__, str(tmp_path)])
    assert "new-kind" in list(FILES)
    assert len(list(all_kinds())) == len(KINDS) + 1


def test_a_kind_has_a_name_of_its_own() -> None:
    names = [(kind.topic, kind.level, kind.name) for kind in KINDS]
    assert len(set(names)) == len(names)


def test_every_rule_has_a_question_of_the_first_level() -> None:
    asked = {(kind.topic, kind.name) for kind in KINDS if kind.level == 1}
    rules = {(name, case.rule.title.en) for name in TOPICS for case in TOPICS[name].cases}
    shared = {
        ("mixed-precision", "16 bytes per parameter with mixed precision"),  # the topic adam asks for it
        ("tensor-parallel", "The same with transformers' tp_plan and FSDP2"),  # the same formula
        ("mfu", "Utilisation: what is done over what could be"),  # a question of the second level
        ("cuda-context", "A context takes 0.3 to 1.3 GB"),  # measured, nothing to derive
    }
    assert rules - asked == shared


@pytest.mark.slow
@each_kind
def test_any_draw_is_a_valid_question(kind: Kind) -> None:
    """The answer as it is printed is right."""
    for seed in SEEDS:
        question, chinese = made(kind, seed), made(kind, seed, "zh")
        assert (question.topic, question.level) == (kind.topic, kind.level)
        assert (question.answer, question.command, question.quantity) == (
            chinese.answer, chinese.command, chinese.quantity,
        )  # fmt: skip
        assert isinstance(question.answer, bool) or question.answer > 0
        assert question.derivation[0].steps
        for each, language in ((question, "en"), (chinese, "zh")):
            for text in (each.text, each.given, each.hint, how(each, language), answer_of(each, language)):
                assert not set("{}") & set(text), text
            for part in answer_of(each, language).split(" = "):
                assert judge(each, part).right, (part, each.answer)
        assert not is_chinese(question.text + question.given + question.hint)
        assert is_chinese(chinese.text) and is_chinese(chinese.hint)
        assert question.percent == (
            0 if question.quantity in ("gpus", "micro-batches", "truth") else 2 + kind.level // 3
        )


def is_chinese(text: str) -> bool:
    return any("\u4e00" <= letter <= "\u9fff" for letter in text)


@each_kind
def test_the_derivation_ends_in_the_answer(kind: Kind) -> None:
    question = made(kind, 0)
    results = [step.result for section in question.derivation for step in section.steps]
    if kind.name.startswith("total of "):
        assert sum(results) == question.answer
    elif question.quantity != "truth" and not (kind.level == 2 and question.quantity in ("gpus", "micro-batches")):
        assert results[-1] == question.answer


@pytest.mark.slow
@each_kind
def test_the_command_explains_it(kind: Kind, capsys: pytest.CaptureFixture[str]) -> None:
    from command import here

    question = made(kind, 3)
    program, *arguments = shlex.split(question.command)
    of_an_estimate = kind.name.startswith("total of ")
    assert program == "memcalc"
    assert arguments[0] == "explain"
    assert arguments[1] == ("--model" if of_an_estimate else kind.topic)
    ran = here(capsys, *arguments, "--lang", "en", "--json")
    assert (ran.status, ran.stderr) == (0, "")
    if of_an_estimate:
        assert (
            f"{question.answer:,}" in here(capsys, *arguments, "--lang", "en").stdout
            or len(question.derivation[0].steps) == 1
        )
    elif kind.level != 2 and len(arguments) > 2:
        found = [step["result"] for section in json.loads(ran.stdout)["sections"] for step in section["steps"]]
        assert question.answer in found


# --- numbers computed another way: options read off the command, and the report asked


def setup_of(question: Question) -> dict[str, Any]:
    words = iter(shlex.split(question.command)[3:])
    options: dict[str, Any] = {}
    for flag in words:
        value = next(words)
        options[flag.removeprefix("--").replace("-", "_")] = int(value) if value.isdigit() else value
    return options


def of(topic: str, level: int, words: str) -> Kind:
    (found,) = (kind for kind in KINDS if (kind.topic, kind.level) == (topic, level) and words in kind.name)
    return found


seeds = given(st.integers(0, 10**6))
quick = settings(max_examples=examples(15), deadline=None)


@quick
@seeds
@pytest.mark.parametrize("stage", [2, 3])
def test_the_states_of_zero(stage: int, seed: int) -> None:
    question = made(of("zero", 3, f"ZeRO-{stage}: "), seed)
    report = memcalc.estimate(**setup_of(question), zero=stage, engine="deepspeed")
    assert question.answer == sum(report.total(name) for name in ("parameters", "gradients", "optimizer_states"))


@quick
@seeds
def test_totals_of_a_component(seed: int) -> None:
    for topic, component in (("adam", "optimizer_states"), ("mixed-precision", "parameters"), ("moe", "parameters")):
        question = made(of(topic, 3, "total of"), seed)
        flags = shlex.split(question.command.replace("explain --", "explain topic --"))[3:]
        values = [int(value) if value.isdigit() else value for value in flags[1::2]]
        options = dict(zip((flag.removeprefix("--") for flag in flags[::2]), values, strict=True))
        assert question.answer == memcalc.estimate(**options).total(component)


@quick
@seeds
def test_what_zero_3_sends(seed: int) -> None:
    question = made(of("zero", 3, "ZeRO-3 sends"), seed)
    report = memcalc.estimate(**setup_of(question), zero=3, engine="deepspeed")
    assert question.answer == sum(c.wire for c in report.collectives if c.axis == "dp")


@quick
@seeds
def test_states_by_the_rule(seed: int) -> None:
    for words, per_parameter in (("16 bytes per parameter with mixed", 16), ("16 bytes per parameter in fp32", 16)):
        question = made(of("adam", 1, words), seed)
        assert question.answer == per_parameter * memcalc.estimate(**setup_of(question)).model.num_parameters


@quick
@seeds
def test_bytes_by_the_rules_of_optimizers(seed: int) -> None:
    for words, optimizer in (("SGD: 8", "sgd"), ("SGD with", "sgd-momentum"), ("16 bytes", "adamw")):
        question = made(of("optimizers", 1, words), seed)
        report = memcalc.estimate(**setup_of(question), optimizer=optimizer, precision="fp32")
        assert question.answer == sum(report.total(name) for name in ("parameters", "gradients", "optimizer_states"))


@quick
@seeds
def test_activations_by_korthikanti(seed: int) -> None:
    question = made(of("activations", 1, "(34 + 5as/h)"), seed)
    report = memcalc.estimate(**setup_of(question))
    letters = values("s·b·h·a·L", report)
    s, b, h, a, layers = (letters[name] for name in "sbhaL")
    assert question.answer == s * b * layers * (34 * h + 5 * a * s)


@quick
@seeds
def test_the_fewest_gpus(seed: int) -> None:
    question = made(of("zero", 2, "fewest"), seed)
    phi = int(question.given.split("Φ = ")[1].split(" ")[0].replace(",", ""))
    room = int(question.text.split(" GB")[0].rsplit(" ", 1)[1]) * 10**9
    answer = int(question.answer)
    assert answer % 8 == 0
    assert 16 * phi / answer <= room
    assert answer == 8 or 16 * phi / (answer - 8) > room


@quick
@seeds
def test_whether_it_fits(seed: int) -> None:
    question = made(of("adam", 2, "fits"), seed)
    phi = int(question.given.split("Φ = ")[1].split(" ")[0].replace(",", ""))
    room = int(question.text.split(" GB")[0].rsplit(" ", 1)[1]) * 10**9
    assert question.answer is (16 * phi <= room)
    assert abs(16 * phi - room) > 0.04 * room


@quick
@seeds
def test_micro_batches_of_a_small_bubble(seed: int) -> None:
    question = made(of("bubble", 2, "fewest"), seed)
    stages = int(question.text.split("with ")[1].split(" ")[0])
    share = int(question.text.split(" %")[0].rsplit(" ", 1)[1]) / 100
    answer = int(question.answer)
    assert (stages - 1) / answer <= share < (stages - 1) / (answer - 1)


@quick
@seeds
def test_mfu_by_throughput(seed: int) -> None:
    question = made(of("mfu", 2, "MFU"), seed)
    numbers = [int(word.replace(",", "")) for word in question.text.split() if word.replace(",", "").isdigit()]
    phi, rate, peak = numbers[:3]
    assert question.answer == pytest.approx(6 * phi * rate / (peak * 1e12))
    assert 0.2 < question.answer < 0.6


def test_levels_have_both_languages() -> None:
    def texts() -> Iterator[Words]:
        yield from LEVELS.values()

    assert all(is_chinese(words.zh) and not is_chinese(words.en) for words in texts())
