"""What people type first: a model without --model, lengths as 4k, -h, --version."""

from __future__ import annotations

import json

import pytest
from command import check_refused, here

import memcalc
from memcalc.cli.main import COMMANDS


def test_the_model_needs_no_option(capsys: pytest.CaptureFixture[str]) -> None:
    named = here(capsys, "estimate", "--model", "gpt2", "--json")
    assert here(capsys, "estimate", "gpt2", "--json") == named
    assert here(capsys, "estimate", "--json", "gpt2") == named


@pytest.mark.parametrize("command", ["estimate", "validate"])
def test_two_models_contradict_each_other(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    check_refused(here(capsys, command, "gpt2", "--model", "llama-7b"), "--model llama-7b", "gpt2")
    check_refused(here(capsys, command, "gpt2", "llama-7b"), "llama-7b")


def test_a_model_and_a_size_contradict_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    check_refused(here(capsys, "estimate", "gpt2", "--params", "7B"), "--model", "--params")


@pytest.mark.parametrize(
    ("given", "tokens"),
    [
        ("4k", 4096),
        ("1M", 2**20),
        *(
            pytest.param(*one, marks=pytest.mark.slow)
            for one in (("4K", 4096), ("128k", 131072), ("1m", 2**20), ("4096", 4096))
        ),
    ],
)
def test_lengths_in_powers_of_1024(given: str, tokens: int, capsys: pytest.CaptureFixture[str]) -> None:
    for option in ("-s", "--seq-len"):
        ran = here(capsys, "estimate", "llama-7b", option, given, "--json")
        assert json.loads(ran.stdout)["setup"]["seq_len"] == tokens


@pytest.mark.parametrize("given", ["k", "4kk", "4kB", "k4", "1.5k", "-4k", "0k", "1G", "4 k b", "1000000M", "m"])
def test_what_is_no_length(given: str, capsys: pytest.CaptureFixture[str]) -> None:
    check_refused(here(capsys, "estimate", "llama-7b", f"--seq-len={given}"), "--seq-len", "whole number from 1 to")


def test_more_tokens_than_a_model_is_made_for_is_a_note(capsys: pytest.CaptureFixture[str]) -> None:
    notes = json.loads(here(capsys, "estimate", "llama-7b", "-s", "4k", "--json").stdout)["notes"]
    assert [note for note in notes if "--seq-len 4096" in note and "2048 tokens" in note]
    assert memcalc.estimate("llama-7b", seq_len=4096).to_dict()["notes"] == notes
    notes = json.loads(here(capsys, "estimate", "llama-7b", "-s", "2k", "--json").stdout)["notes"]
    assert not [note for note in notes if "--seq-len" in note]


def test_a_table_of_positions_has_no_more() -> None:
    with pytest.raises(memcalc.InputError, match="1024 positions"):
        memcalc.estimate("gpt2", seq_len=1025)


@pytest.mark.parametrize("command", [(), *((name,) for name in COMMANDS)])
def test_help_has_a_short_form(command: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert here(capsys, *command, "-h") == here(capsys, *command, "--help")
    assert here(capsys, *command, "-h").status == 0


def test_help_shows_the_version_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--version" in here(capsys, "--help").stdout
    assert here(capsys, "--version").stdout == f"memcalc {memcalc.__version__}\n"
