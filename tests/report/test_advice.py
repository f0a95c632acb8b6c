"""Every change that is advised leaves the peak that it promises."""

from __future__ import annotations

from typing import Any

import pytest

import memcalc
from memcalc.report.advice import advice


def test_the_mask_of_long_sequences_is_named() -> None:
    """131 072 tokens have a mask of 16 GiB."""
    options = {"gpus": 64, "tp": 8, "cp": 8, "zero": 1, "seq_len": 131072}
    (change,) = (one for one in advice(memcalc.estimate("llama-3-8b", **options)) if "mask" in one.flags)
    assert change.flags == "--no-attention-mask-in-dataloader"
    assert change.peak == memcalc.estimate("llama-3-8b", **options, attention_mask_in_dataloader=False).peak


def test_experts_stay_as_split_as_they_are() -> None:
    options = {"gpus": 16, "tp": 2, "ep": 4, "pp": 2, "etp": 1, "zero": 1, "global_batch_size": 16}
    changes = advice(memcalc.estimate("mixtral-8x7b", **options))
    assert changes
    for change in changes:
        name, value = change.flags.removeprefix("--").split()
        assert memcalc.estimate("mixtral-8x7b", **options | {name: value}).peak == change.peak


@pytest.mark.parametrize(
    "options",
    [
        {"gpus": 64, "engine": "fsdp2", "zero": 2, "shard_group": 8},
        {"gpus": 8, "engine": "fsdp2", "zero": 3, "grad_dtype": "bf16"},
        {"gpus": 8, "engine": "fsdp2", "zero": 2, "pp": 4, "global_batch_size": 32, "micro_batch_size": 2},
        {"gpus": 8, "zero": 1, "engine": "deepspeed", "attention": "eager", "micro_batch_size": 2},
        {"gpus": 8, "tp": 2, "micro_batch_size": 2},
    ],
    ids=str,
)
def test_a_change_leaves_what_it_promises(options: dict[str, Any]) -> None:
    changes = advice(memcalc.estimate("llama-7b", **options))
    assert changes
    for change in changes:
        words = change.flags.split()
        flags = {name[2:].replace("-", "_"): value for name, value in zip(words[::2], words[1::2], strict=True)}
        changed = {name: int(value) if value.isdigit() else value for name, value in flags.items()}
        assert memcalc.estimate("llama-7b", **options | changed).peak == change.peak, change.flags
