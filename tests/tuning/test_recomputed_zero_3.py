"""Adapters under ZeRO-3 with recomputation: the frozen weights that are gathered again, as DeepSpeed has it."""

from __future__ import annotations

from typing import Any

import pytest
from validate.test_fake import GPT2, LLAMA, T5, same

from memcalc.validate import run

BLOOM = {"model_type": "bloom", "hidden_size": 64, "n_layer": 4, "n_head": 4, "vocab_size": 300}
DEEP = LLAMA | {"num_hidden_layers": 6}
SHARED: dict[str, Any] = {
    "engine": "deepspeed",
    "zero": 3,
    "gpus": 4,
    "lora_rank": 4,
    "micro_batch_size": 2,
    "seq_len": 32,
}


def step(model: dict[str, Any], **options: Any) -> None:
    same(run.validate(model, backend="fake", **SHARED, **options))


def test_dropout_owns_the_recomputation() -> None:
    """A layer of GPT-2 ends with dropout, a module: its backward asks for the recomputation, and is over then."""
    step(GPT2, recompute="full", param_persistence_threshold=10)


@pytest.mark.slow
@pytest.mark.parametrize("targets", ["default", "all-linear"])
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("threshold", [10, 100_000])
@pytest.mark.parametrize("model", [GPT2, BLOOM, T5, DEEP], ids=lambda m: m["model_type"])
def test_families(model: dict[str, Any], threshold: int, recompute: str, targets: str) -> None:
    step(model, recompute=recompute, lora_targets=targets, param_persistence_threshold=threshold)
