"""The derivation of a report: its steps add up to the report's totals, and each formula's numbers are its result."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from records import examples

import memcalc
from memcalc.core.rows import COMPONENTS
from memcalc.errors import InputError
from memcalc.explanation.arithmetic import evaluated
from memcalc.explanation.communication import ON_THE_WIRE, TEXTBOOK
from memcalc.explanation.communication import TITLE as SENT
from memcalc.explanation.compute import TITLE as COMPUTE
from memcalc.explanation.derivation import derive
from memcalc.explanation.memory import TITLES
from memcalc.explanation.peak import DEVICE
from memcalc.explanation.peak import TITLE as PEAK
from memcalc.explanation.step import Section
from memcalc.explanation.words import LANGUAGES

EXAMPLES = settings(
    max_examples=examples(25), deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)

LLAMA = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 512, "max_position_embeddings": 256,
}  # fmt: skip
GPT2 = {"model_type": "gpt2", "n_embd": 64, "n_layer": 4, "n_head": 8, "n_positions": 64, "vocab_size": 512}
MIXTRAL = {**LLAMA, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}

LAYOUTS: tuple[dict[str, Any], ...] = (
    {},
    {"gpus": 4},
    {"gpus": 4, "zero": 1},
    {"gpus": 4, "zero": 2},
    {"gpus": 4, "zero": 3},
    {"gpus": 4, "zero": 3, "engine": "fsdp2"},
    {"gpus": 4, "zero": 2, "engine": "fsdp2"},
    {"gpus": 4, "tp": 2},
    {"gpus": 4, "tp": 2, "zero": 1},
    {"gpus": 4, "pp": 2, "global_batch_size": 8},
    {"gpus": 4, "pp": 2, "zero": 3, "engine": "fsdp2", "global_batch_size": 8},
    {"gpus": 4, "pp": 2, "zero": 1, "engine": "deepspeed", "global_batch_size": 8},
    {"gpus": 2, "cp": 2},
    {"gpus": 4, "ep": 2},
)


def total(section: Section) -> int | float:
    return sum(step.result for step in section.steps)


def by_title(sections: tuple[Section, ...]) -> dict[str, Section]:
    found = {section.title: section for section in sections}
    assert len(found) == len(sections)
    return found


@st.composite
def setups(draw: st.DrawFn) -> dict[str, Any]:
    layout = draw(st.sampled_from(LAYOUTS))
    own = {
        "optimizer": draw(st.sampled_from(("adamw", "sgd", "sgd-momentum", "lion"))),
        "precision": draw(st.sampled_from(("bf16-mixed", "fp32", "bf16-mixed"))),
        "recompute": draw(st.sampled_from(("none", "full"))),
        "seq_len": draw(st.sampled_from((16, 64))),
    }
    if "global_batch_size" not in layout:
        own["micro_batch_size"] = draw(st.integers(1, 3))
    return {**own, **layout}


@EXAMPLES
@given(model=st.sampled_from((LLAMA, GPT2, MIXTRAL)), options=setups(), language=st.sampled_from(LANGUAGES))
def test_the_steps_add_up_to_the_reports_totals(model: dict[str, Any], options: dict[str, Any], language: str) -> None:
    try:
        report = memcalc.estimate(model, **options)
    except InputError:
        return
    sections = by_title(derive(report, language))
    for component in COMPONENTS:
        section = sections.pop(TITLES[component].said(language), None)
        assert (0 if section is None else total(section)) == report.total(component)
    assert total(sections.pop(PEAK.said(language))) == report.peak
    assert total(sections.pop(DEVICE.said(language))) == report.device
    assert total(sections.pop(COMPUTE.said(language))) == report.flops["total"]
    if report.collectives:
        assert total(sections.pop(ON_THE_WIRE.said(language))) == sum(c.wire for c in report.collectives)
    if report.textbook:
        assert total(sections.pop(TEXTBOOK.said(language))) == sum(c.payload for c in report.textbook)
    sent = SENT.said(language, axis="").strip()[:6]
    assert all(sent[:2] in title for title in sections)
    assert sum(map(total, sections.values())) == sum(c.payload for c in report.collectives)


def numbers_of(text: str) -> str:
    return text.removesuffix(" B").removesuffix(" FLOP").replace(" B", "")


@EXAMPLES
@given(model=st.sampled_from((LLAMA, GPT2, MIXTRAL)), options=setups())
def test_the_numbers_of_a_step_are_its_result(model: dict[str, Any], options: dict[str, Any]) -> None:
    try:
        report = memcalc.estimate(model, **options)
    except InputError:
        return
    for section in derive(report):
        for step in section.steps:
            if step.numbers:
                found = evaluated(numbers_of(step.numbers))
                assert abs(found - step.result) < 1 + len(report.collectives), (section.title, step)


def test_every_row_is_in_a_step_and_few_steps_are_enough() -> None:
    report = memcalc.estimate("llama-7b", zero=3, gpus=8)
    sections = derive(report)
    assert sum(len(section.steps) for section in sections) < len(report.items) + len(report.overheads)
    assert max(len(section.steps) for section in sections) <= 10


def test_a_layers_equal_rows_are_one_formula() -> None:
    report = memcalc.estimate("llama-7b")
    weights = by_title(derive(report))["Weights"].steps[0]
    assert weights.formula == "layers·(2·ffn·hidden + hidden·ffn)·2 B"
    assert weights.numbers == "32·(2·11008·4096 + 4096·11008)·2 B"
    assert weights.result == 3 * 32 * 11008 * 4096 * 2
    assert weights.why
    assert weights.source


def test_model_states_alone_have_no_activations_and_no_gpu() -> None:
    sections = by_title(derive(memcalc.estimate(params="7B", gpus=8, zero=1)))
    assert list(sections) == ["Weights", "Gradients", "Optimizer states", "Peak: what is alive at once"]


@pytest.mark.parametrize("zero", [1, 3])
def test_the_textbook_is_beside_what_the_engine_does(zero: int) -> None:
    report = memcalc.estimate("llama-7b", zero=zero, gpus=8)
    section = by_title(derive(report))[TEXTBOOK.said("en")]
    assert total(section) == sum(c.payload for c in report.textbook)
    assert section.text


@pytest.mark.parametrize("language", LANGUAGES)
def test_a_gpu_gets_an_answer(language: str) -> None:
    report = memcalc.estimate("llama-7b", gpu="a100-80gb")
    text = " ".join(by_title(derive(report, language))[DEVICE.said(language)].text)
    assert "a100-80gb" in text


def test_rows_are_named_once_and_by_their_weights() -> None:
    sections = derive(memcalc.estimate(LLAMA, gpus=4, tp=2, seq_len=16, engine="megatron"), "en")
    gradients, states = (by_title(sections)[TITLES[name].en] for name in ("gradients", "optimizer_states"))
    assert "MLP: mlp.linear_fc1, mlp.linear_fc2" in [step.what for step in gradients.steps]
    assert "output head: output_layer" in [step.what for step in gradients.steps]
    assert all(step.what.count("exp_avg") <= 1 for step in states.steps)
