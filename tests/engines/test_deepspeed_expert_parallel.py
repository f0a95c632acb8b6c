"""DeepSpeed 0.19.8's AutoEP itself against `--engine deepspeed --ep`: every collective, and the peak of every phase to the
byte."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from deepspeed_oracle import Ranked, deepspeed_step

import memcalc

MIXTRAL = {"model_type": "mixtral", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
           "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 500, "num_local_experts": 8,
           "num_experts_per_tok": 2, "head_dim": 16}  # fmt: skip
QWEN3 = {"model_type": "qwen3_moe", "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32,
         "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 500,
         "num_experts": 8, "num_experts_per_tok": 4, "head_dim": 16, "mlp_only_layers": [0]}  # fmt: skip

PRECISIONS = {"fp32": "fp32", "bf16": "bf16-mixed", "fp16": "fp16-mixed"}
DTYPES = {"bfloat16": ("bf16", 2), "float16": ("fp16", 2), "float32": ("fp32", 4), "uint8": ("uint8", 1),
          "int32": ("int32", 4), "float64": ("fp64", 8)}  # fmt: skip
PHASES = ("forward", "backward", "step")
Sent = dict[tuple[str, str, int], tuple[int, int]]
"""(collective, dtype, ranks) -> calls and bytes."""


def ours(config: dict[str, Any], **how: Any) -> memcalc.Report:
    """The estimate of the setup of an oracle's run."""
    gpus, batch = how["gpus"], how.get("micro_batch_size", 1)
    names = ("ep", "zero", "reduce_bucket_size")
    return memcalc.estimate(
        config,
        engine="deepspeed",
        gpus=gpus,
        precision=PRECISIONS[how.get("precision", "bf16")],
        micro_batch_size=batch,
        global_batch_size=gpus * batch * how.get("micro_batches", 1),
        seq_len=how.get("seq_len", 16),
        recompute="full" if how.get("recompute") else "none",
        **{name: how[name] for name in names if name in how},
    )


def sent(ranked: Ranked) -> Sent:
    """Groups of one, which send nothing, left out."""
    calls: Counter[tuple[str, str, int]] = Counter()
    payload: Counter[tuple[str, str, int]] = Counter()
    for (collective, name, elements, ranks), count in ranked.by_group.items():
        if ranks > 1:
            dtype, itemsize = DTYPES[name]
            calls[collective, dtype, ranks] += count
            payload[collective, dtype, ranks] += count * elements * itemsize
    return {key: (calls[key], payload[key]) for key in calls}


def estimated(report: memcalc.Report) -> Sent:
    out: Sent = {}
    for c in report.collectives:
        key = c.collective, c.dtype, c.group_size
        calls, payload = out.get(key, (0, 0))
        out[key] = calls + c.calls, payload + c.payload
    return out


def check(config: dict[str, Any], ranks: tuple[int, ...] = (0,), **how: Any) -> None:
    """Collectives of one rank; the peak of each phase on that one of `ranks` where it is highest."""
    runs = [deepspeed_step(config, rank=rank, steps=2, **how) for rank in ranks]
    report = ours(config, **how)
    assert estimated(report) == sent(runs[0])
    highest = {phase: max(getattr(run, phase) for run in runs) for phase in PHASES}
    assert report.phases == highest


@pytest.mark.parametrize("precision", ["bf16", "fp32", "fp16"])
def test_stage_0(precision: str) -> None:
    check(MIXTRAL, gpus=4, ep=2, zero=0, precision=precision)


def test_stage_0_of_experts_in_some_layers() -> None:
    check(QWEN3, gpus=8, ep=4, zero=0, micro_batch_size=2)


@pytest.mark.parametrize("config", [MIXTRAL, QWEN3], ids=["mixtral", "qwen3"])
@pytest.mark.parametrize("zero", [1, 2])
def test_stages_1_and_2(config: dict[str, Any], zero: int) -> None:
    check(config, tuple(range(8)), gpus=8, ep=4, zero=zero)
