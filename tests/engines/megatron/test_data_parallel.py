"""Gradients, their norm and updated weights of Megatron's data-parallel ranks, with one and several instances of the distributed
optimizer, as Megatron-Core's DistributedDataParallel sends them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from megatron_ddp_oracle import sent_for

import memcalc
from memcalc.engines.megatron.engine import stages, weights_of
from memcalc.setup.setup import Setup

LLAMA: dict[str, Any] = {
    "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 96, "intermediate_size": 80, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 500, "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip
MIXTRAL = {**LLAMA, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "no shards": (LLAMA, {"gpus": 4}),
    "one instance": (LLAMA, {"gpus": 4, "zero": 1}),
    "shards that pad": (LLAMA, {"gpus": 3, "zero": 1}),
    "two instances": (LLAMA, {"gpus": 8, "zero": 1, "shard_group": 4}),
    "four instances over context-parallel ranks": (LLAMA, {"gpus": 16, "tp": 2, "cp": 2, "zero": 1, "shard_group": 2}),
    "an instance of one rank": (LLAMA, {"gpus": 4, "zero": 1, "shard_group": 1}),
    "stages": (LLAMA, {"gpus": 8, "tp": 2, "pp": 2}),
    "stages, shards": (LLAMA, {"gpus": 8, "tp": 2, "pp": 2, "zero": 1}),
    "stages, two instances": (LLAMA, {"gpus": 8, "pp": 2, "zero": 1, "shard_group": 2}),
    "experts that all ranks have": (MIXTRAL, {"gpus": 4, "zero": 1}),
    "experts that all slices have": (MIXTRAL, {"gpus": 8, "tp": 2, "etp": 1, "zero": 1}),
    "experts of slices and stages": (MIXTRAL, {"gpus": 16, "tp": 2, "pp": 2, "ep": 2}),
    "experts that slices share": (MIXTRAL, {"gpus": 16, "tp": 2, "etp": 1, "ep": 4}),
    "experts": (MIXTRAL, {"gpus": 8, "ep": 2, "zero": 1}),
    "experts, no shards": (MIXTRAL, {"gpus": 8, "ep": 2}),
    "experts, two instances": (MIXTRAL, {"gpus": 16, "ep": 4, "zero": 1, "shard_group": 8}),
    "fp16": (LLAMA, {"gpus": 8, "tp": 2, "zero": 1, "precision": "fp16-mixed"}),
    "fp16, experts": (MIXTRAL, {"gpus": 8, "ep": 2, "zero": 1, "precision": "fp16-mixed"}),
    "fp16, experts, no shards": (MIXTRAL, {"gpus": 8, "pp": 2, "ep": 2, "precision": "fp16-mixed"}),
    "experts of one rank an instance": (MIXTRAL, {"gpus": 8, "ep": 4, "zero": 1, "shard_group": 4}),
}


def shapes_of(model: dict[str, Any], setup: Setup, rank: int) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Of the rank's weights, those of its experts apart."""
    stage = stages(memcalc.load_model(model), setup)[rank]
    dense, experts = list[tuple[int, ...]](), list[tuple[int, ...]]()
    for weight, copies in weights_of(stage).items():
        shape = tuple(dim.size for dim in weight.shape)
        (experts if weight.component == "experts" else dense).extend([shape] * copies)
    return dense, experts


@pytest.mark.parametrize("case", CASES)
def test_what_data_parallel_ranks_send(case: str) -> None:
    model, options = CASES[case]
    report = memcalc.estimate(model, engine="megatron", seq_len=16, **options)
    setup = report.setup
    instances = setup.dp * setup.cp // setup.shards if setup.zero else 1
    dense, experts = shapes_of(model, setup, report.to_dict()["memory"]["rank"]["pp"])
    sent = sent_for(
        dense, experts, world_size=setup.gpus, zero=setup.zero, fp16=setup.precision == "fp16-mixed",
        tensor_model_parallel_size=setup.tp, pipeline_model_parallel_size=setup.pp, context_parallel_size=setup.cp,
        expert_model_parallel_size=setup.ep, expert_tensor_parallel_size=setup.etp,
        num_distributed_optimizer_instances=instances,
    )  # fmt: skip
    whole = [c for c in report.collectives if c.axis == "dp" or c.payload == 4]
    ours = [(c.collective, c.payload, c.group_size) for c in whole]
    assert Counter(ours) == Counter(one for one in sent if one[2] > 1)


def test_stages_without_experts_take_part_in_what_is_summed_over_experts() -> None:
    """_get_param_groups gathers what all ranks have, and a stub optimizer takes part (megatron/core/optimizer)."""
    model = memcalc.load_model("deepseek-v3").program.config
    assert model.first_k_dense_replace == 3
    options: dict[str, Any] = {
        "gpus": 32,
        "ep": 2,
        "pp": 16,
        "first_stage_layers": 3,
        "last_stage_layers": 2,
        "seq_len": 64,
    }
    for rank in (0, 1):
        report = memcalc.estimate("deepseek-v3", engine="megatron", precision="fp16-mixed", pp_rank=rank, **options)
        numbers = {(c.axis, c.name, c.group_size) for c in report.collectives if c.payload == 4}
        assert numbers == {
            ("pp", "gradient norm", 16), ("pp", "overflow check", 16),
            ("ep", "gradient norm of experts", 32), ("ep", "overflow check of experts", 32),
        }  # fmt: skip


