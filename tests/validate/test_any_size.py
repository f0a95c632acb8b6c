"""`memcalc validate --backend fake` of what people train, over tensors that take no memory.

Models are cut to a few layers, all of which are alike; one of each kind of engine is whole.
"""

from __future__ import annotations

import resource
from typing import Any

import pytest
from validated import validate

import memcalc
from memcalc.units import GIB, KIB
from memcalc.validate.checks import fields_of
from memcalc.validate.comparison import Comparison


def same(comparison: Comparison) -> None:
    rows = comparison.memory + comparison.communication
    assert {row.name: row.predicted for row in rows} == {row.name: row.measured for row in rows}


def cut(model: str, layers: int) -> dict[str, Any]:
    return fields_of(memcalc.load_model(model)) | {"num_hidden_layers": layers}


@pytest.mark.parametrize(
    ("model", "layers", "options"),
    [
        ("llama-7b", 3, {"gpus": 8, "global_batch_size": 16}),
        ("llama-7b", 2, {"gpus": 64, "precision": "bf16-autocast", "recompute": "full"}),
        ("llama-3-70b", 2, {"gpus": 64, "engine": "fsdp2", "zero": 3, "tp": 8}),
        ("llama-3-70b", 2, {"gpus": 64, "engine": "fsdp2", "zero": 2, "tp": 8, "sequence_parallel": True, "seq_len": 8192}),
        ("llama-3-70b", 2, {"gpus": 64, "engine": "fsdp2", "zero": 3, "cp": 8, "seq_len": 131072, "recompute": "full"}),
        ("llama-3-8b", 4, {"gpus": 16, "engine": "fsdp2", "zero": 3, "tp": 2, "pp": 2, "global_batch_size": 8}),
        ("mixtral-8x7b", 2, {"gpus": 64, "engine": "fsdp2", "zero": 3, "ep": 8}),
        ("mixtral-8x7b", 2, {"gpus": 16, "engine": "fsdp2", "zero": 3, "ep": 8, "tp": 2, "recompute": "full"}),
        ("mixtral-8x7b", 2, {"gpus": 8, "engine": "deepspeed", "zero": 1, "ep": 8}),
        ("llama-7b", 2, {"gpus": 8, "engine": "deepspeed", "zero": 0, "precision": "fp16-mixed"}),
        ("llama-7b", 2, {"gpus": 64, "engine": "deepspeed", "zero": 2}),
        ("llama-7b", 2, {"gpus": 8, "engine": "deepspeed", "zero": 1, "cp": 4, "seq_len": 32768}),
        ("qwen2.5-7b", 2, {"gpus": 8, "engine": "deepspeed", "zero": 3, "micro_batch_size": 2, "global_batch_size": 32}),
        ("mixtral-8x7b", 2, {"gpus": 8, "engine": "deepspeed", "zero": 3}),
        ("llama-3-70b", 3, {"gpus": 64, "engine": "deepspeed", "zero": 3, "recompute": "full"}),
    ],
)  # fmt: skip
def test_large_models(model: str, layers: int, options: dict[str, Any]) -> None:
    same(validate(cut(model, layers), **options))


def test_experts_that_are_run_in_a_loop() -> None:
    """Each has its share of the rows, as is estimated."""
    fields = fields_of(memcalc.load_model("dbrx"))
    same(validate(fields | {"n_layers": 1}, gpus=8, seq_len=512))


@pytest.mark.parametrize("options", [{"engine": "ddp"}, {"engine": "deepspeed", "zero": 3}], ids=str)
def test_a_whole_model(options: dict[str, Any]) -> None:
    """All 32 layers of 7B: some fifteen seconds of one core."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    same(validate("llama-7b", gpus=8, **options))
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * KIB < GIB
