"""A column is what `memcalc.estimate` reports for its setup."""

from __future__ import annotations

from typing import Any

import pytest
from command import LLAMA

import memcalc
from memcalc.errors import InputError

CASES: list[dict[str, Any]] = [
    {"model": "llama-7b", "gpus": [8, 16], "zero": [1, 3], "gpu": "a100-80gb"},
    {"model": ["gpt2", "qwen3-0.6b"], "seq_len": [512, 1024]},
    {"model": "llama-7b", "gpus": 8, "zero": [1, 2], "engine": ["deepspeed", "megatron"], "gpu": ["t4", "h100-80gb"]},
    {"params": ["7B", "13B"], "gpus": [4, 8], "gpu": "h100-80gb"},
    {"model": "gpt2", "padded": [True, False], "gpu": "24GB"},
]
PARTS = ("model", "setup", "memory", "communication", "time", "fit")


@pytest.mark.parametrize("case", CASES)
def test_columns_are_estimates(case: dict[str, Any]) -> None:
    compared = memcalc.compare(**case)
    document = compared.to_dict()
    assert document["schema_version"] == 1
    assert document["varied"] == [name for name, value in case.items() if isinstance(value, list)]
    for column in document["columns"]:
        options = {**case, **column["values"]}
        try:
            own = memcalc.estimate(**options).to_dict()
        except InputError as error:
            assert column["error"] == str(error)
            assert {column[name] for name in (*PARTS, "cost")} == {None}
        else:
            assert column["error"] is None
            assert {name: column[name] for name in PARTS} == {name: own[name] for name in PARTS}
            assert column["cost"] is None


def test_every_combination_is_a_column() -> None:
    compared = memcalc.compare(LLAMA, gpus=[1, 2, 4], zero=[0, 1])
    assert [column.values for column in compared.columns] == [
        {"gpus": gpus, "zero": zero} for gpus in (1, 2, 4) for zero in (0, 1)
    ]
    refused = [column for column in compared.columns if column.error]
    assert [column.values for column in refused] == [{"gpus": 1, "zero": 1}]
    assert refused[0].report is None


def test_a_model_given_twice_is_one() -> None:
    compared = memcalc.compare(["gpt2", "gpt2"], seq_len=[64, 128])
    assert compared.varied == ("seq_len",)


@pytest.mark.parametrize("gpus", [["a100-80gb", "h100-80gb"], ["h100-80gb", "a100-80gb"]])
def test_each_gpu_has_its_price(gpus: list[str]) -> None:
    two = memcalc.compare("llama-7b", gpus=8, zero=[1, 3], gpu=gpus, price=[2, 5.5])
    for column in two.columns:
        assert column.cost is not None
        assert column.cost.price == (2 if column.values["gpu"] == gpus[0] else 5.5)
    one = memcalc.compare("llama-7b", gpus=8, zero=[1, 3], gpu=gpus, price=3)
    assert {column.cost and column.cost.price for column in one.columns} == {3}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "--model or --params: exactly one"),
        ({"model": "gpt2", "params": "7B", "gpus": [1, 2]}, "--model or --params: exactly one"),
        ({"model": "gpt2", "gpus": [8, 16], "tp": 3}, "every combination is refused; the first: --gpus 8"),
        ({"model": "gpt2", "gpus": [8, 16], "price": 2}, "--price: needs --gpu"),
        ({"model": "gpt2", "gpus": [8, 16], "gpu": "t4", "price": [1, 2]}, "--price: 2 prices for 1 of --gpu"),
        ({"model": "gpt2", "gpus": [8, 16], "gpu": "t4", "price": []}, "--price: 0 prices for 1 of --gpu"),
        ({"model": "gpt2", "gpus": [8, 16], "gpu": "t4", "price": -1}, "--price -1"),
    ],
)
def test_what_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError) as error:
        memcalc.compare(**options)
    assert words in str(error.value)
    assert "\n" not in str(error.value)
