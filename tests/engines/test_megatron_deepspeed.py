"""DeepSpeed 0.19.8 itself over slices of a GPT of Megatron's tensor-parallel layers, against `--engine deepspeed --tp --pp`."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from megatron_deepspeed_oracle import Ranked, Sent, tensor_parallel_step

import memcalc
from memcalc.megatron.architecture import ARCHITECTURES, Architecture
from memcalc.megatron.gpt_model import padded_vocab

LLAMA = {"model_type": "llama", "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 3,
         "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 1000, "head_dim": 16}  # fmt: skip
GPT2 = {"model_type": "gpt2", "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 64, "vocab_size": 501,
        "bos_token_id": 0, "eos_token_id": 0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}  # fmt: skip
SIZES = {"bfloat16": ("bf16", 2), "float16": ("fp16", 2), "float32": ("fp32", 4), "float64": ("fp64", 8),
         "uint8": ("uint8", 1), "int64": ("int64", 8)}  # fmt: skip
PRECISIONS = {"bf16": "bf16-mixed", "fp16": "fp16-mixed"}
Totals = dict[tuple[str, str, int], tuple[int, int]]
"""(collective, dtype, ranks of the group) -> calls and bytes."""


def architecture(config: dict[str, Any]) -> Architecture:
    model = memcalc.load_model(config)
    return ARCHITECTURES[model.model_type](model.program.config)


def real(config: dict[str, Any], tp: int, dp: int, **how: Any) -> Ranked:
    a = architecture(config)
    return tensor_parallel_step(a, tp=tp, dp=dp, vocab=padded_vocab(a.vocab, tp), **how)


def ours(config: dict[str, Any], tp: int, dp: int, pp: int = 1, **how: Any) -> memcalc.Report:
    batch, micro_batches = how.pop("batch", 1), how.pop("micro_batches", 1)
    return memcalc.estimate(
        config, engine="deepspeed", tp=tp, pp=pp, gpus=tp * dp * pp, micro_batch_size=batch, seq_len=how.pop("seq", 16),
        global_batch_size=dp * batch * micro_batches, precision=PRECISIONS[how.pop("precision", "bf16")], **how,
    )  # fmt: skip


def totals(calls: Sent) -> Totals:
    counts: Counter[tuple[str, str, int]] = Counter()
    payload: Counter[tuple[str, str, int]] = Counter()
    for (collective, name, ranks, elements), n in calls.items():
        dtype, itemsize = SIZES[name]
        counts[collective, dtype, ranks] += n
        payload[collective, dtype, ranks] += n * elements * itemsize
    return {key: (counts[key], payload[key]) for key in counts}


def estimated(report: memcalc.Report) -> Totals:
    out: Totals = {}
    for c in report.collectives:
        calls, payload = out.get((c.collective, c.dtype, c.group_size), (0, 0))
        out[c.collective, c.dtype, c.group_size] = calls + c.calls, payload + c.payload
    return out


# --- a slice, without stages


BUCKET = {"reduce_bucket_size": 100_000}
"""Not so much that it takes time to fill."""
SOME_KEPT = {"param_persistence_threshold": 0, "max_live_parameters": 200_000, "max_reuse_distance": 150_000,
             "prefetch_bucket_size": 50_000}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "zero", "how"),
    [
        (LLAMA, 2, {"precision": "fp16"}),
        (LLAMA, 3, {"batch": 2, "micro_batches": 2}),
        (GPT2, 0, {"batch": 2, "micro_batches": 2}),
        (GPT2, 1, {"precision": "fp16"}),
        (GPT2, 2, {"batch": 2, "micro_batches": 2}),
    ],
)  # fmt: skip
def test_a_step_of_a_slice(config: dict[str, Any], zero: int, how: dict[str, Any]) -> None:
    """Every collective of every group, and the peak of each phase on that data-parallel rank where it is highest."""
    tp, dp = 2, 2
    others = 1 if zero in (0, 3) else dp  # in these all ranks are alike
    runs = [
        real(config, tp, dp, zero=zero, rank=tp * i, steps=3 if zero == 3 else 2, **BUCKET, **how)
        for i in range(others)
    ]
    report = ours(config, tp, dp, zero=zero, **(BUCKET if zero else {}), **how)
    assert estimated(report) == totals(runs[0].calls)
    highest = {phase: max(run.phases[phase] for run in runs) for phase in report.phases}
    assert report.phases == highest


def test_stage_3_gathers_a_slice_over_the_ranks_that_have_it() -> None:
    names = {name: f"stage3_{name}" for name in SOME_KEPT}
    ranked = real(LLAMA, 4, 3, zero=3, **BUCKET, **{names[name]: n for name, n in SOME_KEPT.items()})
    report = ours(LLAMA, 4, 3, zero=3, **BUCKET, **SOME_KEPT)
    assert estimated(report) == totals(ranked.calls)
    assert report.phases == ranked.phases
