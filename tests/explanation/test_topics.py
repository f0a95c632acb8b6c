"""Topics: their rules have the published values, both languages say the same, and exact numbers are the report's."""

from __future__ import annotations

import string
from importlib import import_module
from pkgutil import iter_modules
from types import ModuleType
from typing import Any

import pytest
from crossed import crossed

import memcalc
from memcalc import explanation
from memcalc.errors import InputError
from memcalc.explanation import topics
from memcalc.explanation.letters import LETTERS, letters_in
from memcalc.explanation.step import Section
from memcalc.explanation.topic import Rule, sections_of
from memcalc.explanation.topics import TOPICS, activations, adam, ddp, mfu, sequence_parallel, tensor_parallel, zero
from memcalc.explanation.words import LANGUAGES, Words
from memcalc.inputs.model import model_names
from memcalc.timing.step import StepTime

NAMES = [
    "adam",
    "mixed-precision",
    "zero",
    "zero-plus-plus",
    "offload",
    "ddp",
    "fsdp",
    "fsdp1",
    "activations",
    "recompute",
    "activation-offload",
    "tensor-parallel",
    "tensor-parallel-dims",
    "sequence-parallel",
    "context-parallel",
    "pipeline",
    "bubble",
    "pipedream",
    "chimera",
    "dualpipe",
    "zbv",
    "packing",
    "moe",
    "ring-allreduce",
    "gradient-compression",
    "data-parallel",
    "parameter-server",
    "mfu",
    "cuda-context",
    "batch-and-sequence",
    "optimizers",
    "muon",
    "trillion",
    "encoder-decoder-stages",
    "lora",
    "qlora",
    "frozen-axes",
    "megatron-lora",
    "fp8",
    "convolution",
    "batch-norm",
    "lstm",
    "kv-cache",
    "paged-attention",
    "grpo",
    "ppo",
]


def modules() -> list[ModuleType]:
    found = [import_module(f"memcalc.explanation.{each.name}") for each in iter_modules(explanation.__path__)]
    return found + [import_module(f"memcalc.explanation.topics.{each.name}") for each in iter_modules(topics.__path__)]


def words_in(value: Any, seen: set[int]) -> list[Words]:
    """Every text of a value: of topics, rules, places, and of what holds them."""
    if isinstance(value, Words):
        return [value]
    if id(value) in seen or isinstance(value, (str, type, ModuleType)):
        return []
    seen.add(id(value))
    if isinstance(value, dict):
        return [words for each in value.values() for words in words_in(each, seen)]
    if isinstance(value, (tuple, list)):
        return [words for each in value for words in words_in(each, seen)]
    if type(value).__module__.startswith("memcalc.explanation") and hasattr(value, "__dataclass_fields__"):
        return [words for name in value.__dataclass_fields__ for words in words_in(getattr(value, name), seen)]
    return []


def every_text() -> list[Words]:
    seen: set[int] = set()
    return [words for module in modules() for value in vars(module).values() for words in words_in(value, seen)]


def placeholders(text: str) -> set[str]:
    return {name for _, name, _, _ in string.Formatter().parse(text) if name is not None}


def is_chinese(text: str) -> bool:
    return any("\u4e00" <= letter <= "\u9fff" for letter in text)


def rules() -> list[Rule]:
    return list({case.rule.title.en: case.rule for name in TOPICS for case in TOPICS[name].cases}.values())


def test_every_topic_that_was_asked_for_is_there() -> None:
    assert sorted(TOPICS) == sorted(NAMES)
    for name in TOPICS:
        assert TOPICS[name].name == name


def test_every_text_is_in_both_languages() -> None:
    texts = every_text()
    assert len(texts) > 300
    for words in texts:
        assert placeholders(words.en) == placeholders(words.zh), words
        assert words.en
        assert not is_chinese(words.en), words
        letters = words.en.lower().replace("{", "").replace("}", "")
        assert is_chinese(words.zh) or len(letters) < 40, words


def test_a_text_without_its_translation_is_noticed() -> None:
    missing = Words("{n} rows", "{m} 行")
    assert placeholders(missing.en) != placeholders(missing.zh)
    assert not is_chinese("rows")


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule.title.en)
def test_the_example_of_a_rule_has_its_value(rule: Rule) -> None:
    found = rule.value(rule.quoted.numbers)
    assert abs(found - rule.quoted.value) <= rule.quoted.within
    assert set(rule.quoted.numbers) == set(letters_in(rule.formula))
    assert rule.quoted.within <= 0.02 * rule.quoted.value
    assert rule.quoted.source
    assert rule.quoted.within == 0 or rule.quoted.published or rule.unit == "ratio"


