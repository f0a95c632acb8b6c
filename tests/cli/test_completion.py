"""A shell completes commands, options, and the values that have names."""

from __future__ import annotations

import pytest
from command import here, program

from memcalc.cli.completion import values_of
from memcalc.inputs.options import CHOICES


def offered(words: str, *, last: int) -> list[str]:
    """Return what bash is offered for the word number `last` of a command line."""
    ran = program(_MEMCALC_COMPLETE="complete_bash", COMP_WORDS=words, COMP_CWORD=str(last))
    assert ran.stderr == ""
    assert ran.status == 0
    return ran.stdout.split()


def test_commands_and_options() -> None:
    assert {"estimate", "validate", "models", "gpus"} <= set(offered("memcalc ", last=1))
    assert offered("memcalc esti", last=1) == ["estimate"]
    assert "--micro-batch-size" in offered("memcalc estimate --micro", last=2)


def test_names_of_models_and_gpus() -> None:
    assert "llama-7b" in offered("memcalc estimate --model llama", last=3)
    assert "llama-7b" in offered("memcalc estimate llama", last=2)
    assert offered("memcalc estimate --gpu a100", last=3) == ["a100-40gb", "a100-80gb", "a100-80gb-pcie"]


@pytest.mark.parametrize("field", CHOICES)
def test_the_values_of_every_option_that_has_names_for_them(field: str) -> None:
    values = values_of("--" + field.replace("_", "-"))
    assert values("") == list(CHOICES[field])
    first = next(iter(CHOICES[field]))
    assert first in values(first[:1])
    assert values("no such value") == []


def test_numbers_have_no_values_to_offer() -> None:
    assert values_of("--gpus")("") == []
    assert values_of("--zero")("") == ["0", "1", "2", "3"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_of_a_shell_is_shown(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    """typer finds out which shell runs it, unless this variable is set: then it is told."""
    assert "--show-completion" in here(capsys, "--help").stdout
    ran = program("--show-completion", shell, _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")
    assert ran.status == 0
    assert "_MEMCALC_COMPLETE" in ran.stdout