@pytest.mark.parametrize(
    ("options", "axis", "ranks"),
    [
        ({"gpus": 2, "tp": 2, "zero": 1}, "tp", 2),
        ({"gpus": 4, "tp": 2, "pp": 2, "zero": 1}, "tp", 4),
        ({"gpus": 2, "pp": 2, "zero": 1}, "pp", 2),
        ({"gpus": 4, "tp": 2, "cp": 2, "zero": 1}, "cp", 4),
        ({"gpus": 4, "tp": 2, "zero": 1, "shard_group": 1}, "tp", 2),
        ({"gpus": 4, "tp": 2, "zero": 1}, "dp", 4),
    ],
)
def test_a_norm_counts_for_an_axis_that_its_group_spans(options: dict[str, Any], axis: str, ranks: int) -> None:
    """get_grad_stats_parallel_group is the distributed optimizer's instance (megatron/core/optimizer/__init__.py), which
    spans no data-parallel ranks where there are none."""
    report = memcalc.estimate(LLAMA, engine="megatron", precision="fp16-mixed", seq_len=16, **options)
    numbers = {(c.name, c.axis, c.group_size) for c in report.collectives if c.payload == 4}
    assert numbers == {("gradient norm", axis, ranks), ("overflow check", axis, ranks)}
    setup = report.setup
    dense, experts = shapes_of(LLAMA, setup, 0)
    sent = sent_for(
        dense, experts, world_size=setup.gpus, zero=setup.zero, fp16=True, tensor_model_parallel_size=setup.tp,
        pipeline_model_parallel_size=setup.pp, context_parallel_size=setup.cp,
        num_distributed_optimizer_instances=setup.dp * setup.cp // setup.shards,
    )  # fmt: skip
    assert [size for _, nbytes, size in sent if nbytes == 4] == [ranks, ranks]


def test_counts_of_tokens_count_for_an_axis_that_has_ranks() -> None:
    """They are summed over all ranks of a stage (moe_utils.py, get_updated_expert_bias)."""
    for options, axis in (({"gpus": 2, "tp": 2}, "tp"), ({"gpus": 4, "tp": 2}, "dp")):
        report = memcalc.estimate("deepseek-v3", engine="megatron", seq_len=64, etp=1, ep=2, **options)
        counts = [c for c in report.collectives if c.name.startswith("tokens per expert, for")]
        assert [(c.axis, c.group_size) for c in counts] == [(axis, options["gpus"])]


def test_the_buffers_padding_is_a_row() -> None:
    """Of the weights' buffer and of that of their main gradients; a weight has a place of its own without shards."""
    report = memcalc.estimate(LLAMA, engine="megatron", gpus=3, zero=1, seq_len=16)
    held = {c: sum(i.nbytes for i in report.items if i.component == c) for c in ("parameters", "gradients")}
    padding = sum(i.nbytes for i in report.items if i.component == "buffers" and "padding" in i.name)
    scattered = next(c.payload for c in report.collectives if c.collective == "reduce_scatter")
    assert held["parameters"] + held["gradients"] + padding == scattered // 4 * (2 + 4)
    assert padding > 0
    whole = memcalc.estimate(LLAMA, engine="megatron", gpus=3, seq_len=16)
    assert not [i for i in whole.items if "padding" in i.name]


def test_states_are_those_of_one_instance() -> None:
    options: dict[str, Any] = {"engine": "megatron", "gpus": 64, "tp": 4, "zero": 1, "seq_len": 64}
    shard, whole = (
        memcalc.estimate("llama-7b", **options, shard_group=4).total("optimizer_states"),
        memcalc.estimate("llama-7b", **options).total("optimizer_states"),
    )
    assert shard == 4 * whole  # a llama-7b's shards divide by 16 ranks


def test_experts_have_as_many_instances_as_the_others() -> None:
    """parallel_state.py: 16 dense ranks in two instances of 8, their 4 expert-data-parallel ranks in two of 2."""
    report = memcalc.estimate("mixtral-8x7b", engine="megatron", gpus=16, ep=4, zero=1, shard_group=8, seq_len=64)
    groups = {(c.name, c.collective): c.group_size for c in report.collectives if c.axis == "dp"}
    assert groups == {
        ("main gradients", "reduce_scatter"): 8,
        ("main gradients, between instances of the optimizer", "all_reduce"): 2,
        ("updated weights", "all_gather"): 8,
        ("main gradients of experts", "reduce_scatter"): 2,
        ("main gradients of experts, between instances of the optimizer", "all_reduce"): 2,
        ("updated experts", "all_gather"): 2,
        ("gradient norm", "all_reduce"): 8,
    }


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"zero": 1, "shard_group": 3}, "--shard-group 3: does not divide dp·cp = 16; allowed: 1, 2, 4, 8, 16"),
        (
            {"shard_group": 4},
            "--shard-group 4: with zero 0 nothing is sharded; allowed: 16 (all of dp·cp), or --zero 1",
        ),
        (
            {"zero": 1, "ep": 8, "shard_group": 4},
            "--shard-group 4: 4 instances of the optimizer do not divide the experts' 2 data-parallel ranks; allowed: 8, 16",
        ),
    ],
)
def test_refused_by_name(options: dict[str, Any], line: str) -> None:
    with pytest.raises(memcalc.InputError) as error:
        memcalc.estimate("mixtral-8x7b", engine="megatron", gpus=16, seq_len=64, **options)
    assert str(error.value) == line