PRINTED = {
    "ZeRO, arXiv 1910.02054, section 3.1": 24e9,
    "ZeRO, arXiv 1910.02054, table 1": 31.4e9,
    "arXiv 2104.04473, table 1": 3072,
    "PowerSGD, arXiv 1905.13727": 461,
    "arXiv 2104.04473, section 5.1": 0.52,
    "ZeRO, arXiv 1910.02054, section 1": 16e12,
    "Distributed Optimizer": 18,
    "Model training anatomy": 1343 * 2**20,
    "Convolutional Networks, parameter sharing": 34_944,
    "Convolutional Networks, spatial arrangement": 55,
    "Convolutional Networks, layer patterns": 7,
    "FlexGen, arXiv 2303.06865, section 3": 1.2 * 2**40,
}
"""The end of a source, and a number that stands there."""


@pytest.mark.parametrize(("source", "value"), PRINTED.items())
def test_a_value_that_is_called_published_stands_in_its_source(source: str, value: float) -> None:
    found = [rule.quoted for rule in rules() if rule.quoted.source.endswith(source) and rule.quoted.published]
    assert value in [quoted.value for quoted in found]


def test_only_these_values_are_called_published() -> None:
    published = [rule.quoted.source for rule in rules() if rule.quoted.published]
    assert all(source.endswith(tuple(PRINTED)) for source in published)
    assert len(published) < len(rules()) / 3


def test_seven_billion_parameters_are_112_gb() -> None:
    assert adam.SIXTEEN.value({"Φ": 7e9}) == 112 * 10**9
    assert ddp.FP32_BUCKETS.value({"Φ": 1}) == 20
    assert ddp.MIXED_BUCKETS.value({"Φ": 1}) == 18


@pytest.mark.parametrize(
    ("parameters", "ranks", "published"),
    [
        (7.5e9, 4, (52.5, 41.3, 30)), (7.5e9, 16, (35.6, 21.6, 7.5)), (7.5e9, 64, (31.4, 16.6, 1.88)),
        (7.5e9, 256, (30.4, 15.4, 0.47)), (7.5e9, 1024, (30.1, 15.1, 0.12)),
        (128e9, 64, (536, 284, 32)), (1e12, 1024, (4011, 2013, 15.6)),
    ],
)  # fmt: skip
def test_the_table_of_the_zero_paper(parameters: float, ranks: int, published: tuple[float, ...]) -> None:
    for rule, gigabytes in zip((zero.STAGE_1, zero.STAGE_2, zero.STAGE_3), published, strict=True):
        found = rule.value({"Φ": parameters, "n": ranks}) / 1e9
        assert found == pytest.approx(gigabytes, rel=0.003, abs=0.051 if gigabytes > 1 else 0.005)


def test_the_22b_model_of_korthikanti() -> None:
    """Table 3's 22B model in table 2's formulas: 59.25 GiB with tensor parallelism alone, 9.5625 with sequence parallelism
    and selective recomputation."""
    numbers = {"s": 2048, "b": 4, "h": 6144, "L": 48, "t": 8}
    scores = activations.EAGER.value(numbers | {"a": 64}) - activations.FLASH.value(numbers)
    assert (tensor_parallel.SAVED.value(numbers) + scores / 8) / 2**30 == 59.25
    assert sequence_parallel.SAVED.value(numbers) / 2**30 == 9.5625


def test_the_gpt_of_a_trillion_parameters_does_163_teraflops() -> None:
    """Narayanan et al.: 52 % of an A100's 312 TFLOP/s; 96 instead of 72 with recomputation."""
    assert mfu.UTILISATION.value({"F": 163e12, "P": 312e12}) == pytest.approx(0.52, abs=0.005)
    numbers = {"b": 1, "m": 1, "L": 128, "s": 2048, "h": 25600, "V": 51200}
    per_token = mfu.GPT.value(numbers) / 2048 / 1.008e12
    assert per_token == pytest.approx(6, rel=0.02)


