"""FusedLamb in the release of DeepSpeed that everything else is held against: the same oracle as of the 1-bit optimizers."""

from __future__ import annotations

from typing import Any

import pytest
from engines.deepspeed.onebit_oracle import MODELS, measured

import memcalc


@pytest.mark.live
@pytest.mark.parametrize(
    ("model", "precision", "gpus", "micro_batches"),
    [("gpt2", "fp16", 4, 1), ("gpt2", "fp32", 2, 2), ("llama", "fp16", 8, 2)],
)
def test_a_step(model: str, precision: str, gpus: int, micro_batches: int) -> None:
    case: dict[str, Any] = {"model": model, "optimizer": "lamb", "precision": precision, "gpus": gpus, "phase": ""}
    real = measured({**case, "micro_batches": micro_batches})
    report = memcalc.estimate(
        MODELS[model], engine="deepspeed", optimizer="lamb", precision="fp32" if precision == "fp32" else "fp16-mixed",
        gpus=gpus, seq_len=16, global_batch_size=gpus * micro_batches,
    )  # fmt: skip
    assert report.phases == {phase: real[phase] for phase in ("forward", "backward", "step")}
    sizes = {"float32": 4, "float16": 2}
    assert sum(c.payload for c in report.collectives) == sum(n * k * sizes[d] for _, d, n, k in real["sent"])


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"precision": "bf16-mixed"}, "--precision bf16-mixed: FusedLamb's kernel takes gradients of fp32"),
        ({"precision": "fp16-mixed", "zero": 2}, "--optimizer lamb: with ZeRO .zero 2., where its norms"),
        ({"precision": "fp16-mixed", "engine": "none", "gpus": 1}, "--optimizer lamb: is DeepSpeed's own"),
    ],
    ids=str,
)
def test_what_is_refused(options: dict[str, Any], line: str) -> None:
    with pytest.raises(memcalc.InputError, match=line):
        memcalc.estimate("gpt2", optimizer="lamb", **{"gpus": 4, "seq_len": 16, "engine": "deepspeed", **options})
