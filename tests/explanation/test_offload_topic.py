"""The topic of offload: a rule stands beside the same kind of memory, on one node and on several."""

from __future__ import annotations

import pytest

import memcalc
from memcalc.errors import InputError
from memcalc.explanation.step import Step
from memcalc.explanation.topic import sections_of
from memcalc.explanation.topics.offload import TOPIC
from memcalc.offload.host import totals

FILES = {
    "zero": 3,
    "engine": "deepspeed",
    "offload_params": "cpu",
    "offload_optimizer": "nvme",
    "precision": "bf16-mixed",
}


def steps_of(section: int, **options: int) -> list[Step]:
    return list(sections_of(TOPIC, "gpt2-xl", None, options, "en")[section].steps[1:])


@pytest.mark.parametrize("gpus", [8, 16])
def test_the_rule_for_files_stands_beside_files_and_memory_is_named_apart(gpus: int) -> None:
    kinds = totals(memcalc.estimate("gpt2-xl", gpus=gpus, **FILES).host)
    rule, exact, apart = steps_of(3, gpus=gpus)
    assert exact.result == kinds["nvme"]
    assert apart.result == kinds["pinned"] + kinds["paged"]
    assert exact.result == pytest.approx(rule.result, rel=0.03)  # small parts of gradients have no file
    assert "not in the rule" in apart.what


@pytest.mark.parametrize("section", [1, 2, 3])
def test_a_node_of_two_has_half_of_a_rule(section: int) -> None:
    (one, *_), (two, *_) = steps_of(section, gpus=8), steps_of(section, gpus=16)
    assert two.result * 2 == pytest.approx(one.result, abs=1)


def test_a_bare_number_of_parameters_has_no_host() -> None:
    with pytest.raises(InputError, match="--params 7B"):
        sections_of(TOPIC, None, "7B", {}, "en")
