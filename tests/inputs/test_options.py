"""Options by themselves: their kinds and bounds, and the one line that refuses a value."""

from __future__ import annotations

from typing import Any

import pytest
from command import LONG

import memcalc
from memcalc.errors import InputError
from memcalc.inputs.options import Options, check_options, option_name


def refused(**given: Any) -> str:
    with pytest.raises(InputError) as error:
        check_options(given)
    line = str(error.value)
    assert line.isprintable()
    assert len(line) < 500
    return line


def test_nothing_given_is_the_defaults() -> None:
    assert check_options({}) == Options()


def test_none_is_as_good_as_leaving_it_out() -> None:
    assert check_options(dict.fromkeys(Options._fields)) == Options()


def test_what_is_given_is_kept() -> None:
    given = {"gpus": 64, "zero": 3, "optimizer": "lion", "padded": True, "expert_imbalance": 2, "gpu": "h100"}
    checked = check_options(given)
    assert {name: getattr(checked, name) for name in given} == given


def test_the_mapping_is_not_modified() -> None:
    given = {"gpus": 8, "tp": None}
    check_options(given)
    assert given == {"gpus": 8, "tp": None}


def test_the_command_line_spelling() -> None:
    assert option_name("micro_batch_size") == "--micro-batch-size"


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [("gpus", 1, 10**6), ("zero", 0, 3), ("pp_rank", 0, 10**6), ("micro_batch_size", 1, 10**7), ("seq_len", 1, 10**8),
     ("global_batch_size", 1, 10**10), ("tp", 1, 10**6), ("etp", 1, 10**6), ("shard_group", 1, 10**6)],
)  # fmt: skip
def test_bounds(name: str, low: int, high: int) -> None:
    for inside in (low, high):
        assert getattr(check_options({name: inside}), name) == inside
    for outside in (low - 1, high + 1, -(10**30), 10**30):
        line = refused(**{name: outside})
        assert line.startswith(f"{option_name(name)} {outside}: ")
        assert str(low) in line
        assert str(high) in line


@pytest.mark.parametrize(
    "value", [True, False, 1.0, 1.5, "1", b"1", [1], {"a": 1}, {1}, object(), float("nan"), 1j, ""]
)
@pytest.mark.parametrize("name", ["gpus", "zero", "seq_len"])
def test_whole_numbers_are_ints(name: str, value: object) -> None:
    line = refused(**{name: value})
    assert line.startswith(f"{option_name(name)} ")
    assert "whole number" in line


@pytest.mark.parametrize(
    "value", [1, None, True, [], ["adamw"], {}, {"adamw"}, "ADAMW", "adamw ", "", "a\nb", LONG, b"adamw"]
)
def test_names_are_exact(value: object) -> None:
    if value is None:
        assert check_options({"optimizer": value}).optimizer == "adamw"
        return
    line = refused(optimizer=value)
    assert line.startswith("--optimizer ")
    assert "adamw, adam, sgd" in line


def test_a_near_name_is_offered() -> None:
    assert "did you mean deepspeed?" in refused(engine="deepsped")
    assert "--micro-batch-size" in refused(micro_batch=1)


@pytest.mark.parametrize("value", [0, 1, "on", "true", [], 1.0])
@pytest.mark.parametrize("name", ["padded", "sequence_parallel"])
def test_flags_are_booleans(name: str, value: object) -> None:
    assert refused(**{name: value}).startswith(f"{option_name(name)} ")


@pytest.mark.parametrize("value", [0, 0.99, -1, float("nan"), float("inf"), 10**400, True, "1", []])
def test_expert_imbalance(value: object) -> None:
    assert refused(expert_imbalance=value).startswith("--expert-imbalance ")


@pytest.mark.parametrize("value", [5, True, ["h100"], {"name": "h100"}, b"h100", 1.5])
def test_the_gpu_is_a_name(value: object) -> None:
    assert refused(gpu=value).startswith("--gpu ")


@pytest.mark.parametrize("name", ["nope", "a\nb", LONG, "", "é🦙", "Gpus"])
def test_unknown_options(name: str) -> None:
    assert "unknown option" in refused(**{name: 1})


@pytest.mark.parametrize("name", ["gpus", "zero", "expert_imbalance", "optimizer", "padded", "gpu"])
def test_numbers_too_long_to_print_are_refused(name: str) -> None:
    """Python refuses to print an integer of more than 4300 digits: with a ValueError of its own."""
    assert refused(**{name: 10**5000}).startswith(f"{option_name(name)} ")


@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf"), True, "400", 10**7])
def test_a_network_has_a_positive_speed(value: Any) -> None:
    assert refused(network_gbps=value).startswith("--network-gbps ")
    assert check_options({"network_gbps": 0.5}).network_gbps == 0.5


def test_a_network_without_a_gpu_is_refused() -> None:
    with pytest.raises(InputError, match=r"^--network-gbps 400: .*allowed: with --gpu$"):
        memcalc.estimate("gpt2", gpus=16, network_gbps=400)
