"""Commands with the options that a command line names: they do what the whole commands do."""

from __future__ import annotations

from typing import Any

import pytest
from command import here

from memcalc.cli import setup_options
from memcalc.cli.estimate import estimate
from memcalc.cli.setup_options import SETUP, narrowed


def setup_options_of(words: str) -> set[str]:
    return SETUP & {*narrowed(estimate, words.split()).__signature__.parameters}


def test_an_option_is_there_if_a_word_names_it() -> None:
    assert setup_options_of("llama-7b --zero 3 --gpus=8 -b 2") == {"zero", "gpus", "micro_batch_size"}
    assert setup_options_of("--model gpt2 --no-sync-each-micro-batch --output -") == {"sync_each_micro_batch"}
    assert setup_options_of("gpt2") == set()


@pytest.mark.parametrize(
    "words", ["--zeroo 3", "-h", "--help", "--help-all", "-b2", "--learning-rate 1", "--seq-len -1"]
)
def test_a_word_that_is_no_option_leaves_the_command_whole(words: str) -> None:
    assert narrowed(estimate, ["gpt2", *words.split()]) is estimate


@pytest.mark.parametrize(
    "words",
    [
        "estimate gpt2 --json", "estimate gpt2 --zero 3 --gpus 8 -s 1k --recompute full", "estimate gpt2 --gpus",
        "estimate gpt2 --gpus eight", "estimate gpt2 two", "estimate gpt2 --no-sequence-parallel --gpus 2",
        "estimate gpt2 --gpus 2 --gpus 4", "estimate --params 7B --zero 1 --gpus=4", "compare gpt2 --zero 1,2 --gpus 4",
        "compare gpt2 --gpus", "estimate gpt2 -- --gpus", "estimate gpt2 --gpus --zero", "fit gpt2 --gpu 24GB --zero 1 --gpus 2",
    ],
)  # fmt: skip
def test_the_answer_is_that_of_the_whole_command(
    words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def whole(command: Any, _words: Any) -> Any:
        return command

    monkeypatch.setenv("COLUMNS", "100")
    found = here(capsys, *words.split())
    monkeypatch.setattr(setup_options, "narrowed", whole)
    assert here(capsys, *words.split()) == found
