"""`memcalc explain`."""

from __future__ import annotations

import json

import pytest
from command import LONG, check_refused, here, program

import memcalc
from memcalc.explanation.topics import TOPICS

WIDTHS = (20, 40, 60, 100, 200)


@pytest.fixture(autouse=True)
def english(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LC_ALL", "LC_MESSAGES", "LANG"):
        monkeypatch.delenv(name, raising=False)


def test_a_model_is_derived(capsys: pytest.CaptureFixture[str]) -> None:
    ran = here(capsys, "explain", "--model", "llama-7b", "--zero", "3", "--gpus", "8")
    assert (ran.status, ran.stderr) == (0, "")
    report = memcalc.estimate("llama-7b", zero=3, gpus=8)
    for number in (report.total("parameters"), report.total("saved_activations"), report.peak):
        assert f"{number:,}" in ran.stdout
    assert "layers·4·batch·seq·ffn·2 B" in ran.stdout
    assert "\x1b" not in ran.stdout


@pytest.mark.parametrize("arguments", [("llama-7b",), ("-m", "llama-7b")])
def test_a_models_name_is_as_good_as_a_topic(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    ran = here(capsys, "explain", *arguments)
    assert ran.stdout.startswith("llama-7b")
    assert ran.stdout == here(capsys, "explain", "--model", "llama-7b").stdout


def test_a_topic_with_and_without_a_setup(capsys: pytest.CaptureFixture[str]) -> None:
    plain = here(capsys, "explain", "zero")
    assert (plain.status, plain.stderr) == (0, "")
    assert "llama-7b" in plain.stdout
    assert "31.4 GB" in plain.stdout
    own = here(capsys, "explain", "zero", "--model", "qwen3-0.6b", "--gpus", "16")
    assert "qwen3-0.6b" in own.stdout
    assert "16 GPUs" in own.stdout
    assert own.stdout == here(capsys, "explain", "zero", "qwen3-0.6b", "--gpus", "16").stdout


def test_the_list_has_every_topic(capsys: pytest.CaptureFixture[str]) -> None:
    ran = here(capsys, "explain", "--list")
    names = [line.split()[0] for line in ran.stdout.split("\n\n")[0].splitlines() if not line.startswith(" ")]
    assert names == list(TOPICS)
    assert here(capsys, "explain").stdout == ran.stdout
    listed = json.loads(here(capsys, "explain", "--list", "--json").stdout)
    assert [topic["name"] for topic in listed["topics"]] == list(TOPICS)


@pytest.mark.parametrize("arguments", [("llama-7b", "--gpus", "8"), ("zero",)])
def test_json_has_the_steps(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    ran = here(capsys, "explain", *arguments, "--json")
    assert ran.stderr == ""
    found = json.loads(ran.stdout)
    assert list(found) == ["schema_version", "title", "language", "sections"]
    keys = {"what", "formula", "numbers", "result", "unit", "why", "source"}
    assert all(set(step) == keys for section in found["sections"] for step in section["steps"])
    text = here(capsys, "explain", *arguments).stdout
    assert all(section["title"].split()[0] in text for section in found["sections"])


def test_chinese_is_asked_for_or_the_locales(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = here(capsys, "explain", "adam", "--lang", "zh").stdout
    assert "优化器状态" in asked
    monkeypatch.setenv("LANG", "zh_CN.UTF-8")
    assert here(capsys, "explain", "adam").stdout == asked
    assert "优化器状态" not in here(capsys, "explain", "adam", "--lang", "en").stdout


def numbers(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip().startswith("= ")]


def test_numbers_are_the_same_in_both_languages(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    english, chinese = (here(capsys, "explain", "llama-7b", "--lang", each).stdout for each in ("en", "zh"))
    assert numbers(english) == numbers(chinese)
    assert len(numbers(english)) > 10


@pytest.mark.parametrize("language", ["en", "zh"])
@pytest.mark.parametrize("width", WIDTHS)
def test_lines_fold_to_the_width(
    width: int, language: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from rich.cells import cell_len

    monkeypatch.setenv("COLUMNS", str(width))
    for arguments in (("llama-7b", "--gpus", "8"), ("activations",), ("--list",)):
        lines = here(capsys, "explain", *arguments, "--lang", language).stdout.splitlines()
        longest = max(map(cell_len, lines))
        assert longest <= max(width, max(map(len, TOPICS))), (arguments, longest)
        assert all(line == line.rstrip() for line in lines)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("zeroo",), ("zeroo", "zero")),
        (("llama-7",), ("--model llama-7b",)),
        (("",), ("''", "--list")),
        ((LONG,), ("allowed",)),
        (("zero", "--lang", "fr"), ("--lang fr", "en, zh")),
        (("--gpus", "8"), ("--model",)),
        (("--list", "zero"), ("--list",)),
        (("zero", "--gpus", "x"), ("--gpus",)),
        (("zero", "--model", "no-such-model"), ("no-such-model",)),
        (("zero", "llama-7b", "--model", "llama-7b"), ("--model",)),
        (("adam", "--model", "llama-7b", "--params", "7B"), ("--params",)),
        (("--params", "x"), ("--params",)),
        (("llama-7b", "--zero", "9"), ("--zero 9",)),
    ],
)
def test_bad_input_is_one_line(
    arguments: tuple[str, ...], words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    check_refused(here(capsys, "explain", *arguments), *words)


def test_a_shell_is_offered_topics_and_models() -> None:
    offered = (
        program("", _MEMCALC_COMPLETE="complete_zsh", _TYPER_COMPLETE_ARGS="memcalc explain ze").stdout
        + program("", _MEMCALC_COMPLETE="complete_zsh", _TYPER_COMPLETE_ARGS="memcalc explain llama-7").stdout
    )
    assert "zero" in offered
    assert "llama-7b" in offered


def test_as_a_program_it_needs_no_torch() -> None:
    ran = program("explain", "zero", LANG="zh_CN.UTF-8")
    assert (ran.status, ran.stderr) == (0, "")
