"""DeepSpeed 0.19.8's AutoEP itself against `--engine deepspeed --ep`: every collective, and the peak of every phase to the
byte."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from auto_ep_cases import CONFIGS
from deepspeed_oracle import OPTIONS, PRECISIONS, SIZES, Ranked, deepspeed_step
from records import on_record

import memcalc
from memcalc.engines.deepspeed import zero_layout
from memcalc.hardware.cost import Cost
from memcalc.inputs.model import Model
from memcalc.layout.auto_ep import on_rank

MIXTRAL = {"model_type": "mixtral", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
           "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 500, "num_local_experts": 8,
           "num_experts_per_tok": 2, "head_dim": 16}  # fmt: skip
QWEN3 = {"model_type": "qwen3_moe", "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32,
         "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 500,
         "num_experts": 8, "num_experts_per_tok": 4, "head_dim": 16, "mlp_only_layers": [0]}  # fmt: skip

PHASES = ("forward", "backward", "step")
Sent = dict[tuple[str, str, int], tuple[int, int]]
"""(collective, dtype, ranks) -> calls and bytes."""


def ours(config: dict[str, Any], **how: Any) -> memcalc.Report:
    """The estimate of the setup of an oracle's run."""
    gpus, batch = how["gpus"], how.get("micro_batch_size", 1)
    names = ("ep", "zero", *OPTIONS)
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
    """Without groups of one, which send nothing, and without the numbers by which ZeRO-3's ranks compare notes."""
    calls: Counter[tuple[str, str, int]] = Counter()
    payload: Counter[tuple[str, str, int]] = Counter()
    for (collective, name, elements, ranks), count in ranked.by_group.items():
        if ranks > 1 and collective != "broadcast":
            dtype, itemsize = SIZES[name]
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
    named = {OPTIONS.get(name, name): value for name, value in how.items()}
    runs = [deepspeed_step(config, rank=rank, steps=3 if how["zero"] == 3 else 2, **named) for rank in ranks]
    report = ours(config, **how)
    assert estimated(report) == sent(runs[0])
    highest = {phase: max(getattr(run, phase) for run in runs) for phase in PHASES}
    assert report.phases == highest


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_stage_0(precision: str) -> None:
    check(MIXTRAL, gpus=4, ep=2, zero=0, precision=precision)


@pytest.mark.parametrize("model_type", ["qwen2_moe", "qwen3_5_moe_text", "deepseek_v2", "deepseek_v3"])
def test_families(model_type: str) -> None:
    """Shared experts with and without a gate, corrected scores, groups of experts."""
    check({"model_type": model_type, **CONFIGS[model_type]}, gpus=8, ep=4, zero=0, micro_batch_size=2, seq_len=12)


def test_stage_1_over_three_ranks_with_the_same_experts() -> None:
    """A number of rows that is no multiple of 8."""
    check(MIXTRAL, (0, 1, 4), gpus=6, ep=2, zero=1, seq_len=5, precision="fp16", reduce_bucket_size=1_000_000)


def test_stage_1_in_several_buckets() -> None:
    """One rank alone has its experts: they are reduced among nobody."""
    check(QWEN3, (0, 1, 2, 3), gpus=4, ep=4, zero=1, micro_batches=2, reduce_bucket_size=20_000)


def test_stage_2_recomputes() -> None:
    how = {"recompute": True, "seq_len": 13, "micro_batch_size": 3, "micro_batches": 2, "reduce_bucket_size": 1_000_000}
    check(QWEN3, (0, 1, 2, 3), gpus=4, ep=4, zero=2, **how)


@on_record
def experts_of_a_group() -> int:
    """The most elements by DeepSpeed's default."""
    from deepspeed.moe import utils

    (most,) = utils.split_params_into_different_moe_groups_for_optimizer.__defaults__
    return most


