"""FLOPs of a step: against torch's FlopCounterMode, the published formulas, and over ranks, stages and micro-batches."""

from __future__ import annotations

from copy import deepcopy
from fractions import Fraction
from typing import Any

import oracle
import paper
import pytest
import torch
from flop_oracle import ATEN, FORMULAS
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode
from traces import BLOOM, DEEPSEEK_V3, MAMBA, T5, traced

import memcalc
from memcalc.estimation.compute import PHASES
from memcalc.families import FAMILIES
from memcalc.inputs.gpu import load_gpu
from memcalc.inputs.model import Model
from memcalc.tape.profile import Choices, full_profile, profile
from memcalc.validate.realism import cuda_kernels, not_traced

LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 12, "num_attention_heads": 8,
    "num_key_value_heads": 4, "vocab_size": 512,
}  # fmt: skip
GPT: dict[str, Any] = {
    "model_type": "gpt2", "n_embd": 256, "n_layer": 6, "n_head": 8, "n_positions": 512, "vocab_size": 51200,
}  # fmt: skip
MIXTRAL: dict[str, Any] = {
    "model_type": "mixtral", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 4, "vocab_size": 512, "num_local_experts": 8, "num_experts_per_tok": 2,
}  # fmt: skip
SIZES: dict[str, Any] = {"micro_batch_size": 2, "seq_len": 64}


def flops(model: Any, **options: Any) -> dict[str, int]:
    return memcalc.estimate(model, **SIZES, **options).flops


def times(sums: dict[str, int], factor: int) -> dict[str, int]:
    return {phase: n * factor for phase, n in sums.items()}


def over_stages(model: Any, **options: Any) -> dict[str, int]:
    ranks = memcalc.estimate(model, **SIZES, **options).each_rank()
    return {phase: sum(rank.flops[phase] for rank in ranks) for phase in (*PHASES, "total")}


# --- torch's counter


@pytest.mark.live
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("recompute", [False, True, "op"], ids=["none", "full", "op"])
def test_a_step_has_what_flop_counter_mode_counts(attention: str, recompute: bool | str) -> None:
    """The mode itself, around a real model. Its backward has the recomputation in it."""
    lacking = {op: FORMULAS[op] for op in FORMULAS if "for_cpu" in str(op)}
    lacking = {op: (lambda *a, f=f, out_shape=None, **k: f(*a, **k)) for op, f in lacking.items()}
    counter = {phase: FlopCounterMode(display=False, custom_mapping=lacking) for phase in ("forward", "backward")}
    with not_traced(), cuda_kernels(), FakeTensorMode(allow_non_fake_inputs=True):
        model: Any = oracle.build(deepcopy(LLAMA), attention, torch.bfloat16)
        if recompute:
            model.gradient_checkpointing_enable(oracle.CHECKPOINTS["full" if recompute is True else recompute])
        batch = oracle.batch_for(model.config, 2, 64, torch.bfloat16)
        with counter["forward"]:
            loss = model(**batch).loss
        with counter["backward"]:
            loss.backward()
    kinds = {False: "none", True: "full", "op": "op"}
    ours = flops(LLAMA, attention=attention, recompute=kinds[recompute], precision="bf16")
    assert ours["forward"] == counter["forward"].get_total_flops()
    assert ours["backward"] + ours["recomputation"] == counter["backward"].get_total_flops()
    assert (ours["recomputation"] == 0) == (not recompute)
    assert ours["backward"] == flops(LLAMA, attention=attention, precision="bf16")["backward"]


@pytest.mark.slow
@pytest.mark.parametrize("fields", [LLAMA, BLOOM, DEEPSEEK_V3, T5, MAMBA], ids=lambda fields: fields["model_type"])
def test_a_trace_counts_what_the_program_does(fields: dict[str, Any]) -> None:
    for recompute in ("none", "full"):
        options: dict[str, Any] = {"recompute": recompute, "precision": "bf16", "seq_len": 16, "micro_batch_size": 2}
        if fields is not LLAMA and fields is not MAMBA:  # the CPU has no fused kernel for some
            options["attention"] = "eager"
        ours = memcalc.estimate(fields, **options)
        theirs = memcalc.estimate(traced(fields), **options)
        assert theirs.flops == ours.flops, recompute
        assert {item.basis for item in theirs.computed} == {"traced"}


