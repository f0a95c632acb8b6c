"""`overlap_comm` of ZeRO-2 against DeepSpeed's own engine: a second bucket, and every number of a step, to the byte."""

from __future__ import annotations

from typing import Any

import pytest
from validate.test_fake import GPT2, LLAMA, MIXTRAL, same
from validated import validate

import memcalc
from memcalc import InputError

DEEP = LLAMA | {"num_hidden_layers": 9}  # so many that paper runs fewer
ZERO_2 = {"engine": "deepspeed", "zero": 2, "gpus": 4, "seq_len": 16, "overlap_comm": True}


@pytest.mark.parametrize("bucket", [2000, 20_000, 10**6])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"micro_batch_size": 2, "global_batch_size": 16, "clip_grad_norm": True},
        {"recompute": "full", "precision": "fp16-mixed"},
        {"precision": "fp32", "freeze": "embeddings"},
        {"lora_rank": 4},
        {"offload_optimizer": "cpu", "micro_batch_size": 2},
    ],
    ids=["plain", "accumulated", "recomputed", "frozen", "adapters", "offloaded"],
)
def test_a_step(options: dict[str, Any], bucket: int) -> None:
    same(validate(DEEP, **ZERO_2, **options, reduce_bucket_size=bucket))


@pytest.mark.parametrize(("model", "bucket"), [(MIXTRAL, 2000), (MIXTRAL, 10**6), (GPT2, 10**6)])
def test_other_families(model: dict[str, Any], bucket: int) -> None:
    same(validate(model, **ZERO_2, reduce_bucket_size=bucket))


def test_the_second_bucket_has_a_row_of_its_own() -> None:
    two = memcalc.estimate("llama-7b", **{**ZERO_2, "gpus": 8})
    one = memcalc.estimate("llama-7b", **{**ZERO_2, "gpus": 8, "overlap_comm": False})
    rows = {item.name: item.nbytes for item in two.items}
    assert rows["reduce bucket that backward fills"] == rows["reduce bucket"] == 10**9
    assert two.phases["backward"] - one.phases["backward"] == 10**9
    assert two.to_dict()["setup"]["overlap_comm"] is True


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"zero": 1}, "--overlap-comm on: with --zero 1"),
        ({"zero": 3, "overlap_comm": False}, "--overlap-comm off: with --zero 3"),
        ({"zero": 0}, "--overlap-comm on: is an option of DeepSpeed"),
        ({"engine": "fsdp2"}, "--overlap-comm on: is an option of DeepSpeed"),
        ({"tp": 2, "zero": 2, "gpus": 8}, "--tp"),
    ],
)
def test_refusals(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        memcalc.estimate(LLAMA, **{**ZERO_2, **options})