@pytest.mark.parametrize(("zero", "most"), [(0, 20_000), (2, 50_000)])
def test_experts_are_cut_into_groups(zero: int, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One or two matrices of 24 576 elements in a group, which has a flat buffer, a norm and a gather of its own."""
    assert experts_of_a_group() == zero_layout.EXPERTS_OF_A_GROUP
    monkeypatch.setattr(zero_layout, "EXPERTS_OF_A_GROUP", most)
    check(
        MIXTRAL, (1,), gpus=4, ep=2, zero=zero, group_size=most, **({"reduce_bucket_size": 1_000_000} if zero else {})
    )


NOTHING_KEPT = {"param_persistence_threshold": 0, "max_live_parameters": 0, "max_reuse_distance": 0}
SOME_KEPT = {"param_persistence_threshold": 1000, "max_live_parameters": 60_000, "max_reuse_distance": 40_000,
             "prefetch_bucket_size": 20_000, "reduce_bucket_size": 60_000}  # fmt: skip


def test_stage_3() -> None:
    """With DeepSpeed's thresholds all parameters stay whole; a bucket ends where experts follow others."""
    check(MIXTRAL, gpus=8, ep=2, zero=3, reduce_bucket_size=1_000_000)


def test_stage_3_gathers_experts_among_those_that_have_them() -> None:
    options = {**NOTHING_KEPT, "reduce_bucket_size": 60_000, "sub_group_size": 50_000}
    check(MIXTRAL, gpus=6, ep=2, zero=3, micro_batches=2, precision="fp32", **options)


def test_stage_3_recomputes_experts_of_one_rank_alone() -> None:
    check(QWEN3, gpus=4, ep=4, zero=3, recompute=True, **SOME_KEPT)


@pytest.mark.parametrize("model_type", ["deepseek_v3", "qwen2_moe"])
def test_stage_3_of_families(model_type: str) -> None:
    config = {"model_type": model_type, **CONFIGS[model_type]}
    check(config, gpus=8, ep=4, zero=3, precision="fp16", micro_batch_size=2, seq_len=12, **SOME_KEPT)


@pytest.mark.live
@pytest.mark.parametrize("zero", [0, 3])
def test_deepspeed_itself_takes_the_ranks_of_a_sequence_for_tensor_parallel_ones(zero: int) -> None:
    """What `--ep` with `--cp` is refused for: once it goes, AutoEP can be modelled over shared sequences."""
    with pytest.raises(
        ValueError, match=r"tensor model parallelism from mpu \(bwc_tensor_model_parallel_world_size=2\)"
    ):
        deepspeed_step(MIXTRAL, gpus=4, cp=2, ep=2, zero=zero)


@pytest.mark.live
def test_stage_3_takes_no_shared_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    """With an mpu that has one tensor-parallel rank it comes so far."""
    from deepspeed.runtime.sequence_parallel import parallel_state_sp

    monkeypatch.setattr(parallel_state_sp, "get_tensor_model_parallel_world_size", lambda: 1, raising=False)
    with pytest.raises(AssertionError, match="AutoEP with ZeRO Stage 3 does not support sequence parallelism yet"):
        deepspeed_step(MIXTRAL, gpus=4, cp=2, ep=2, zero=3)


# --- properties


def estimate(config: Any = MIXTRAL, **options: Any) -> memcalc.Report:
    return memcalc.estimate(config, **{"engine": "deepspeed", "gpus": 8, "ep": 4, "seq_len": 64, **options})


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_one_rank_of_experts_is_what_it_was(zero: int) -> None:
    assert estimate(zero=zero, ep=1).to_dict() == estimate(zero=zero, ep=None).to_dict()


@pytest.mark.parametrize("ep", [2, 4, 8])
@pytest.mark.parametrize("ranks", [8, 24])
def test_partitions_hold_every_element_once(ep: int, ranks: int) -> None:
    model = memcalc.load_model(QWEN3)
    rank = Model("", model.model_type, on_rank(model.program, model.model_type, ep, 1.0))
    held = [sum(part.size - part.padding for part in own) for own in zero_layout.partitions(rank, ranks)]
    assert sum(held) == model.num_parameters
    assert all(sum(part.size for part in own) == zero_layout.own_elements(rank, ranks) for own in
               zero_layout.partitions(rank, ranks))  # fmt: skip


def test_what_is_sent_for_the_experts() -> None:
    """Rows of all layers there and back; gradients of the experts among the ranks that have the same ones."""
    report = estimate(zero=2, gpu="h100-80gb", gpus_per_node=4, recompute="none")
    rows = 64 * 2 * 64 * 2
    tokens = [c for c in report.collectives if c.axis == "ep" and c.dtype == "bf16"]
    assert {(c.phase, c.collective, c.group_size, c.calls, c.payload) for c in tokens} == {
        (phase, "all_to_all", 4, 3, 3 * rows) for phase in ("forward", "backward")
    }
    assert {c.layer for c in tokens} == {"model.layers.*"}
    (reduced,) = [c for c in report.collectives if c.name.startswith("gradient buckets of the experts")]
    assert (reduced.axis, reduced.group_size, reduced.payload) == ("dp", 2, 3 * 3 * 2 * 64 * 96 * 2)
    (time,) = [cost for c, cost in zip(report.collectives, report.costs, strict=True) if c is reduced]
    assert isinstance(time, Cost)
    assert time.link == "network"  # neighbours of the same experts are ep ranks apart, here a node


def test_a_busy_expert_needs_more() -> None:
    """Its rank gets more rows; what a rank sends is the same."""
    even, uneven = estimate(), estimate(expert_imbalance=2.0)
    rows = {c.name: c.payload for c in even.collectives if c.axis == "ep"}
    busy = {c.name: c.payload for c in uneven.collectives if c.axis == "ep"}
    assert busy["tokens to experts"] == rows["tokens to experts"]
    assert (
        2 * busy["outputs of experts"] == 3 * rows["outputs of experts"]
    )  # one of its two experts has twice its share
    assert uneven.phases["forward"] > even.phases["forward"]
    assert estimate(expert_imbalance=1.0).phases == even.phases


@pytest.mark.parametrize(
    ("config", "options", "line"),
    [
        (MIXTRAL, {"gpus": 6}, "--ep 4: does not divide dp = 6, whose ranks share the experts; allowed: 1, 2, 3, 6"),
        (MIXTRAL, {"gpus": 9, "ep": 3}, "--ep 3: mixtral has 8 experts, which 3 ranks cannot share; allowed: 1, 2, 4, 8"),
        (MIXTRAL, {"tp": 2}, r"--tp 2: DeepSpeed's AutoEP \(ep 4\) refuses Megatron-DeepSpeed's tensor parallelism"),
        (MIXTRAL, {"pp": 2}, r"--pp 2: DeepSpeed's AutoEP \(ep 4\) looks for transformers' experts.*; allowed: 1"),
        (MIXTRAL, {"cp": 2}, r"--cp 2: DeepSpeed's AutoEP \(ep 4\) refuses .* as such; allowed: 1, or --ep 1"),
        (MIXTRAL, {"cp": 2, "zero": 3}, "--cp 2: .*; with ZeRO-3 it refuses any shared sequence; allowed: 1, or --ep 1"),
        (MIXTRAL, {"etp": 2}, "--etp 2: DeepSpeed has no separate tensor parallelism for experts .*; allowed: 1"),
        (MIXTRAL, {"recompute": "op"}, "--recompute op: with engine deepspeed and ep above 1 .*none, full"),
        (MIXTRAL, {"kernels": "fused"}, "--kernels fused: with engine deepspeed and ep above 1 .*hf"),
        ({**MIXTRAL, "hidden_act": "gelu"}, {}, "--ep 4: AutoEP computes SwiGLU, the experts of mixtral have gelu"),
        ({"model_type": "deepseek_v2", **CONFIGS["deepseek_v2"], "topk_method": "greedy", "n_group": 8, "topk_group": 2},
         {}, "--ep 4: AutoEP takes 2 of 8 groups of the 8 experts that deepseek_v2 has"),
        ("llama-7b", {}, "--ep 4: DeepSpeed's AutoEP has no preset for llama; allowed: 1, or one of mixtral"),
        ("olmoe-1b-7b", {}, "--ep 4: DeepSpeed's AutoEP has no preset for olmoe"),
    ],
)  # fmt: skip
def test_refusals(config: Any, options: dict[str, Any], line: str) -> None:
    with pytest.raises(memcalc.InputError, match=line):
        estimate(config, **options)


def test_a_number_of_parameters_has_no_experts() -> None:
    with pytest.raises(memcalc.InputError, match="--ep 2: a number of parameters does not tell which weights"):
        memcalc.estimate(params="7B", gpus=2, ep=2, engine="deepspeed")
