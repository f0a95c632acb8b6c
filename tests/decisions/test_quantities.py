"""The values that a quantity may have."""

from __future__ import annotations

from typing import Any

import pytest

import memcalc
from memcalc.decisions.quantities import MOST_GPUS, QUANTITIES, Asked, Quantity
from memcalc.errors import InputError


def quantity(name: str, model: str | None = "llama-7b", max_gpus: int = MOST_GPUS, **options: Any) -> Quantity:
    loaded = None if model is None else memcalc.load_model(model)
    return QUANTITIES[name](Asked(loaded, None, options, max_gpus))


def check_valid(found: Quantity, places: tuple[int, ...]) -> None:
    """The values at these places can be estimated."""
    for place in places:
        case = found.case(found.values[place])
        memcalc.estimate(case.model, params=case.params, **case.options)


def test_micro_batches() -> None:
    assert quantity("micro-batch-size").values[:3] == range(1, 4)
    shared = quantity("micro-batch-size", gpus=8, zero=3, global_batch_size=96)
    assert list(shared.values) == [1, 2, 3, 4, 6, 12]
    assert "--global-batch-size 96" in shared.end and "12 sequences" in shared.end
    with pytest.raises(InputError, match="--global-batch-size 12: is not divisible"):
        quantity("micro-batch-size", gpus=8, global_batch_size=12)


@pytest.mark.parametrize(
    ("options", "step"),
    [
        ({}, 1),
        ({"gpus": 8, "tp": 4}, 4),
        ({"gpus": 8, "tp": 4, "sequence_parallel": False}, 1),
        ({"gpus": 8, "cp": 2}, 4),
        ({"gpus": 8, "cp": 2, "tp": 4}, 8),
        ({"gpus": 8, "cp": 4, "engine": "fsdp2"}, 8),
    ],
)
def test_lengths_are_those_that_the_layout_shares(options: dict[str, Any], step: int) -> None:
    values = quantity("seq-len", **options).values
    assert isinstance(values, range)
    assert values.step == step
    assert values[-1] <= 2048 < values[-1] + step
    check_valid(quantity("seq-len", **options), (0, 1, 2, len(values) // 2, len(values) - 1))


@pytest.mark.parametrize(("model", "most"), [("gpt2", 1024), ("llama-3-8b", 8192)])
def test_lengths_end_at_the_models_positions(model: str, most: int) -> None:
    found = quantity("seq-len", model)
    assert found.values[-1] == most
    assert f"{model} is made for {most} positions" in found.end


def test_gpus_are_whole_nodes() -> None:
    assert list(quantity("gpus", max_gpus=40, zero=3).values)[::-1] == [2, 3, 4, 5, 6, 7, 8, 16, 24, 32, 40]
    assert list(quantity("gpus", max_gpus=32, tp=4).values)[::-1] == [4, 8, 16, 24, 32]
    assert list(quantity("gpus", max_gpus=12, gpus_per_node=4).values)[::-1] == [1, 2, 3, 4, 8, 12]
    assert list(quantity("gpus", max_gpus=32, tp=2, global_batch_size=8).values)[::-1] == [2, 4, 8, 16]
    check_valid(quantity("gpus", tp=4, pp=2, global_batch_size=64), (0, 1, 2))


def test_layers_are_whole_stages() -> None:
    assert quantity("layers").values[:3] == range(1, 4)
    pipeline: dict[str, Any] = {"gpus": 8, "pp": 4, "global_batch_size": 8}
    assert list(quantity("layers", **pipeline).values[:3]) == [4, 8, 12]
    uneven = quantity("layers", **pipeline, first_stage_layers=3)
    assert list(uneven.values[:3]) == [6, 9, 12]
    check_valid(quantity("layers", **pipeline), (0, 1, 7))
    check_valid(uneven, (0, 1, 7))
    check_valid(quantity("layers", **pipeline, schedule="interleaved", virtual_stages=2), (0, 1, 7))


def test_a_given_value_is_not_searched() -> None:
    for name, field in (("micro-batch-size", "micro_batch_size"), ("seq-len", "seq_len"), ("gpus", "gpus")):
        with pytest.raises(InputError, match=f"--solve {name} searches for; allowed: leave it out"):
            quantity(name, **{field: 8})


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("gpus", {"max_gpus": 0}, "--max-gpus 0: allowed"),
        ("gpus", {"max_gpus": 10**6}, "--max-gpus 1000000: allowed"),
        ("gpus", {"max_gpus": 2, "tp": 3}, "--max-gpus 2: .*at least 3"),
        ("gpus", {"zero": 3, "max_gpus": 1}, "--zero 3"),
        ("layers", {"model": None}, "--solve layers: needs --model"),
        ("seq-len", {"model": None}, "--solve seq-len: needs --model"),
        ("params", {"model": "gpt2"}, "--solve params: sizes model states without a model"),
        ("seq-len", {"model": "resnet-50"}, "--solve seq-len: the model is trained on images"),
        ("seq-len", {"engine": "x"}, "--engine x: allowed"),
        ("seq-len", {"tp": 3}, "--gpus 1: is not divisible by tp 3"),
    ],
)
def test_what_is_refused(name: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        quantity(name, **options)
