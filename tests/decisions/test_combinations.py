"""Every combination of the given values."""

from __future__ import annotations

from typing import Any

import pytest

from memcalc.decisions.combinations import MOST, combinations
from memcalc.errors import InputError


def test_the_last_option_changes_fastest() -> None:
    found = combinations({"model": "gpt2", "gpus": [8, 16], "zero": (1, 3), "tp": None, "engine": ["deepspeed"]})
    assert found.fixed == {"model": "gpt2", "engine": "deepspeed"}
    assert found.varied == ("gpus", "zero")
    assert [tuple(one.items()) for one in found.each] == [
        (("gpus", gpus), ("zero", zero)) for gpus in (8, 16) for zero in (1, 3)
    ]


def test_a_value_given_twice_is_one_column() -> None:
    assert [one["gpus"] for one in combinations({"gpus": [8, 16, 8]}).each] == [8, 16]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"model": "gpt2"}, "memcalc compare llama-7b --gpus 8 --zero 1,2,3"),
        ({"gpus": [8, 8]}, "no option has several values"),
        ({"gpus": []}, "--gpus: the list is empty"),
        ({"gpus": [8, "x"]}, "--gpus x: allowed: a whole number"),
        ({"engine": ["ddp", "fsdp3"]}, "--engine fsdp3: allowed"),
        ({"gpu": ["t4", "zz"], "zero": 1}, "--gpu zz: unknown GPU"),
        ({"model": ["gpt2", "zz"]}, "--model zz: unknown model"),
        ({"params": ["7B", "7X"]}, "--params '7X': allowed"),
        ({"nothing": [1, 2]}, "--nothing: unknown option"),
    ],
)
def test_what_no_other_option_could_make_right_is_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError) as error:
        combinations(given)
    assert words in str(error.value)


def test_too_many_columns_are_counted() -> None:
    many = {"gpus": list(range(1, 10)), "micro_batch_size": list(range(1, 9))}
    with pytest.raises(InputError, match=f"= 72 combinations; allowed: at most {MOST}"):
        combinations(many)
    assert len(combinations({**many, "gpus": list(range(1, 9))}).each) == MOST
