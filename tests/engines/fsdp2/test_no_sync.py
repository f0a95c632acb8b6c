"""FSDP2 whose gradients wait for a step's last micro-batch (`set_requires_gradient_sync(False)`) against torch's `fully_shard`:
every phase's peak and every collective, byte for byte, on rank 0 of a fake process group. Slices, shared sequences and
experts are in the tests of theirs."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
import torch
from cases import DROPOUTS, step_cases
from fsdp2_oracle import sharded_step
from kept_profiles import keeps
from steps_compared import check_step

import memcalc
from memcalc.core.dims import evaluate
from memcalc.estimation.report import Report
from memcalc.tape.profile import Choices, full_profile

LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 48, "intermediate_size": 100, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 10, "vocab_size": 301, "attention_bias": True,
}  # fmt: skip
LAYERS = LLAMA | {"vocab_size": 40, "num_hidden_layers": 4}
"""Of which the layers, not the logits, set the peak."""
BF16 = ({"precision": "bf16"}, {"policy": None, "dtype": torch.bfloat16})
FULL = ({"recompute": "full"}, {"recompute": True})
FEW = ({"micro_batch_size": 1, "seq_len": 4},) * 2
SETUPS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "zero 3": (LLAMA, {}, {}),
    "two micro-batches": (LLAMA, {}, {"micro_batches": 2}),
    "zero 2, four micro-batches": (LAYERS, {"zero": 2}, {"reshards": False, "micro_batches": 4}),
    "recompute": (LAYERS, *FULL),
    "zero 2, recompute, few tokens": (LAYERS, {"zero": 2} | FULL[0] | FEW[0], {"reshards": False} | FULL[1] | FEW[1]),
    "recompute op, tied": (LAYERS | {"tie_word_embeddings": True}, {"recompute": "op"}, {"recompute": "op"}),
    "fp32": (LAYERS, {"precision": "fp32"}, {"policy": None}),
    "bf16, few tokens": (LAYERS, BF16[0] | FEW[0], BF16[1] | FEW[1]),
    "fp16-mixed, two micro-batches": (
        LLAMA,
        {"precision": "fp16-mixed"},
        {"policy": torch.float16, "micro_batches": 2},
    ),
    "reduced in bf16, few tokens": (LAYERS, {"grad_dtype": "bf16"} | FEW[0], {"reduced": torch.bfloat16} | FEW[1]),
    "hybrid, few tokens": (LAYERS, {"shard_group": 4} | FEW[0], {"mesh": (2, 4)} | FEW[1]),
    "hybrid, recompute": (LAYERS, {"shard_group": 2} | FULL[0], {"mesh": (4, 2)} | FULL[1]),
    "hybrid, one GPU a shard": (LAYERS, {"shard_group": 1} | FEW[0], {"mesh": (3, 1)} | FEW[1]),
    "one GPU": (LAYERS, FEW[0], {"mesh": (1,)} | FEW[1]),
    "clipped": (LAYERS, {"clip_grad_norm": True} | FEW[0], {"clips": True} | FEW[1]),
}


def both(config: dict[str, Any], options: dict[str, Any], real: dict[str, Any]) -> tuple[Report, Any]:
    how = {"mesh": (7,), "micro_batch_size": 2, "seq_len": 33, "micro_batches": 3, "syncs": False} | real
    theirs = sharded_step(dict(config), implementation="fused", **how)
    gpus, batch = prod(how["mesh"]), how["micro_batch_size"]
    given = {"gpus": gpus, "global_batch_size": gpus * batch * how["micro_batches"], "micro_batch_size": batch}
    setup = {"engine": "fsdp2", "zero": 3, "seq_len": how["seq_len"], "optimizer_implementation": "fused"}
    return memcalc.estimate(dict(config), **setup | given | options), theirs


@pytest.mark.parametrize("name", SETUPS)
def test_a_step(name: str) -> None:
    check_step(*both(*SETUPS[name]))


@pytest.mark.parametrize("model_type", ["gpt2", "gemma2", "qwen3_moe", "deepseek_v3", "mamba2", "recurrent_gemma"])
def test_a_recomputed_step_of_another_family(model_type: str) -> None:
    case = step_cases(model_type)[0]
    config = dict(case.fields) | dict.fromkeys(DROPOUTS, 0.0)
    kind = {"attention": memcalc.load_model(config).program.attention_kinds[0]}
    workload = {"mesh": (4,), "micro_batch_size": 1, "seq_len": 16}
    check_step(*both(config, kind | FULL[0], kind | workload | FULL[1]))


DEEP = LLAMA | {"num_hidden_layers": 17}
EXPERTS: dict[str, Any] = {
    "model_type": "mixtral", "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 14, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 301, "num_local_experts": 8,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "options"),
    [
        (DEEP, {}),
        (DEEP, {"zero": 2, "recompute": "full"}),
        (DEEP, {"precision": "bf16", "recompute": "op"}),
        (DEEP, {"tp": 2, "sequence_parallel": True, "grad_dtype": "bf16"}),
        (EXPERTS, {"ep": 4}),
    ],
    ids=str,
)
def test_a_deep_stack_is_extended_as_it_would_run(config: dict[str, Any], options: dict[str, Any]) -> None:
    setup = {"engine": "fsdp2", "zero": 3, "gpus": 8, "seq_len": 32, "global_batch_size": 24, **options}
    report = memcalc.estimate(dict(config), **setup)
    made = report.rank.profiles[0]
    assert made.run.middle.more > 0
    models = [report.model, *(m for m in report.model.profiles.values() if hasattr(m, "profiles"))]
    ((model, key),) = [(m, key) for m in models for key, found in m.profiles.items() if keeps(found, made)]
    choices = Choices(*key[1 : 1 + len(Choices._fields)])
    whole = full_profile(model.program, choices, report.setup.micro_batch_size, report.setup.tokens_per_part)
    for size in ((1, 1), (1, 32), (3, 1000)):
        for ours, theirs in ((made.forward, whole.forward), (made.backward, whole.backward)):
            most = [max(evaluate(m.poly, *size) + m.gradients for m in moments) for moments in (ours, theirs)]
            assert most[0] == most[1]


SETUP: dict[str, Any] = {"gpus": 8, "zero": 3, "engine": "fsdp2", "seq_len": 512}


@pytest.mark.parametrize(("precision", "itemsize"), [("bf16-mixed", 4), ("bf16", 2), ("fp32", 4)])
def test_whole_gradients_are_there_in_forward(precision: str, itemsize: int) -> None:
    """Llama-2 7B on a few small GPUs: what sharding saves is not saved between micro-batches."""
    options = {**SETUP, "gpus": 4, "precision": precision, "global_batch_size": 16}
    waits, sync = (memcalc.estimate("llama-2-7b", **options, sync_each_micro_batch=on) for on in (False, True))
    shards = waits.model.num_parameters * itemsize // 4
    assert waits.phases["forward"] - sync.phases["forward"] == 3 * shards
    assert waits.total("gradients") >= 4 * shards


def test_with_one_micro_batch_nothing_changes() -> None:
    for options in (SETUP, {"gpus": 8, "engine": "ddp"}):
        by_default, on, off = (
            memcalc.estimate("gpt2", **options, sync_each_micro_batch=given) for given in (None, True, False)
        )
        assert by_default.setup.sync_each_micro_batch is False
        for other in (on, off):
            assert (other.phases, other.reserved) == (by_default.phases, by_default.reserved)
            assert other.collectives == by_default.collectives


def test_what_is_reduced_once_is_sent_once() -> None:
    """The norms' gradients of a sequence in parts, which every micro-batch has."""
    options = {**SETUP, "tp": 2, "sequence_parallel": True, "global_batch_size": 12}
    waits, sync = (memcalc.estimate("llama-7b", **options, sync_each_micro_batch=on) for on in (False, True))

    def calls(report: Report, kind: str) -> int:
        return sum(c.calls for c in report.collectives if c.collective == kind)

    assert calls(sync, "reduce_scatter") - calls(waits, "reduce_scatter") == 2 * 33
    assert calls(sync, "all_reduce") > calls(waits, "all_reduce")


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize(
    ("options", "why"),
    [
        (
            {"engine": "none"},
            "is an option of DDP and FSDP2 (plain PyTorch reduces nothing); allowed: with --engine ddp or fsdp2",
        ),
        (
            {"gpus": 8, "zero": 2},
            "is an option of DDP and FSDP2 (deepspeed has its own rule); allowed: with --engine ddp",
        ),
        ({"gpus": 8, "tp": 2}, "is an option of DDP and FSDP2 (megatron has its own rule); allowed: with --engine ddp"),
        (
            {**SETUP, "pp": 2, "global_batch_size": 8},
            "torch's pipeline schedules (pp 2) decide that: they reduce with the last micro-batch; allowed: leave it out",
        ),
    ],
)
def test_refused_by_name(options: dict[str, Any], why: str, given: bool) -> None:
    with pytest.raises(memcalc.InputError) as error:
        memcalc.estimate("llama-7b", **options, sync_each_micro_batch=given)
    assert f"--sync-each-micro-batch {'on' if given else 'off'}: {why}" in str(error.value)
    assert "\n" not in str(error.value)
