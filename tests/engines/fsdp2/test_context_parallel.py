"""FSDP2 over torch's own context parallelism (`context_parallel`) against the real two: what is alive at the end of forward,
every phase's peak and every collective, byte for byte, on ranks of a fake process group."""

from __future__ import annotations

import io
from collections import Counter
from math import prod
from typing import Any

import pytest
import torch
from cases import DROPOUTS, step_cases
from context_parallel_oracle import Shared, shared_step
from kept_profiles import keeps
from steps_compared import flops_of, over_axis, over_dp, phases

import memcalc
from memcalc.core.dims import evaluate
from memcalc.engines.rank import Rank
from memcalc.engines.ranks import ranks
from memcalc.estimation.report import Report
from memcalc.families import FAMILIES, supporting
from memcalc.report.table import print_report
from memcalc.tape.profile import Choices, full_profile

SHARED = supporting(lambda s: s.context_parallel)

LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 16, "vocab_size": 48,
}  # fmt: skip
PLAIN = LLAMA | {"num_key_value_heads": 8, "attention_bias": True, "mlp_bias": True, "vocab_size": 304}
LATENT = {
    **PLAIN, "model_type": "deepseek_v3", "moe_intermediate_size": 32, "n_routed_experts": 8, "num_experts_per_tok": 2,
    "n_group": 2, "topk_group": 1, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16,
    "v_head_dim": 24, "first_k_dense_replace": 1, "attention_bias": False,
}  # fmt: skip
FOUR = {"mesh": (1,), "context_parallel": 4, "micro_batch_size": 2, "seq_len": 64}
"""Four ranks that share two sequences of 64 tokens."""
RING = ({"cp_comm_type": "p2p"}, {"rotate": "alltoall"})
SETUPS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "zero 3": (LLAMA, {}, {}),
    "a ring": (LLAMA, *RING),
    "a batch of one, dp 2, tied": (
        PLAIN | {"tie_word_embeddings": True},
        {},
        {"mesh": (2,), "context_parallel": 2, "micro_batch_size": 1},
    ),
    "zero 2, bf16, a ring": (
        PLAIN,
        {"zero": 2, "precision": "bf16", **RING[0]},
        {"reshards": False, "policy": None, "dtype": torch.bfloat16, **RING[1], "context_parallel": 2},
    ),
    "fp32": (PLAIN, {"precision": "fp32"}, {"policy": None, "context_parallel": 2, "seq_len": 128}),
    "recompute": (LLAMA, {"recompute": "full"}, {"recompute": True}),
    "recompute op, a ring": (PLAIN, {"recompute": "op", **RING[0]}, {"recompute": "op", **RING[1]}),
    "two micro-batches, reduced in bf16": (
        LLAMA,
        {"global_batch_size": 4, "grad_dtype": "bf16", "sync_each_micro_batch": True},
        {"micro_batches": 2, "reduced": torch.bfloat16},
    ),
    "gradients of three micro-batches reduced with the last, a ring": (
        PLAIN,
        {"global_batch_size": 6, **RING[0]},
        {"micro_batches": 3, "syncs": False, **RING[1]},
    ),
    "tp 2, gradients of two micro-batches reduced with the last": (
        LLAMA,
        {"global_batch_size": 4},
        {"micro_batches": 2, "syncs": False, "tensor_parallel": 2, "context_parallel": 2},
    ),
    "hybrid, three layers": (
        LLAMA | {"num_hidden_layers": 3},
        {"shard_group": 2},
        {"mesh": (2, 1), "context_parallel": 2},
    ),
    "nine layers, one token a chunk": (
        LLAMA | {"num_hidden_layers": 9},
        {},
        {"context_parallel": 2, "seq_len": 4, "micro_batch_size": 1},
    ),
    "values of another width": (
        dict(step_cases("deepseek_v3")[0].fields),
        RING[0],
        {"context_parallel": 2, "seq_len": 128, **RING[1]},
    ),
    "tp 2": (LLAMA, {}, {"tensor_parallel": 2, "context_parallel": 2}),
    "tp 2, recompute, a ring": (
        LLAMA,
        {"recompute": "full", **RING[0]},
        {"recompute": True, "tensor_parallel": 2, "context_parallel": 2, **RING[1]},
    ),
    "tp 2, experts, a ring": (
        LATENT,
        RING[0],
        {"tensor_parallel": 2, "context_parallel": 2, "seq_len": 128, **RING[1]},
    ),
    "tp 2, experts, projections gathered": (
        {
            **PLAIN,
            "model_type": "olmoe",
            "head_dim": 8,
            "attention_bias": False,
            "num_experts": 4,
            "num_experts_per_tok": 2,
        },
        {},
        {"tensor_parallel": 2, "context_parallel": 2},
    ),
    "tp 2, experts, latents of split heads": (
        {**LATENT, "model_type": "glm4_moe_lite", "mlp_layer_types": ["dense", "sparse"]},
        {},
        {"tensor_parallel": 2, "context_parallel": 2, "seq_len": 128},
    ),
    "tp 2, joined projections gathered, recompute": (
        {**LLAMA, "model_type": "phi3", "hidden_size": 128, "pad_token_id": 0},
        {"recompute": "full"},
        {"tensor_parallel": 2, "context_parallel": 2, "recompute": True},
    ),
    "tp 2, experts": (
        {**LLAMA, "model_type": "mixtral", "num_local_experts": 4},
        {},
        {"tensor_parallel": 2, "context_parallel": 2},
    ),
    "sequence parallel": (
        LLAMA,
        {"sequence_parallel": True},
        {"tensor_parallel": 2, "context_parallel": 2, "plan": "sequence parallel"},
    ),
}


