"""KTO against TRL's own trainer and LM head over transformers' models: every number of a step, to the byte."""

from __future__ import annotations

from typing import Any

import pytest
from tasks.trl_oracle import mixed_labels, validate
from validate.test_fake import GPT2, LLAMA, same

import memcalc

DEEP = LLAMA | {"num_hidden_layers": 8}  # so many that paper runs fewer
BF16: dict[str, Any] = {"precision": "bf16"}


@pytest.mark.parametrize(
    ("model", "options"),
    [
        (LLAMA, BF16),
        (LLAMA, BF16 | {"precompute_reference": True}),
        (LLAMA, {"precision": "fp32", "micro_batch_size": 3}),
        (LLAMA, {"precision": "bf16-mixed", "global_batch_size": 6}),
        (DEEP, {"precision": "bf16-autocast", "recompute": "full"}),
        (LLAMA, BF16 | {"padded": True}),
        (LLAMA, BF16 | {"seq_len": 4200}),
        (GPT2, {"precision": "bf16-autocast"}),
        (LLAMA, BF16 | {"lora_rank": 4}),
        (DEEP, {"precision": "bf16-autocast", "lora_rank": 4, "lora_targets": "all-linear", "recompute": "full"}),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if "model_type" not in value else value["model_type"],
)
def test_a_step(model: dict[str, Any], options: dict[str, Any]) -> None:
    same(validate(model, **{"task": "kto", "micro_batch_size": 2, "seq_len": 32} | options))


@pytest.mark.parametrize("options", [{}, {"lora_rank": 4}], ids=str)
def test_with_ddp(options: dict[str, Any]) -> None:
    """The first forward of a micro-batch is the one without a graph: it broadcasts the buffers."""
    same(validate(LLAMA, task="kto", engine="ddp", gpus=4, micro_batch_size=2, seq_len=32, **BF16, **options))


@pytest.mark.parametrize("options", [{"zero": 0}, {"zero": 2, "precision": "fp16-mixed"}], ids=str)
def test_with_deepspeed(options: dict[str, Any]) -> None:
    same(validate(LLAMA, task="kto", engine="deepspeed", gpus=4, micro_batch_size=2, seq_len=32, **options))


def test_a_model_that_had_another_task() -> None:
    """Its runs are not those of this one, at any size."""
    model = memcalc.load_model(DEEP)
    for size in ({"micro_batch_size": 2, "seq_len": 32}, {"micro_batch_size": 3, "seq_len": 1999}):
        for task in ("dpo", "kto", "pretrain"):
            options = {"task": task, "precision": "bf16-autocast", **size}
            assert memcalc.estimate(model, **options).phases == memcalc.estimate(DEEP, **options).phases


def test_the_mix_of_labels_changes_no_number() -> None:
    options: dict[str, Any] = {"task": "kto", "micro_batch_size": 3, "seq_len": 32}
    assert mixed_labels(memcalc.estimate(LLAMA, **options, **BF16)) == validate(LLAMA, **options, **BF16).measured


def test_one_sequence_has_no_others() -> None:
    with pytest.raises(memcalc.InputError, match="--task kto: with --micro-batch-size 1 there are no other"):
        memcalc.estimate(LLAMA, task="kto")
