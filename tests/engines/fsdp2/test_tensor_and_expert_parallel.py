"""FSDP2 over transformers' tensor and expert parallelism together against the real three: every phase's peak, what is alive
after forward and every collective, byte for byte, on rank 0 of a fake process group in which every rank sends what this one
does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fsdp2_oracle import degrees_of, sharded_step
from steps_compared import check_step, check_step_and_forward, of_the_plan, over_dp, phases
from tensor_parallel_cases import config_of

import memcalc
from memcalc.estimation.report import Report

MIXTRAL: dict[str, Any] = {
    "model_type": "mixtral", "hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 301, "num_local_experts": 8,
}  # fmt: skip
"""Experts of which no rank could have a part that grouped_mm takes."""
EIGHT = {"mesh": (4,), "tensor_parallel": 2, "expert_parallel": 4, "micro_batch_size": 2, "seq_len": 32}
"""Four batches, each on two ranks; two copies of the experts on four ranks each."""
SHALLOW = {"micro_batch_size": 1, "seq_len": 8}
"""So few tokens that reductions set the peak."""
RECOMPUTE = ({"recompute": "full"}, {"recompute": True})
SETUPS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "zero 3": (MIXTRAL, {}, {}),
    "zero 2, tied, few tokens": (
        MIXTRAL | {"tie_word_embeddings": True},
        {"zero": 2, **SHALLOW},
        {"reshards": False, **SHALLOW},
    ),
    "one copy of the experts, recompute, few tokens, reduced in bf16": (
        MIXTRAL | {"num_hidden_layers": 8},
        {"ep": 8, "recompute": "full", "grad_dtype": "bf16", **SHALLOW},
        {"expert_parallel": 8, "recompute": True, "reduced": torch.bfloat16, **SHALLOW},
    ),
    "ep is tp: as many copies as batches": (MIXTRAL, {"ep": 2}, {"expert_parallel": 2}),
    "tp 4, fp16": (
        MIXTRAL | {"num_key_value_heads": 4},
        {"tp": 4, "precision": "fp16-mixed"},
        {"mesh": (2,), "tensor_parallel": 4, "policy": torch.float16},
    ),
    "one batch": (MIXTRAL, {"gpus": 2, "ep": 2}, {"mesh": (1,), "expert_parallel": 2}),
    "hybrid, three micro-batches": (
        MIXTRAL,
        {"shard_group": 2, "global_batch_size": 12, "sync_each_micro_batch": True, **SHALLOW},
        {"mesh": (2, 2), "micro_batches": 3, **SHALLOW},
    ),
    "hybrid, gradients of three micro-batches reduced with the last": (
        MIXTRAL,
        {"shard_group": 2, "global_batch_size": 12, **SHALLOW},
        {"mesh": (2, 2), "micro_batches": 3, "syncs": False, **SHALLOW},
    ),
    "hybrid, two copies in a group, bf16": (
        MIXTRAL,
        {"shard_group": 2, "ep": 2, "precision": "bf16"},
        {"mesh": (2, 2), "expert_parallel": 2, "policy": None, "dtype": torch.bfloat16},
    ),
    "a busy expert, recompute": (
        MIXTRAL,
        {"expert_imbalance": 3.0, "recompute": "full"},
        {"busiest": 3, "recompute": True},
    ),
    "one expert over four ranks": (
        MIXTRAL | {"num_local_experts": 4},
        {"gpus": 16},
        {"mesh": (8,)},
    ),
}


def both(config: dict[str, Any], options: dict[str, Any], real: dict[str, Any]) -> tuple[Report, Any]:
    theirs = sharded_step(dict(config), **EIGHT | {"implementation": "fused"} | real)
    workload = {name: (EIGHT | real)[name] for name in ("micro_batch_size", "seq_len")}
    setup = {"gpus": 8, "tp": 2, "ep": 4, "zero": 3, "optimizer_implementation": "fused"} | workload
    return memcalc.estimate(dict(config), **setup | options), theirs


@pytest.mark.parametrize("name", SETUPS)
def test_a_step(name: str) -> None:
    check_step_and_forward(*both(*SETUPS[name]))


@pytest.mark.parametrize(
    "model_type", ["qwen3_moe", "deepseek_v2", "granitemoeshared", "gpt_oss", "olmoe", "nemotron_h"]
)
def test_a_recomputed_step_of_another_family(model_type: str) -> None:
    config = config_of(model_type)
    program = memcalc.load_model(config).program
    workload = {"micro_batch_size": 2, "seq_len": 2 * program.routed[1], "attention": program.attention_kinds[0]}
    real = {"mesh": (2,), "expert_parallel": 2, "recompute": True, **workload}
    check_step(*both(config, {"gpus": 4, "ep": 2, "recompute": "full", **workload}, real))


def test_foreach_has_a_temporary_of_the_largest_of_three_groups() -> None:
    report, real = both(MIXTRAL, {"optimizer_implementation": "foreach"}, {"implementation": "foreach"})
    counters = 4 * len(report.model.weights())  # of CPU tensors they are on the same device
    assert phases(report)[2] == real.step - counters


# --- what it costs


def estimated(**options: Any) -> Report:
    return memcalc.estimate(MIXTRAL, **{"gpus": 16, "zero": 3, "engine": "fsdp2", "seq_len": 32} | options)


def test_dp_is_what_tp_leaves_and_experts_are_whole() -> None:
    setup = estimated(tp=2, ep=8).to_dict()["setup"]
    assert {name: setup[name] for name in ("dp", "tp", "ep", "etp")} == {"dp": 8, "tp": 2, "ep": 8, "etp": 1}


def test_copies_of_experts_are_on_as_many_ranks_as_are_left_of_dp_and_tp() -> None:
    expert = 3 * 48 * 72
    for degrees, ranks in (({"tp": 2, "ep": 8}, 2), ({"tp": 4, "ep": 4}, 4), ({"tp": 1, "ep": 8}, 2)):
        report = memcalc.estimate(MIXTRAL | {"num_key_value_heads": 4}, gpus=16, zero=3, seq_len=32, **degrees)
        (gathered,) = [c for c in report.collectives if c.name == "parameters, experts"]
        assert gathered.group_size == ranks
        own = max(8 // degrees["ep"], ranks)  # padded to one on each
        assert gathered.payload == 2 * own * expert * 2
    assert {group for _, group in over_dp(estimated(tp=2, ep=8))} == {2, 8}


def test_each_rank_of_a_group_sends_a_slice_of_its_tokens() -> None:
    one, two = of_the_plan(estimated(ep=8)), of_the_plan(estimated(tp=2, ep=8))
    rows = 32 * 2 * 48 * 2
    assert one["forward", "all_to_all", rows] == two["forward", "all_to_all", rows // 2] == 4
    assert (
        len([c for c in estimated(tp=2, ep=8).collectives if c.name == "tokens to experts"]) == 1
    )  # all layers' together
    whole = 32 * 48 * 2
    assert two["forward", "all_gather", whole] == two["backward", "all_gather", whole] == 2


def test_ranks_of_an_expert_group_are_consecutive() -> None:
    setup: dict[str, Any] = {"gpus": 32, "tp": 4, "ep": 8, "zero": 3, "seq_len": 128, "gpu": "h100-80gb"}
    report = memcalc.estimate("qwen3-30b-a3b", **setup)
    links = {
        c.name: cost.link for c, cost in zip(report.collectives, report.costs, strict=True) if hasattr(cost, "link")
    }
    assert links["tokens to experts"] == links["outputs of experts"] == "nvlink"
    assert links["parameters, experts"] == links["parameters, layers"] == "network"


# --- what is refused


@pytest.mark.parametrize(
    ("model", "options", "line"),
    [
        (MIXTRAL, {"tp": 4, "ep": 2}, "--tp 4: mixtral has 2 key/value heads"),
        (MIXTRAL | {"num_key_value_heads": 4}, {"tp": 4, "ep": 2},
         "--ep 2: is not a multiple of tp 4, which transformers' DistributedConfig needs; allowed: 1, 4, 8"),
        (MIXTRAL, {"tp": 2, "ep": 12},
         "--ep 12: does not divide gpus 16 / (tp 2 · pp 1 · cp 1) = dp 8 · tp 2 = 16, the ranks that experts are shared by"),
        (MIXTRAL, {"tp": 2, "ep": 8, "shard_group": 2}, "--ep 8: does not divide shard group 2 · tp 2 = 4, the ranks that"),
        (MIXTRAL, {"tp": 2, "ep": 16}, "--ep 16: mixtral has 8 experts, which 16 ranks cannot share evenly; allowed: 1, 2, 4"),
        (MIXTRAL, {"tp": 2, "ep": 2, "etp": 2}, "--etp 2: with engine fsdp2 and ep above 1 tp does not split experts"),
        (MIXTRAL | {"intermediate_size": 96}, {"tp": 2, "etp": 1}, "--etp 1: with engine fsdp2 transformers' tp_plan splits"),
        (MIXTRAL, {"tp": 2, "ep": 2, "seq_len": 33},
         "--seq-len 33: with tp 2 and ep 2: micro-batch 1 · 33 = 33 tokens do not make 2 equal slices"),
        (MIXTRAL, {"tp": 2, "ep": 2, "recompute": "op"}, "--recompute op: with engine fsdp2 and ep above 1 torch's selective"),
        (MIXTRAL, {"tp": 2, "ep": 2, "sequence_parallel": True}, "--sequence-parallel on: with engine fsdp2 for a mixtral is"),
        (MIXTRAL, {"tp": 2, "ep": 2, "cp": 2}, "--ep 2: with engine fsdp2 and cp 2 transformers' DistributedConfig"),
        (MIXTRAL, {"tp": 2, "ep": 2, "pp": 2}, "--ep 2: with engine fsdp2 and pp 2 transformers itself refuses to dispatch"),
    ],
)  # fmt: skip
def test_refused_by_name(model: dict[str, Any], options: dict[str, Any], line: str) -> None:
    with pytest.raises(memcalc.InputError) as error:
        memcalc.estimate(model, **{"gpus": 16, "zero": 3, "engine": "fsdp2", "seq_len": 32} | options)
    assert line in str(error.value)


@pytest.mark.parametrize(
    ("degrees", "line"), [((4, 4, 2), "must be a multiple of `tp_size`"), ((4, 2, 6), "must divide `fsdp_size")]
)
def test_transformers_itself_refuses(degrees: tuple[int, int, int], line: str) -> None:
    with pytest.raises(ValueError, match=line):
        degrees_of(*degrees)


@pytest.mark.parametrize(
    "options", [{"gpus": 6, "tp": 2, "ep": 4}, {"gpus": 16, "tp": 2, "ep": 16}, {"gpus": 16, "tp": 4, "ep": 2}], ids=str
)
def test_what_is_allowed_runs(options: dict[str, Any]) -> None:
    given: dict[str, Any] = options | {"engine": "fsdp2", "zero": 3, "seq_len": 64}
    with pytest.raises(memcalc.InputError) as error:
        memcalc.estimate("mixtral-8x7b", **given)
    for value in str(error.value).split("allowed: ")[1].split(", "):
        memcalc.estimate("mixtral-8x7b", **given | {"ep": int(value)})