def on_paper(fields: dict[str, Any], options: dict[str, Any], real: dict[str, Any]) -> Report:
    how = FOUR | real
    gpus = prod(how["mesh"]) * how["context_parallel"] * how.get("tensor_parallel", 1)
    degrees = {"gpus": gpus, "cp": how["context_parallel"], "tp": how.get("tensor_parallel", 1)}
    workload = {name: how[name] for name in ("micro_batch_size", "seq_len")}
    setup = {"engine": "fsdp2", "zero": 3, "optimizer_implementation": "fused"}
    return memcalc.estimate(dict(fields), **setup | degrees | workload | options)


def kinds(cp: int) -> list[int]:
    """The ranks that are run on paper."""
    return sorted({0, 1, cp - 1})


def of_rank(report: Report, rank: Rank) -> Report:
    return Report(report.model, report.setup, report.find(rank))


def check(report: Report, rank: Rank, real: Shared) -> None:
    one = of_rank(report, rank)
    assert phases(one) == [real.forward, real.backward, real.step]
    if report.setup.micro_batches == 1:
        size = report.setup.micro_batch_size, report.setup.tokens_per_part
        assert evaluate(rank.profiles[0].saved.poly, *size) + evaluate(rank.sums.always, *size) == real.forward_end
    assert over_axis(one, "cp") == Counter(real.ring)
    assert over_axis(one, "tp") == Counter(real.split)
    counted: dict[tuple[str, int], tuple[int, int]] = {}
    for kind, nbytes, group in real.sent:
        calls, payload = counted.get((kind, group), (0, 0))
        counted[kind, group] = calls + 1, payload + nbytes
    assert over_dp(one) == counted
    assert flops_of(one) == real.flops


@pytest.mark.parametrize("name", SETUPS)
def test_a_step(name: str) -> None:
    """On the first rank, and on the one that is reported."""
    fields, options, how = SETUPS[name]
    report = on_paper(fields, options, how)
    found = dict(zip(kinds(report.setup.cp), ranks(report.model, report.setup), strict=True))
    reported = next(number for number, rank in found.items() if phases(report) == phases(of_rank(report, rank)))
    for number in sorted({0, reported}):
        check(report, found[number], shared_step(dict(fields), **FOUR | how, rank=number))


@pytest.mark.parametrize("how", [{}, {"rotate": "alltoall", "recompute": True}], ids=str)
def test_each_kind_of_rank(how: dict[str, Any]) -> None:
    """With others before it, behind it or both."""
    options = {"cp_comm_type": "p2p", "recompute": "full"} if how else {}
    report = on_paper(LLAMA, options, how)
    for rank, number in zip(ranks(report.model, report.setup), kinds(4), strict=True):
        check(report, rank, shared_step(LLAMA, **FOUR | how, rank=number))


def test_no_rank_has_more_than_the_reported_one() -> None:
    """Those between are alike: five ranks, of which three have both kinds of neighbours."""
    five = {"context_parallel": 5, "seq_len": 80, "rotate": "alltoall", "recompute": True}
    fields = PLAIN | {"vocab_size": 160, "num_hidden_layers": 1}
    report = on_paper(fields, {"cp_comm_type": "p2p", "recompute": "full"}, five)
    real = [shared_step(fields, **FOUR | five, rank=rank) for rank in range(5)]
    assert max(phases(report)) == max(max(one.forward, one.backward, one.step) for one in real)
    assert len({(one.forward, one.backward) for one in real[1:4]}) == 1
    named = report.to_dict()["memory"]["rank"]["cp"]
    assert max(real[named].forward, real[named].backward, real[named].step) == max(phases(report))
    assert f"cp rank {named}, which has most" in show(report)


def show(report: Report) -> str:
    out = io.StringIO()
    print_report(report, rows=False, file=out)
    return " ".join(out.getvalue().split())


