"""The plan of vLLM's KV cache against vLLM's own functions (vllm_plans.json, made by vllm_planning.py with vllm 0.33.0)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from inference.vllm_cases import CASES, ours, work

from memcalc.inference.serving.blocks import Spec, Workload, plan

RECORD: dict[str, Any] = {
    one["name"]: one for one in json.loads(Path(__file__).with_name("vllm_plans.json").read_text())
}


@pytest.mark.parametrize("of", CASES, ids=lambda one: one["name"])
def test_the_plan_is_vllms(of: dict[str, Any]) -> None:
    theirs, used = RECORD[of["name"]], work(of)
    found = plan([ours(layer) for layer in of["layers"]], of["available"], used)
    assert {
        "name": of["name"],
        "groups": [len(group.layers) for group in found.groups],
        "block_sizes": [group.spec.block_size for group in found.groups],
        "bytes_per_block": found.bytes_per_block,
        "num_blocks": found.num_blocks,
        "blocks_per_request": [group.blocks(used) for group in found.groups],
        "concurrency": found.max_concurrency,
    } == theirs


def test_every_case_is_on_record() -> None:
    assert list(RECORD) == [one["name"] for one in CASES]


def test_one_block_is_never_used() -> None:
    spec = Spec("full", 16, token=1024)
    exact = plan([spec], 10 * 16 * 1024, Workload(80, 0))
    assert (exact.num_blocks, exact.blocks_per_sequence) == (10, 5)
    assert exact.max_concurrency == 2.0 and exact.sequences == 1
    assert plan([spec], 11 * 16 * 1024, Workload(80, 0)).sequences == 2


def test_no_memory_holds_nothing() -> None:
    found = plan([Spec("full", 16, token=1024)], -5, Workload(80, 0))
    assert (found.num_blocks, found.sequences, found.tokens(80)) == (0, 0, 0)


def test_latents_beside_larger_pages_are_refused() -> None:
    with pytest.raises(ValueError, match="latents"):
        plan([Spec("latent", 16, token=1152), Spec("sliding", 16, token=2000, window=64)], 2**30, Workload(100, 0))
    with pytest.raises(ValueError, match="no layer"):
        plan([], 2**30, Workload(100, 0))
