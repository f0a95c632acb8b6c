"""FSDP2 over transformers' expert parallelism against the real two: every parameter's shard, every phase's peak and every
collective, byte for byte, on rank 0 of a fake process group, with even routing."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
import torch
from cases import DROPOUTS, step_cases
from fsdp2_oracle import degrees_of, ranks, sharded_step
from oracle import build
from steps_compared import check_step, check_step_and_forward, of_the_plan, over_dp, phases
from transformers import CONFIG_MAPPING

import memcalc
from memcalc.estimation.report import Report
from memcalc.families import FAMILIES
from memcalc.layout.expert_parallel import expert_path, runs_dispatched, share_experts
from memcalc.validate import experts

MIXTRAL: dict[str, Any] = {
    "model_type": "mixtral", "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 301, "num_local_experts": 8,
}  # fmt: skip
QWEN3: dict[str, Any] = {
    "model_type": "qwen3_moe", "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "vocab_size": 301,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_experts": 16,
    "num_experts_per_tok": 4,
}  # fmt: skip
DEEPSEEK: dict[str, Any] = {  # keys as wide as values: of others the CPU has no fused kernel
    "model_type": "deepseek_v3", "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 301, "n_routed_experts": 16,
    "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8, "v_head_dim": 24, "first_k_dense_replace": 1, "n_shared_experts": 1,
}  # fmt: skip
EIGHT = {"mesh": (8,), "expert_parallel": 4, "micro_batch_size": 2, "seq_len": 32}
"""Two copies of the experts on four ranks each."""
SHALLOW = {"micro_batch_size": 1, "seq_len": 4}
"""So few tokens that reductions set the peak."""
RECOMPUTE = ({"recompute": "full"}, {"recompute": True})
SETUPS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "zero 3": (MIXTRAL, {}, {}),
    "zero 2": (MIXTRAL, {"zero": 2}, {"reshards": False}),
    "dp 4, ep 2": (MIXTRAL, {"gpus": 4, "ep": 2}, {"mesh": (4,), "expert_parallel": 2}),
    "one copy of the experts": (MIXTRAL, {"ep": 8}, {"expert_parallel": 8}),
    "one copy of the experts, recompute, few tokens, reduced in bf16": (
        MIXTRAL,
        {"ep": 8, "recompute": "full", "grad_dtype": "bf16", **SHALLOW},
        {"expert_parallel": 8, "recompute": True, "reduced": torch.bfloat16, **SHALLOW},
    ),
    "three experts over two ranks": (
        MIXTRAL | {"num_local_experts": 6},
        {"gpus": 4, "ep": 2, "seq_len": 24},
        {"mesh": (4,), "expert_parallel": 2, "seq_len": 24},
    ),
    "one expert over four ranks": (
        MIXTRAL | {"num_local_experts": 4},
        {"gpus": 16},
        {"mesh": (16,)},
    ),
    "seven layers, two micro-batches, few tokens": (
        MIXTRAL | {"num_hidden_layers": 7},
        {"global_batch_size": 16, "sync_each_micro_batch": True, **SHALLOW},
        {"micro_batches": 2, **SHALLOW},
    ),
    "seven layers, gradients of three micro-batches reduced with the last, few tokens": (
        MIXTRAL | {"num_hidden_layers": 7},
        {"global_batch_size": 24, **SHALLOW},
        {"micro_batches": 3, "syncs": False, **SHALLOW},
    ),
    "one copy of the experts, bf16, gradients of two micro-batches reduced with the last, recompute": (
        MIXTRAL,
        {"ep": 8, "recompute": "full", "precision": "bf16", "global_batch_size": 16, **SHALLOW},
        {
            "expert_parallel": 8,
            "recompute": True,
            "policy": None,
            "dtype": torch.bfloat16,
            "micro_batches": 2,
            "syncs": False,
            **SHALLOW,
        },
    ),
    "hybrid": (MIXTRAL, {"ep": 2, "shard_group": 4, **SHALLOW}, {"mesh": (2, 4), "expert_parallel": 2, **SHALLOW}),
    "hybrid, one copy in a group": (MIXTRAL, {"shard_group": 4, **SHALLOW}, {"mesh": (2, 4), **SHALLOW}),
    "a busy expert": (MIXTRAL, {"expert_imbalance": 3.0}, {"busiest": 3}),
    "a busy expert alone on its rank, recompute": (
        MIXTRAL,
        {"ep": 8, "expert_imbalance": 4.0, "recompute": "full"},
        {"expert_parallel": 8, "busiest": 4, "recompute": True},
    ),
    "bf16": (MIXTRAL, {"precision": "bf16"}, {"policy": None, "dtype": torch.bfloat16}),
    "fp16-mixed": (MIXTRAL, {"precision": "fp16-mixed"}, {"policy": torch.float16}),
    "qwen3_moe, some layers dense, recompute": (QWEN3 | {"mlp_only_layers": [1]}, *RECOMPUTE),
    "qwen3_moe, zero 2, recompute": (QWEN3, {"zero": 2, "recompute": "full"}, {"reshards": False, "recompute": True}),
    "deepseek_v3": (DEEPSEEK, {}, {}),
    "deepseek_v3, recompute": (DEEPSEEK, *RECOMPUTE),
}
"""A model, the options of an estimate, and the same of the real step."""


def both(config: dict[str, Any], options: dict[str, Any], real: dict[str, Any]) -> tuple[Report, Any]:
    theirs = sharded_step(dict(config), **EIGHT | {"implementation": "fused"} | real)
    workload = {name: (EIGHT | real)[name] for name in ("micro_batch_size", "seq_len")}
    setup = {"gpus": 8, "ep": 4, "zero": 3, "optimizer_implementation": "fused"} | workload
    return memcalc.estimate(dict(config), **setup | options), theirs


@pytest.mark.parametrize("name", SETUPS)
def test_a_step(name: str) -> None:
    check_step_and_forward(*both(*SETUPS[name]))


OTHERS = ("gpt_oss", "nemotron_h", "granitemoeshared", "qwen2_moe", "lfm2_moe")


@pytest.mark.parametrize("model_type", OTHERS)
def test_a_recomputed_step_of_another_family(model_type: str) -> None:
    config = config_of(model_type)
    model = memcalc.load_model(config)
    workload = {
        "micro_batch_size": 2,
        "seq_len": 2 * model.program.routed[1],
        "attention": model.program.attention_kinds[0],
    }
    real = {"mesh": (4,), "expert_parallel": 2, "recompute": True, **workload}
    check_step(*both(config, {"gpus": 4, "ep": 2, "recompute": "full", **workload}, real))


def test_minimax_of_one_dtype() -> None:
    """With a policy its lightning attention multiplies fp32 by bf16, which no product does."""
    workload = {"micro_batch_size": 2, "seq_len": 12}
    options = {"gpus": 4, "ep": 2, "precision": "bf16", **workload}
    real = {"mesh": (4,), "expert_parallel": 2, "policy": None, "dtype": torch.bfloat16, **workload}
    check_step(*both(config_of("minimax"), options, real))


def test_foreach_has_a_temporary_of_the_larger_of_two_groups() -> None:
    report, real = both(MIXTRAL, {"optimizer_implementation": "foreach"}, {"implementation": "foreach"})
    counters = 4 * len(report.model.weights())  # of CPU tensors they are on the same device
    assert phases(report)[2] == real.step - counters


def config_of(model_type: str) -> dict[str, Any]:
    return step_cases(model_type)[0].fields | dict.fromkeys(DROPOUTS, 0.0)


# --- the plan and the shards


@pytest.mark.parametrize("model_type", FAMILIES)
def test_the_plan_is_transformers(model_type: str) -> None:
    """Who has one, which module dispatches and which weights are split."""
    program = memcalc.load_model(config_of(model_type)).program
    plan: dict[str, str] = getattr(CONFIG_MAPPING[model_type], "base_model_ep_plan", None) or {}
    assert runs_dispatched(program) == ("ep_dispatch_experts" in plan.values())
    if not plan:
        return
    path = expert_path(program)
    assert path is not None
    assert path.partition(".")[2] in [name for name, style in plan.items() if style == "ep_dispatch_experts"]
    split = {w.name.partition(".")[2] for w in program.weights() if w.component == "experts"}
    assert split == {name for name, style in plan.items() if style == "grouped_gemm"}


@pytest.mark.parametrize("model_type", ["gpt_oss", "nemotron_h", "deepseek_v2", "granitemoe", "jamba", "hy_v3"])
def test_every_shard_is_transformers_and_those_of_all_ranks_are_the_whole(model_type: str) -> None:
    config = config_of(model_type)
    program = memcalc.load_model(config).program
    with ranks(2), torch.device("meta"):
        model: Any = build(config, program.attention_kinds[0], torch.float32)
        experts.share_experts(model, "cpu", degrees_of(2, 1, 2))
    theirs = {n: tuple(getattr(p, "_local_tensor", p).shape) for n, p in model.named_parameters()}
    whole, own = list(program.weights()), list(share_experts(program, 2, 1.0).weights())
    assert {w.name.replace("*", str(w.layer), 1): tuple(d.size for d in w.shape) for w in own} == theirs
    for one, part in zip(whole, own, strict=True):
        size, of_one = (prod(d.size for d in w.shape) for w in (one, part))
        assert size == of_one * (2 if one.component == "experts" else 1), one.name


def test_states_of_all_ranks_are_the_whole_model_s() -> None:
    report = memcalc.estimate(MIXTRAL | {"vocab_size": 304}, gpus=8, ep=2, zero=3, seq_len=32)
    assert 8 * report.total("parameters") == 4 * report.model.num_parameters
    assert 8 * report.total("optimizer_states") == 8 * report.model.num_parameters


# --- what it costs


def estimated(**options: Any) -> Report:
    return memcalc.estimate(MIXTRAL, **{"gpus": 8, "zero": 3, "engine": "fsdp2", "seq_len": 32} | options)


def test_degree_one_is_no_op() -> None:
    one = estimated(ep=1)
    assert one.rank.profiles[0].run.sent == ()
    assert {c.axis for c in one.collectives} == {"dp"}
    assert phases(one) == phases(estimated())


def test_expert_parallelism_takes_fsdp2_above_zero_1() -> None:
    assert memcalc.estimate(MIXTRAL, gpus=8, ep=4, zero=3, seq_len=32).setup.engine == "fsdp2"
    assert memcalc.estimate(MIXTRAL, gpus=8, ep=4, zero=1, seq_len=32).setup.engine == "megatron"


def test_a_layer_exchanges_counts_tokens_and_outputs_and_gathers_its_experts_where_there_are_copies() -> None:
    layers = {depth: _depth(depth, ep=4) for depth in (20, 21)}
    copies = 32 * 2 * 48 * 2
    counts, rows = ("forward", "all_to_all", 8 * 8), ("forward", "all_to_all", copies)
    difference = of_the_plan(layers[21]) - of_the_plan(layers[20])
    assert difference == {counts: 1, rows: 2, ("backward", "all_to_all", copies): 2}
    expert = 2 * 3 * 48 * 96 * 2
    gathered = [over_dp(layers[depth])["all_gather", 2] for depth in (21, 20)]
    assert [a - b for a, b in zip(*gathered, strict=True)] == [2, 2 * expert]
    assert over_dp(_depth(2, ep=8)).keys() == {("all_gather", 8), ("reduce_scatter", 8)}


def _depth(layers: int, **options: Any) -> Report:
    setup = {"gpus": 8, "zero": 3, "seq_len": 32, **options}
    return memcalc.estimate(MIXTRAL | {"num_hidden_layers": layers}, **setup)


def test_a_recomputed_layer_exchanges_them_again() -> None:
    calls = {how: of_the_plan(estimated(ep=4, recompute=how)) for how in ("none", "full")}
    copies = ("backward", "all_to_all", 32 * 2 * 48 * 2)
    assert calls["none"][copies] == 2 * 2
    assert calls["full"][copies] == 2 * 4
    assert calls["full"]["backward", "all_to_all", 64] == 2


def test_an_imbalance_gives_the_rank_more_rows() -> None:
    """Of its two experts one has three times its share: it receives 64 · (1 + 3) / 2 rows, and sends as many back."""
    even, uneven = estimated(ep=4), estimated(ep=4, expert_imbalance=3.0)
    row = 48 * 2
    calls = of_the_plan(uneven)
    assert calls["forward", "all_to_all", 64 * row] == 2
    assert calls["forward", "all_to_all", 128 * row] == 2
    assert calls["backward", "all_to_all", 128 * row] == 2
    assert uneven.peak > even.peak
    assert estimated(expert_imbalance=3.0).peak == estimated().peak


def test_fewer_experts_than_ranks_that_have_them_are_padded() -> None:
    """FSDP2 cuts the first dim: each of eight ranks has one of the four experts, or an empty one as large."""
    report = memcalc.estimate(MIXTRAL, gpus=16, ep=2, zero=3, seq_len=32)
    shapes = {w.name: row.shape[0].size for row in report.rank.holdings.always for w in report.model.weight_classes
              if row.component == "parameters" and row.name == w.name and w.component == "experts"}  # fmt: skip
    assert set(shapes.values()) == {1}
    (gathered,) = [c for c in report.collectives if c.name == "parameters, experts"]
    assert gathered.payload == 2 * 8 * 3 * 48 * 96 * 2


def test_experts_are_near_each_other_and_their_copies_far_apart() -> None:
    """Ranks of an expert group are consecutive (the mesh (efsdp, ep)): it stays in a node, and its copies are across nodes."""
    report = memcalc.estimate("qwen3-30b-a3b", gpus=32, ep=8, zero=3, seq_len=128, gpu="h100-80gb")
    links = {
        c.name: cost.link for c, cost in zip(report.collectives, report.costs, strict=True) if hasattr(cost, "link")
    }
    assert links["tokens to experts"] == "nvlink"
    assert links["parameters, experts"] == "network"
    hybrid = memcalc.estimate("qwen3-30b-a3b", gpus=32, ep=4, shard_group=8, zero=3, seq_len=128, gpu="h100-80gb")
    links = {
        c.name: cost.link for c, cost in zip(hybrid.collectives, hybrid.costs, strict=True) if hasattr(cost, "link")
    }
    assert links["parameters, experts"] == "nvlink"
    assert links["gradient shards over replicas, experts"] == "network"


# --- what is refused


@pytest.mark.parametrize(
    ("model", "options", "line"),
    [
        (MIXTRAL, {"ep": 3}, "--ep 3: does not divide gpus 8 / (tp 1 · pp 1 · cp 1) = dp 8, the ranks that experts are shared"),
        (MIXTRAL, {"ep": 8, "shard_group": 4}, "--ep 8: does not divide shard group 4, the ranks that experts are shared by;"),
        (MIXTRAL, {"ep": 16, "gpus": 16}, "--ep 16: mixtral has 8 experts, which 16 ranks cannot share evenly; allowed:"),
        (MIXTRAL, {"ep": 2, "pp": 2}, "--ep 2: with engine fsdp2 and pp 2 transformers itself refuses to dispatch tokens"),
        (MIXTRAL, {"ep": 2, "cp": 2}, "--ep 2: with engine fsdp2 and cp 2 transformers' DistributedConfig"),
        (MIXTRAL, {"ep": 2, "etp": 2}, "--etp 2: with engine fsdp2 and ep above 1 tp does not split experts;"),
        (MIXTRAL, {"ep": 2, "clip_grad_norm": True}, "--clip-grad-norm on: torch's clip_grad_norm_ cannot combine norms"),
        (MIXTRAL, {"ep": 2, "kernels": "fused"}, "--kernels fused: with engine fsdp2 and ep above 1 is not modelled"),
        (MIXTRAL, {"ep": 2, "precision": "bf16-autocast"}, "--precision bf16-autocast: with engine fsdp2 and ep above 1"),
        (MIXTRAL, {"ep": 2, "recompute": "op"}, "--recompute op: with engine fsdp2 and ep above 1 torch's selective"),
        ("llama-7b", {"ep": 2}, "--ep 2: llama-7b has no routed experts; allowed: 1"),
        (QWEN3 | {"mlp_only_layers": [0, 1, 2]}, {"ep": 2}, "--ep 2: qwen3_moe has no routed experts; allowed: 1"),
        (config_of("dbrx"), {"ep": 2}, "--ep 2: transformers has no ep_plan for dbrx; allowed: 1"),
        (config_of("llama4_text"), {"ep": 2}, "--ep 2: transformers has no ep_plan for llama4_text; allowed: 1"),
    ],
    ids=lambda given: "" if isinstance(given, dict) and "model_type" in given else str(given),
)  # fmt: skip
def test_what_is_refused(model: Any, options: dict[str, Any], line: str) -> None:
    with pytest.raises(memcalc.InputError) as error:
        memcalc.estimate(model, **{"gpus": 8, "zero": 3, "engine": "fsdp2", "seq_len": 32} | options)
    assert line in str(error.value)


def test_a_number_of_parameters_has_no_experts() -> None:
    with pytest.raises(memcalc.InputError, match="--ep 2: a number of parameters does not tell which weights"):
        memcalc.estimate(params="7B", gpus=8, zero=3, ep=2)


def test_torch_itself_fails_with_a_policy_over_shared_experts() -> None:
    """What `--recompute op` is refused for. The layer's last product starts the recomputation before the experts' backward
    has begun, and FSDP2 takes their forward for that of a whole model, with one call more."""
    with pytest.raises(RuntimeError, match="encountered during backward but not found in storage"):
        sharded_step(DEEPSEEK, **EIGHT | {"expert_parallel": 8, "recompute": "op"})


def test_transformers_itself_refuses_experts_that_do_not_divide() -> None:
    with pytest.raises(ValueError, match="Cannot evenly shard 6 experts across 4"):
        sharded_step(MIXTRAL | {"num_local_experts": 6}, **EIGHT)