def config_of(model_type: str) -> dict[str, Any]:
    """A small model of a family without windows and dropouts."""
    fields = step_cases(model_type)[0].fields
    layers = {"num_hidden_layers": 1} if "layer_types" not in fields else {}
    windows = {"sliding_window": None} if "sliding_window" in fields else {}
    return dict(fields) | dict.fromkeys(DROPOUTS, 0.0) | windows | layers


@pytest.mark.parametrize("model_type", [name for name in SHARED if name != "llama"])
def test_a_step_of_another_family(model_type: str) -> None:
    two = {"context_parallel": 2, "seq_len": 128}
    fields = config_of(model_type)
    report = on_paper(fields, {}, two)
    check(report, ranks(report.model, report.setup)[0], shared_step(fields, **FOUR | two))


GPT2 = {"model_type": "gpt2", "n_embd": 64, "n_layer": 1, "n_head": 4, "vocab_size": 48, "n_positions": 64}


@pytest.mark.parametrize(
    ("fields", "how", "error", "why"),
    [
        (
            dict(step_cases("bert")[0].fields),
            {"context_parallel": 2, "seq_len": 32},
            RuntimeError,
            "requires `is_causal=True`",
        ),
        (PLAIN, {"policy": None}, RuntimeError, "must match the size"),  # chunks of 8 tokens under fp32
        (GPT2, {}, AssertionError, ""),  # accelerate knows no module called attn: it is given a mask
    ],
    ids=["not causal", "fp32's logsumexp", "a mask"],
)
def test_what_torch_itself_cannot_run(
    fields: dict[str, Any], how: dict[str, Any], error: type[Exception], why: str
) -> None:
    with pytest.raises(error, match=why):
        shared_step(fields | dict.fromkeys(DROPOUTS, 0.0), **FOUR | how)


SETUP: dict[str, Any] = {"gpus": 8, "zero": 3, "engine": "fsdp2", "seq_len": 4096}


@pytest.mark.parametrize(
    ("model", "options", "line"),
    [
        ("llama-7b", {"cp": 4, "seq_len": 4092}, "--seq-len 4092: does not divide into 2·cp = 8 chunks, two for"),
        ("llama-7b", {"cp": 4, "cp_comm_type": "a2a"}, "--cp-comm-type a2a: with engine fsdp2: torch's context_parallel"),
        ("mistral-7b", {"cp": 2}, "--cp 2: with engine fsdp2: mistral-7b has layers with a sliding window, which accelerate"),
        ("gpt2", {"cp": 2, "seq_len": 1024}, "--cp 2: with engine fsdp2 for a gpt2 is not modelled by this version; allowed: 1"),
        ("bert-base", {"cp": 2, "seq_len": 512}, "--cp 2: with engine fsdp2 for a bert is not modelled"),
        ("llama-7b", {"cp": 2, "padded": True}, "--padded on: with engine fsdp2 and cp above 1 torch's context parallelism has"),
        ("llama-7b", {"cp": 2, "attention": "eager"}, "--attention eager: with engine fsdp2 and cp above 1 torch's context_par"),
        ("llama-7b", {"cp": 2, "kernels": "fused"}, "--kernels fused: with engine fsdp2 and cp above 1 is not modelled"),
        ("llama-7b", {"cp": 2, "cross_entropy": "chunked"}, "--cross-entropy chunked: with engine fsdp2 and cp above 1 is not"),
        ("llama-7b", {"cp": 2, "precision": "bf16-autocast"}, "--precision bf16-autocast: with engine fsdp2 and cp above 1 is"),
        ("llama-3-8b", {"cp": 2, "precision": "fp32"}, "--precision fp32: with engine fsdp2 and cp above 1 llama-3-8b has"),
        ("llama-7b", {"cp": 4, "precision": "fp32", "seq_len": 64}, "--seq-len 64: leaves chunks of 8 tokens; fp32's kernel"),
        ("deepseek-v3", {"cp": 2, "seq_len": 64}, "--seq-len 64: leaves chunks of 16 tokens; latent attention's"),
        ("llama-7b", {"cp": 4, "shard_group": 2}, "--shard-group 2: is not a multiple of cp 4, and FSDP2 shards over dp"),
        ("llama-7b", {"cp": 3}, "--gpus 8: is not divisible by cp 3; allowed: a multiple of 3"),
        (LLAMA | {"attention_dropout": 0.1}, {"cp": 2}, "has attention_dropout 0.1, and torch's ring keeps the random state of"),
        (
            "llama-7b",
            {"cp": 2, "tp": 2, "sequence_parallel": True, "seq_len": 4100},
            "--seq-len 4100: does not divide into 2·cp·tp = 8 parts",
        ),
    ],
    ids=str,
)  # fmt: skip
def test_refused_by_name(model: Any, options: dict[str, Any], line: str) -> None:
    with pytest.raises(memcalc.InputError) as error:
        memcalc.estimate(model, **SETUP | options)
    assert line in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("model_type", sorted(set(FAMILIES) - set(SHARED)))