def test_mfu_is_that_of_the_estimated_step() -> None:
    options = {"engine": "fsdp2", "gpus": 8, "gpu": "h100-80gb"}
    *_, section = sections_of(TOPICS["mfu"], "llama-7b", None, options, "en")
    time = memcalc.estimate("llama-7b", **options).time
    assert isinstance(time, StepTime)
    assert exact_of(section) == time.mfu


def test_mfu_is_not_told_where_the_time_is_not_known() -> None:
    *_, section = sections_of(
        TOPICS["mfu"], "llama-7b", None, {"optimizer": "muon", "precision": "fp16", "gpu": "t4"}, "en"
    )
    assert "no known rate for bf16" in section.text[-1]
    assert not [step for step in section.steps if "memcalc" in step.what]


def test_every_letter_is_explained() -> None:
    measured = {"F", "P"}
    for rule in rules():
        assert set(letters_in(rule.formula)) <= set(LETTERS) | measured, rule.formula


@pytest.mark.parametrize(("name", "language"), crossed(NAMES, LANGUAGES))
def test_a_topic_has_an_exact_number_beside_every_rule(name: str, language: str) -> None:
    topic = TOPICS[name]
    first, *sections = sections_of(topic, None, None, {}, language)
    assert first.text
    assert len(sections) == len(topic.cases) + (topic.beside is not None)
    for section, case in zip(sections, topic.cases, strict=False):
        exact = [step for step in section.steps if "memcalc" in step.what]
        assert len(exact) == (0 if case.exact is None else 1), section


def exact_of(section: Section) -> int | float:
    (found,) = (step.result for step in section.steps if "memcalc" in step.what)
    return found


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_exact_states_are_the_reports(stage: int) -> None:
    sections = sections_of(TOPICS["zero"], "qwen3-0.6b", None, {"gpus": 16}, "en")
    report = memcalc.estimate("qwen3-0.6b", gpus=16, zero=stage, engine="deepspeed")
    parts = (report.total(name) for name in ("parameters", "gradients", "optimizer_states"))
    assert exact_of(sections[stage]) == sum(parts)


def test_the_exact_bytes_sent_are_the_reports() -> None:
    sections = sections_of(TOPICS["zero"], "qwen3-0.6b", None, {"gpus": 16}, "en")
    report = memcalc.estimate("qwen3-0.6b", gpus=16, zero=3, engine="deepspeed")
    assert exact_of(sections[5]) == sum(c.wire for c in report.collectives)


def test_states_alone_are_enough_for_zeros_memory() -> None:
    sections = sections_of(TOPICS["zero"], None, "7.5B", {"gpus": 64}, "en")
    assert [exact_of(section) / 1e9 for section in sections[1:4]] == [31.40625, 16.640625, 1.875]


def test_a_topics_own_model_does_not_have_the_name_of_another() -> None:
    """Fields without a name are called by their type, which may be a bundled model's name, too: gpt2."""
    for name in TOPICS:
        model = memcalc.load_model(TOPICS[name].model)
        named = model.name in model_names()
        assert not named or model.num_parameters == memcalc.load_model(model.name).num_parameters, name


@pytest.mark.parametrize(
    ("name", "params", "options", "words"),
    [
        ("activations", "7B", {}, "--params 7B"),
        ("pipeline", None, {"gpus": 0}, "--gpus 0"),
        ("moe", None, {"ep": "x"}, "--ep"),
        ("tensor-parallel", None, {"tp": 7}, "--tp 7"),
    ],
)
def test_a_setup_that_no_rule_is_about_is_refused(
    name: str, params: str | None, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(InputError, match=words):
        sections_of(TOPICS[name], None, params, options, "en")


def test_an_unknown_model_is_refused_by_every_topic() -> None:
    for name in TOPICS:
        with pytest.raises(InputError, match="no-such-model"):
            sections_of(TOPICS[name], "no-such-model", None, {}, "en")


def test_a_topic_of_layouts_takes_a_bare_number_of_parameters() -> None:
    """The topic's own recomputation and batch are no options of model states, and are left out."""
    sections = sections_of(TOPICS["trillion"], None, "1T", {}, "en")
    exact = [step.result for section in sections for step in section.steps if step.what.startswith("memcalc, exactly")]
    assert 3072 in exact
    assert 16 * 10**12 in exact
