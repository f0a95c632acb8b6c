"""Tensor-parallel stages under `fully_shard` and torch.distributed.pipelining, by transformers' plan and by torch's with
sequence parallelism, against the real three: peaks and everything sent, byte for byte."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import DROPOUTS, step_cases
from stages_compared import KEPT, LLAMA, SHALLOW, ZERO_2, Case, both, check, counted, said

import memcalc
from memcalc.families import supporting

STAGED = supporting(lambda s: s.stages)

PLAIN = supporting(lambda s: s.sequence_parallel)

WORKLOAD = {"micro_batch_size": 2, "seq_len": 32}
EVEN = LLAMA | {"vocab_size": 300}
SEQUENCE = {"sequence_parallel": True}
FP32 = {"precision": "fp32"}
NO_POLICY = {"policy": None}
RECOMPUTE = {"recompute": "full"}
RECOMPUTED = {"recompute": True}
PLAN_OF: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "tp": ({}, {}),
    "sequence": (SEQUENCE, {"plan": "sequence parallel"}),
    "loss": (SEQUENCE | {"cross_entropy": "vocab-parallel"}, {"plan": "loss parallel"}),
}
"""memcalc's options and the oracle's."""

CASES: dict[str, Case] = {
    "1f1b, first": Case("1f1b", 3, 0, 4),
    "1f1b, middle": Case("1f1b", 3, 1, 4),
    "gpipe, last": Case("gpipe", 2, 1, 3),
    "zero 2, fp32, first": Case("1f1b", 2, 0, 3, dp=1, options={**ZERO_2, **FP32}, real={**KEPT, **NO_POLICY}),
    "reduced in bf16": Case("1f1b", 2, 0, 3, options={"grad_dtype": "bf16"}, real={"reduced": torch.bfloat16}),
    "recompute": Case("1f1b", 2, 1, 3, options=RECOMPUTE, real=RECOMPUTED),
    "recompute op": Case("1f1b", 2, 1, 3, options={"recompute": "op"}, real={"recompute": "op"}),
    "hybrid": Case("1f1b", 2, 0, 2, dp=4, options={"shard_group": 2}, real={"replicas": 2}, workload=SHALLOW),
    "interleaved": Case("interleaved", 2, 0, 4, chunks=2),
    "zero-bubble, first": Case("zero-bubble", 2, 0, 3, options=ZERO_2, real=KEPT),
    "zero-bubble, last": Case("zero-bubble", 2, 1, 3, options=ZERO_2, real=KEPT),
}  # fmt: skip
OF_LOSS = ("gpipe, last", "recompute", "zero-bubble, last")
"""The last stage's: the loss is there."""


def tensor_parallel(case: Case, plan: str) -> Case:
    options, real = PLAN_OF[plan]
    workload = SHALLOW if case.workload is SHALLOW else WORKLOAD
    return case._replace(tp=2, options={**case.options, **options}, real={**case.real, **real}, workload=workload)


@pytest.mark.parametrize(
    ("plan", "name"),
    [*((plan, name) for plan in ("tp", "sequence") for name in CASES), *(("loss", name) for name in OF_LOSS)],
)
def test_a_step(plan: str, name: str) -> None:
    case = tensor_parallel(CASES[name], plan)
    check(*both(case, EVEN | {"num_hidden_layers": {1: 5, 2: 4}[case.chunks]}))


def test_parts_that_are_not_equal() -> None:
    """Vocabulary and feed-forward width are cut as torch.chunk does; the gradient of the whole table waits for the last."""
    check(*both(tensor_parallel(CASES["1f1b, first"], "tp"), LLAMA | {"intermediate_size": 97}))


SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 300,
    "num_hidden_layers": 2, "tie_word_embeddings": False,
}  # fmt: skip
FAMILIES = [
    (model_type, plan)
    for model_type, plan in (
        ("mistral", "sequence"), ("qwen2", "tp"), ("qwen3", "sequence"), ("gemma", "tp"), ("starcoder2", "sequence"),
        ("cohere", "loss"), ("nemotron", "sequence"), ("apertus", "tp"), ("jais2", "loss"), ("internlm3", "tp"),
        ("olmo2", "tp"), ("phi3", "tp"), ("glm4", "tp"), ("helium", "tp"), ("minimax_m2", "tp"),
    )
    if model_type in STAGED and model_type in (supporting(lambda s: s.tensor_parallel) if plan == "tp" else PLAIN)
]  # fmt: skip


def config_of(model_type: str) -> dict[str, Any]:
    """A small model whose parts are equal on two ranks and whose window is longer than the sequence."""
    fields = step_cases(model_type)[0].fields
    more = {"head_dim": 16} if "head_dim" in fields else {}
    more |= {"sliding_window": 64} if fields.get("sliding_window") else {}
    return fields | dict.fromkeys(DROPOUTS, 0.0) | SIZES | more | dict.fromkeys({"use_qk_norm"} & fields.keys())


@pytest.mark.parametrize(("model_type", "plan"), FAMILIES)
def test_a_step_of_another_family(model_type: str, plan: str) -> None:
    check(*both(tensor_parallel(Case("1f1b", 2, 1, 2), plan), config_of(model_type)))


def test_halves_skip_what_sums_the_gradients_of_norms_within_the_heads() -> None:
    """Why such models are refused with zero-bubble: the hooks of transformers' plan are not run."""
    case = tensor_parallel(Case("zero-bubble", 2, 1, 2, options=ZERO_2, real=KEPT), "tp")
    with pytest.raises(
        memcalc.InputError, match=r"^--tp 2: with schedule zero-bubble torch's split backward skips the hooks"
    ):
        both(case, config_of("qwen3"))
    report, real = both(case._replace(schedule="gpipe", real=KEPT), config_of("qwen3"))
    assert said(report) == counted(real)
    assert ("tp, backward", "all_reduce", 16 * 2) in said(report)


def test_stages_send_shards_of_a_sequence() -> None:
    def of_one(**options: Any) -> int:
        report = memcalc.estimate(
            "llama-7b", gpus=16, tp=4, pp=2, zero=3, engine="fsdp2", global_batch_size=16, **options
        )
        return next(c.payload // c.calls for c in report.collectives if c.axis == "pp")

    assert of_one(sequence_parallel=False) == 4 * of_one(sequence_parallel=True) == 2048 * 4096 * 2


def test_equal_calls_of_all_layers_are_one_row() -> None:
    report = memcalc.estimate(
        "llama-7b", gpus=16, tp=4, pp=2, zero=3, engine="fsdp2", global_batch_size=16, sequence_parallel=True
    )
    rows = [(c.phase, c.collective, c.name) for c in report.collectives if c.axis == "tp"]
    assert len(rows) == len(set(rows))


def test_all_ranks_hold_the_whole_model() -> None:
    report = memcalc.estimate("llama-7b", gpus=16, tp=4, pp=2, zero=3, engine="fsdp2", global_batch_size=16)
    split = sum(one.total("parameters") for one in report.each_rank()) * report.setup.dp // 4
    norms = 65 * 4096
    assert 4 * (split - norms) + norms == 6738415616