def test_the_weight_of_a_convolution_meets_the_channels_of_its_own_group_alone() -> None:
    """torch's counter takes all of them."""
    x, weight = torch.zeros(2, 8, 10, device="meta"), torch.zeros(8, 1, 3, device="meta", requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        out = torch.nn.functional.conv1d(x, weight, groups=8)
        out.sum().backward()
    assert counter.get_flop_counts()["Global"] == {
        ATEN.convolution: 2 * out.numel() * 3,
        ATEN.convolution_backward: 2 * out.numel() * 3 * 8,
    }


# --- published formulas


@pytest.mark.parametrize(("tp", "sequence_parallel"), [(1, False), (2, True), (2, False)])
def test_a_gpt_of_megatron_has_the_published_flops(tp: int, sequence_parallel: bool) -> None:
    """Narayanan et al. 2021 (arXiv 2104.04473), section 5.1 without and with recomputation of all layers; selective
    recomputation (Korthikanti et al. 2022) runs the two products of core attention once more, 4·B·s²·h a layer."""
    h, layers, vocab, s, batch = 256, 6, 51200, 64, 8
    part, logits = Fraction(s, 6 * h), Fraction(vocab, 12 * h * layers)
    model = 72 * batch * layers * s * h**2 * (1 + part + logits)
    options: dict[str, Any] = {
        "engine": "megatron", "attention": "eager", "gpus": tp, "tp": tp, "global_batch_size": batch,
        "sequence_parallel": sequence_parallel,
    }  # fmt: skip
    assert times(flops(GPT, **options), tp)["total"] == model
    full = times(flops(GPT, **options, recompute="full"), tp)
    assert full["total"] == 96 * batch * layers * s * h**2 * (1 + part + logits * Fraction(3, 4))
    assert full["recomputation"] == 24 * batch * layers * s * h**2 * (1 + part)
    selective = times(flops(GPT, **options, recompute="selective"), tp)
    assert selective["recomputation"] == 4 * batch * layers * s**2 * h
    assert selective["total"] == model + selective["recomputation"]


def test_a_resnet_has_the_published_flops() -> None:
    """torchvision publishes 4.09 billion multiplications for ResNet50_Weights. Images want no gradient, so the first
    convolution has one product in backward where the others have two."""
    report = memcalc.estimate("resnet-50")
    assert round(report.flops["forward"] / 2 / 1e9, 2) == 4.09
    first = next(i.flops for i in report.computed if i.name == "resnet.embedder.embedder.convolution")
    assert report.flops["backward"] == 2 * report.flops["forward"] - first


def test_fused_attention_makes_the_scores_again_in_backward() -> None:
    """Five products in backward for two in forward."""
    eager, fused = (flops(GPT, engine="megatron", attention=attention) for attention in ("eager", "sdpa"))
    scores = 2 * SIZES["micro_batch_size"] * 6 * 64**2 * 256
    assert fused == {**eager, "backward": eager["backward"] + scores, "total": eager["total"] + scores}


def test_experts_count_the_tokens_that_go_to_them() -> None:
    """2 · tokens · top_k · k · n for each of gate, up and down."""
    of_experts = [i for i in memcalc.estimate(MIXTRAL, **SIZES).computed if i.kind == "grouped matmul"]
    forward = sum(i.flops for i in of_experts if i.phase == "forward")
    assert forward == 4 * 2 * (2 * 64) * 2 * 3 * 64 * 96
    assert sum(i.flops for i in of_experts) == 3 * forward


# --- recomputation


def test_only_the_first_layers_are_recomputed() -> None:
    whole = flops(LLAMA, engine="megatron", recompute="full")["recomputation"]
    for layers in (1, 5, 11):
        some = flops(LLAMA, engine="megatron", recompute="full", recompute_layers=layers)
        assert some["recomputation"] * 12 == whole * layers
    assert flops(LLAMA, engine="megatron")["recomputation"] == 0


def test_a_recomputed_layer_of_transformers_leaves_out_its_last_product() -> None:
    """torch stops where all that backward needs is there: the down projection's output is not needed."""
    report = memcalc.estimate(LLAMA, **SIZES, recompute="full")
    by_phase = {
        phase: {i.name: i.flops for i in report.computed if i.phase == phase and i.layer is not None}
        for phase in PHASES
    }
    left_out = by_phase["forward"].keys() - by_phase["recomputation"].keys()
    assert left_out == {"model.layers.*.mlp.down_proj"}
    assert by_phase["recomputation"] == {n: f for n, f in by_phase["forward"].items() if n not in left_out}


# --- ranks, stages, micro-batches


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize(
    "options",
    [
        {"engine": "megatron"},
        {"engine": "megatron", "sequence_parallel": False},
        {"engine": "fsdp2", "zero": 3},
        {"engine": "fsdp2", "zero": 3, "sequence_parallel": True, "cross_entropy": "vocab-parallel"},
    ],
    ids=str,
)
def test_slices_sum_to_the_whole(options: dict[str, Any], recompute: str) -> None:
    one = "megatron" if options["engine"] == "megatron" else "none"
    whole = flops(LLAMA, engine=one, recompute=recompute)
    assert times(flops(LLAMA, gpus=4, tp=4, recompute=recompute, **options), 4) == whole


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize(
    "options",
    [
        {"engine": "megatron"},
        {"engine": "megatron", "schedule": "interleaved", "virtual_stages": 3},
        {"engine": "fsdp2", "zero": 3},
        {"engine": "fsdp2", "zero": 3, "schedule": "gpipe"},
        {"engine": "fsdp2", "zero": 3, "schedule": "interleaved", "virtual_stages": 2},
        {"engine": "fsdp2", "zero": 2, "schedule": "zero-bubble", "virtual_stages": 2},
        {"engine": "deepspeed", "zero": 1},
    ],
    ids=str,
)
def test_stages_sum_to_the_whole(options: dict[str, Any], recompute: str) -> None:
    if options.get("schedule") == "zero-bubble" and recompute != "none":
        pytest.skip("refused")
    one = "none" if options["engine"] == "fsdp2" else "megatron"
    whole = flops(LLAMA, engine=one, recompute=recompute, global_batch_size=24)
    assert over_stages(LLAMA, gpus=2, pp=2, recompute=recompute, global_batch_size=24, **options) == whole


@pytest.mark.parametrize(
    "options",
    [
        {"engine": "ddp"},
        {"engine": "megatron"},
        {"engine": "fsdp2", "zero": 3},
        {"engine": "deepspeed", "zero": 2},
    ],
    ids=str,
)
def test_data_parallel_ranks_have_the_flops_of_their_micro_batches(options: dict[str, Any]) -> None:
    alone = flops(LLAMA, recompute="full", engine="megatron" if options["engine"] == "megatron" else "none")
    assert flops(LLAMA, gpus=4, recompute="full", global_batch_size=24, **options) == times(alone, 3)


def test_stage_3_recomputes_the_last_product_of_a_layer_too() -> None:
    """Its linear function saves what it is given when it has run, so a layer's recomputation ends behind its last one."""
    options: dict[str, Any] = {"engine": "deepspeed", "gpus": 4, "recompute": "full", "global_batch_size": 24}
    two, three = (memcalc.estimate(LLAMA, **SIZES, zero=zero, **options) for zero in (2, 3))
    last = sum(i.flops for i in three.computed if i.phase == "forward" and i.name.endswith("mlp.down_proj"))
    assert last
    assert three.flops["recomputation"] == two.flops["recomputation"] + last
    assert [three.flops[phase] for phase in ("forward", "backward")] == [two.flops[p] for p in ("forward", "backward")]


@pytest.mark.parametrize(
    "options",
    [{"engine": "megatron"}, {"engine": "fsdp2", "zero": 3}, {"engine": "deepspeed", "zero": 2}],
    ids=str,
)
def test_experts_of_several_ranks_have_as_many_rows(options: dict[str, Any]) -> None:
    assert flops(MIXTRAL, gpus=4, ep=4, **options) == flops(MIXTRAL, engine="none")


def test_ranks_that_share_a_sequence_attend_to_what_their_kernels_are_given() -> None:
    """Of cp chunk pairs a ring's rank runs its own and half of each other: (cp + 1) / 2. Gathered, Transformer Engine has
    2·cp + 1 of the (2·cp)² pairs of half chunks, of which all ranks would have 4·cp. Ulysses has whole squares."""

    def attention(**options: Any) -> dict[str, int]:
        items = memcalc.estimate(LLAMA, **SIZES, **options).computed
        of = [i for i in items if i.kind == "attention"]
        return {phase: sum(i.flops for i in of if i.phase == phase) for phase in ("forward", "backward")}

    whole = attention()
    rings: list[dict[str, Any]] = [
        {"engine": "megatron", "cp_comm_type": "p2p"},
        {"engine": "fsdp2", "zero": 3, "cp_comm_type": "p2p"},
        {"engine": "fsdp2", "zero": 3, "cp_comm_type": "all_gather"},
    ]
    for options in rings:
        assert times(attention(gpus=4, cp=4, **options), 32) == times(whole, 5), options
    gathered = attention(gpus=4, cp=4, engine="megatron", cp_comm_type="all_gather")
    assert times(gathered, 64) == times(whole, 9)
    for engine, more in (("megatron", {"cp_comm_type": "a2a"}), ("deepspeed", {"zero": 1})):
        assert times(attention(gpus=4, cp=4, engine=engine, **more), 4) == whole


# --- runs that are cut


@pytest.mark.parametrize("fields", [LLAMA, MIXTRAL, DEEPSEEK_V3], ids=lambda fields: fields["model_type"])
def test_a_cut_run_counts_as_much_as_the_whole_stack(fields: dict[str, Any]) -> None:
    deep = {**fields, "num_hidden_layers": 15}
    program = paper.program_of(deep)
    choices = Choices(paper.DType("bf16", 2), "sdpa", True, False)
    cut, whole = profile(program, choices, 2, 16), full_profile(program, choices, 2, 16)
    assert cut.run.middle.more > 0 == whole.run.middle.more
    setup = memcalc.estimate(deep, micro_batch_size=3, seq_len=48, recompute="full").setup
    from memcalc.estimation.compute import computed

    def sums(of: Any) -> dict[Any, int]:
        return {(i.name, i.phase, i.formula): i.flops for i in computed([of], setup, 1)}

    assert sums(cut) == sums(whole)


# --- the report


@pytest.mark.parametrize("model_type", FAMILIES)
def test_items_are_in_the_model_and_sum_to_the_totals(model_type: str) -> None:
    from cases import step_cases

    case = step_cases(model_type)[0]
    program = paper.program_of(case.fields)
    recompute = "full" if program.recomputes else "none"
    model = Model("it", model_type, program)
    options: dict[str, Any] = {"seq_len": case.seq} if program.has_sequence else {}
    report = memcalc.estimate(model, micro_batch_size=case.batch, recompute=recompute, gpu="h100-80gb", **options)
    items, per_step = report.computed, report.flops
    assert per_step["total"] == sum(per_step[phase] for phase in PHASES) > 0
    assert (per_step["recomputation"] > 0) == (recompute == "full")
    for phase in PHASES:
        assert per_step[phase] == sum(i.flops for i in items if i.phase == phase)
    for item in items:
        assert item.flops > 0 and item.calls > 0
        assert item.layer is None or (item.layer.endswith("*") and item.name.startswith(item.layer)), item
    assert len({(i.name, i.phase, i.kind, i.formula, i.dtype) for i in items}) == len(items)
    assert report.seconds_at_peak


def test_the_time_at_the_data_sheets_rate() -> None:
    rate = load_gpu("a100-80gb").dense_flops_per_second
    report = memcalc.estimate(LLAMA, **SIZES, gpu="a100-80gb", precision="fp32")
    assert report.seconds_at_peak == pytest.approx(report.flops["total"] / (rate["fp32"].value * 1e12), rel=1e-12)
    autocast = memcalc.estimate(LLAMA, **SIZES, gpu="a100-80gb", precision="bf16-autocast")
    assert {item.dtype for item in autocast.computed} == {"bf16"}
    assert autocast.seconds_at_peak == pytest.approx(autocast.flops["total"] / (rate["bf16"].value * 1e12), rel=1e-12)


def test_no_rate_is_no_time() -> None:
    report = memcalc.estimate(LLAMA, **SIZES, gpu="a100-80gb")
    assert report.gpu is not None
    report.gpu = report.gpu._replace(dense_flops_per_second={})
    assert report.seconds_at_peak is None
    assert memcalc.estimate(LLAMA, **SIZES).seconds_at_peak is None


def test_a_bare_number_of_parameters_has_no_compute() -> None:
    assert memcalc.estimate(params="7.5B", gpus=8).to_dict()["compute"] is None


def test_every_micro_batch_of_a_step_has_the_same_products() -> None:
    """Electra makes its logits outside its modules: no backward before leaves the name of a weight on them."""
    electra = {
        "model_type": "electra", "vocab_size": 100, "hidden_size": 60, "intermediate_size": 70, "num_hidden_layers": 3,
        "num_attention_heads": 5, "max_position_embeddings": 40, "embedding_size": 24,
    }  # fmt: skip
    how: dict[str, Any] = {"engine": "fsdp2", "zero": 3, "gpus": 4, "micro_batch_size": 1, "seq_len": 16}
    one, eight = (memcalc.estimate(electra, **how, global_batch_size=4 * n) for n in (1, 8))
    assert {phase: 8 * n for phase, n in one.flops.items()} == eight.flops
    assert [item.name for item in one.computed] == [item.name for item in eight.computed]