def test_no_other_family_is_taken(model_type: str) -> None:
    program = memcalc.load_model(dict(step_cases(model_type)[0].fields)).program
    if program.has_sequence:
        with pytest.raises(memcalc.InputError):
            memcalc.estimate(dict(step_cases(model_type)[0].fields), **SETUP | {"cp": 2, "seq_len": 32})


def test_a_shard_spans_whole_sequences_of_a_number_of_parameters_too() -> None:
    with pytest.raises(memcalc.InputError, match=r"--shard-group 2: is not a multiple of cp 4.*; allowed: 4, 8"):
        memcalc.estimate(params="7B", gpus=8, zero=3, engine="fsdp2", cp=4, shard_group=2)
    assert memcalc.estimate(params="7B", gpus=8, zero=3, engine="fsdp2", cp=4).setup.shards == 8


def test_keys_and_values_of_the_others_come_once_forward_either_way() -> None:
    """Each rank sends its own to all others, gathered or round a ring; gradients go one step further, in fp32."""

    def wire(phase: str, kind: str) -> dict[str, int]:
        report = memcalc.estimate("llama-3-8b", **SETUP | {"cp": 8, "cp_comm_type": kind})
        return {c.name: c.wire for c in report.collectives if c.axis == "cp" and c.phase == phase}

    own = 32 * 512 * 8 * 2 * 128 * 2  # layers, tokens, heads, keys and values, width, bytes
    names = "keys and values", "gradients of keys and values"
    for kind in ("all_gather", "p2p"):
        assert wire("forward", kind) == {names[0]: 7 * own}
        assert wire("backward", kind) == {names[0]: 7 * own, names[1]: 2 * 8 * own}


def test_gathering_is_torchs_default_and_a_ring_megatrons() -> None:
    by_default = memcalc.estimate("llama-7b", **SETUP | {"cp": 2})
    assert by_default.setup.cp_comm_type == "all_gather"
    assert memcalc.estimate("llama-7b", gpus=8, cp=2, engine="megatron").setup.cp_comm_type == "p2p"
    a_ring = memcalc.estimate("llama-7b", **SETUP | {"cp": 8, "cp_comm_type": "p2p"})
    assert a_ring.total("saved_activations") == memcalc.estimate("llama-7b", **SETUP | {"cp": 8}).total(
        "saved_activations"
    )


@pytest.mark.parametrize("zero", [2, 3])
def test_states_are_sharded_over_dp_and_cp(zero: int) -> None:
    def states(**options: Any) -> list[int]:
        report = memcalc.estimate("llama-7b", **SETUP | {"zero": zero} | options)
        return [report.total(name) for name in ("parameters", "optimizer_states")]

    assert states(cp=8) == states(cp=2) == states(cp=1)


def test_activations_are_shared_and_no_less_is_kept_than_a_share() -> None:
    """Outside of attention all goes by the tokens of a rank; each layer has its attention's output twice."""

    def saved(cp: int, layers: int) -> int:
        config = PLAIN | {"num_hidden_layers": layers}
        report = memcalc.estimate(config, gpus=8, zero=3, cp=cp, engine="fsdp2", seq_len=512)
        return report.total("saved_activations")

    for cp in (2, 4, 8):
        layer = saved(cp, 20) - saved(cp, 19)
        output = 512 // cp * 8 * 16 * 2
        assert layer == (saved(1, 20) - saved(1, 19)) // cp + output


@pytest.mark.parametrize("options", [{}, {"recompute": "full", "cp_comm_type": "p2p"}], ids=str)
def test_a_deep_stack_is_extended_as_it_would_run(options: dict[str, Any]) -> None:
    report = memcalc.estimate(PLAIN | {"num_hidden_layers": 14}, **SETUP | {"cp": 4, "seq_len": 64} | options)
    for rank in ranks(report.model, report.setup):
        made = rank.profiles[0]
        assert made.run.middle.more > 0
        models = [m for m in report.model.profiles.values() if hasattr(m, "profiles")]
        ((model, key),) = [(m, key) for m in models for key, found in m.profiles.items() if keeps(found, made)]
        choices = Choices(*key[1 : 1 + len(Choices._fields)])
        whole = full_profile(model.program, choices, report.setup.micro_batch_size, report.setup.tokens_per_part)
        for size in ((1, 8), (3, 20), (2, 1000)):
            for ours, theirs in ((made.forward, whole.forward), (made.backward, whole.backward)):
                most = [max(evaluate(m.poly, *size) + m.gradients for m in moments) for moments in (ours, theirs)]
                assert most[0] == most[1]
