"""FSDP2 against torch's `fully_shard`: every phase's peak and every collective, byte for byte, on rank 0 of a fake process
group."""

from __future__ import annotations

from collections import Counter
from math import prod
from typing import Any

import paper
import pytest
import torch
from cases import DROPOUTS, step_cases
from fsdp2_oracle import Sent, sharded_step
from validated import validate

import memcalc
from memcalc.core.dtypes import bf16, fp32
from memcalc.engines.fsdp2.step import Sharding
from memcalc.estimation.report import Report
from memcalc.families import FAMILIES
from memcalc.tape.profile import Choices, trace

LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 48, "intermediate_size": 100, "num_hidden_layers": 7, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 10, "vocab_size": 301, "attention_bias": True,
}  # fmt: skip
SEVEN = {"mesh": (7,), "micro_batch_size": 2, "seq_len": 33}
SHALLOW = {"micro_batch_size": 1, "seq_len": 4}
"""So few tokens that reductions set the peak."""
SETUPS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "zero 3": ({}, {}),
    "zero 2": ({"zero": 2}, {"reshards": False}),
    "recompute": ({"recompute": "full"}, {"recompute": True}),
    "zero 2, recompute": ({"zero": 2, "recompute": "full"}, {"reshards": False, "recompute": True}),
    "recompute op": ({"recompute": "op"}, {"recompute": "op"}),
    "zero 2, recompute op": ({"zero": 2, "recompute": "op"}, {"reshards": False, "recompute": "op"}),
    "eager": ({"attention": "eager"}, {"attention": "eager"}),
    "fp32": ({"precision": "fp32"}, {"policy": None}),
    "bf16": ({"precision": "bf16"}, {"policy": None, "dtype": torch.bfloat16}),
    "fp16-mixed": ({"precision": "fp16-mixed"}, {"policy": torch.float16}),
    "gradients reduced in bf16": ({"grad_dtype": "bf16"}, {"reduced": torch.bfloat16}),
    "three micro-batches": ({"global_batch_size": 42, "sync_each_micro_batch": True}, {"micro_batches": 3}),
    "hybrid": ({"gpus": 8, "shard_group": 4}, {"mesh": (2, 4)}),
    "hybrid, one GPU a shard": ({"gpus": 3, "shard_group": 1}, {"mesh": (3, 1)}),
    "hybrid, three micro-batches": (
        {**SHALLOW, "gpus": 8, "shard_group": 4, "global_batch_size": 24, "sync_each_micro_batch": True},
        {**SHALLOW, "mesh": (2, 4), "micro_batches": 3},
    ),
    "hybrid, reduced in bf16": (
        {**SHALLOW, "gpus": 8, "shard_group": 4, "grad_dtype": "bf16"},
        {**SHALLOW, "mesh": (2, 4), "reduced": torch.bfloat16},
    ),
    "one GPU": ({"gpus": 1}, {"mesh": (1,)}),
    "one GPU, few tokens": ({"gpus": 1, **SHALLOW}, {"mesh": (1,), **SHALLOW}),
}


def both(config: dict[str, Any], options: dict[str, Any], real: dict[str, Any]) -> tuple[Report, Any]:
    theirs = sharded_step(dict(config), **SEVEN | {"implementation": "fused"} | real)
    workload = {name: (SEVEN | real)[name] for name in ("micro_batch_size", "seq_len")}
    setup = {"gpus": 7, "zero": 3, "engine": "fsdp2", "optimizer_implementation": "fused"} | workload
    return memcalc.estimate(dict(config), **setup | options), theirs


def phases(report: Report) -> list[int]:
    return [report.phases[phase] for phase in ("forward", "backward", "step")]


def counted(sent: list[Sent]) -> dict[tuple[str, int], tuple[int, int]]:
    """(collective, ranks) -> calls, bytes."""
    calls = Counter((kind, ranks) for kind, _, ranks in sent)
    return {key: (n, sum(size for kind, size, ranks in sent if (kind, ranks) == key)) for key, n in calls.items()}


def said(report: Report) -> dict[tuple[str, int], tuple[int, int]]:
    out: dict[tuple[str, int], tuple[int, int]] = {}
    for c in report.collectives:
        calls, payload = out.get((c.collective, c.group_size), (0, 0))
        out[c.collective, c.group_size] = calls + c.calls, payload + c.payload
    return out


@pytest.mark.parametrize("name", SETUPS)
def test_a_step(name: str) -> None:
    report, real = both(LLAMA, *SETUPS[name])
    assert phases(report) == [real.forward, real.backward, real.step]
    assert said(report) == counted(real.sent)


@pytest.mark.parametrize(
    ("options", "how"),
    [
        ({"gpus": 4}, {"mesh": (4,)}),
        ({"gpus": 8, "shard_group": 4}, {"mesh": (2, 4)}),
        ({"gpus": 4, "precision": "bf16"}, {"mesh": (4,), "dtype": torch.bfloat16, "policy": None}),
        ({"gpus": 1}, {"mesh": (1,)}),
    ],
    ids=str,
)
def test_clipping_sums_the_norms_of_the_shards(options: dict[str, Any], how: dict[str, Any]) -> None:
    """In one call over the ranks of a shard."""
    report, real = both(LLAMA, {"clip_grad_norm": True, **options, **SHALLOW}, {"clips": True, **how, **SHALLOW})
    assert phases(report) == [real.forward, real.backward, real.step]
    assert said(report) == counted(real.sent)
    assert sum(c.name == "norms of the gradients" for c in report.collectives) == (report.setup.shards > 1)


@pytest.mark.parametrize(
    ("precision", "dtype"), [("bf16-mixed", torch.float32), ("fp32", torch.float32), ("bf16", torch.bfloat16)]
)
@pytest.mark.parametrize("mesh", [(1,), (4,), (2, 4)], ids=str)
def test_norms_are_there_before_the_step(mesh: tuple[int, ...], precision: str, dtype: torch.dtype) -> None:
    """A fused step has no temporaries: what clips sets its peak."""
    gpus, shards = prod(mesh), mesh[-1]
    policy = torch.bfloat16 if precision == "bf16-mixed" else None
    options = {"gpus": gpus, "shard_group": shards, "precision": precision, "clip_grad_norm": True, **SHALLOW}
    report, real = both(LLAMA, options, {"mesh": mesh, "policy": policy, "dtype": dtype, "clips": True, **SHALLOW})
    assert phases(report) == [real.forward, real.backward, real.step]
    assert said(report) == counted(real.sent)
    without = memcalc.estimate(dict(LLAMA), **{**report.setup._asdict(), "clip_grad_norm": False})
    assert without.phases["step"] < real.step


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("zero", [2, 3])
@pytest.mark.parametrize("mesh", [(8,), (64,), (8, 8)], ids=str)
def test_all_of_it_together(mesh: tuple[int, ...], zero: int, recompute: str) -> None:
    """Resharding or not, accumulation, clipping, checkpointing and hybrid sharding."""
    gpus = prod(mesh)
    how = {"micro_batch_size": 2, "seq_len": 5}
    options = {"gpus": gpus, "shard_group": mesh[-1], "zero": zero, "recompute": recompute, "clip_grad_norm": True,
               "global_batch_size": 4 * gpus, "sync_each_micro_batch": True, **how}  # fmt: skip
    real = {"mesh": mesh, "reshards": None if zero == 3 else False, "recompute": recompute == "full", "clips": True,
            "micro_batches": 2, **how}  # fmt: skip
    report, step = both(dict(LLAMA, num_hidden_layers=3), options, real)
    assert phases(report) == [step.forward, step.backward, step.step]
    assert said(report) == counted(step.sent)


OTHERS = (
    "gpt2",
    "qwen3",
    "gemma2",
    "gpt_neox",
    "mixtral",
    "falcon",
    "mamba",
    "bert",
    "phi3",
    "opt",
    "olmo2",
    "deepseek_v3",
    "deberta-v2",  # its loss is 16 bits
    "codegen",  # its sines are in fp32, as buffers are
    "ctrl",  # has layers that transformers does not mark
    "gpt_neox_japanese",
)


@pytest.mark.parametrize("model_type", OTHERS)
def test_a_step_of_another_family(model_type: str) -> None:
    case = step_cases(model_type)[0]
    kind = memcalc.load_model(case.fields).program.attention_kinds[0]
    workload = {"micro_batch_size": case.batch, "seq_len": case.seq, "attention": kind}
    report, real = both(case.fields | dict.fromkeys(DROPOUTS, 0.0), workload, workload)
    assert phases(report) == [real.forward, real.backward, real.step]
    assert said(report) == counted(real.sent)


@pytest.mark.parametrize("recompute", ["full", "op"])
@pytest.mark.parametrize("model_type", ["ernie4_5", "mixtral"])
def test_a_recomputed_step_of_another_family(model_type: str, recompute: str) -> None:
    """ERNIE's angles are in fp32: a layer's hooks cast them, and they are outside of what is recomputed."""
    case = step_cases(model_type)[0]
    workload = {"micro_batch_size": case.batch, "seq_len": case.seq, "recompute": recompute}
    report, real = both(case.fields | dict.fromkeys(DROPOUTS, 0.0), workload, workload)
    assert phases(report) == [real.forward, real.backward, real.step]
    assert said(report) == counted(real.sent)


@pytest.mark.parametrize("zero", [2, 3])
def test_positions_in_fp32_are_cast_before_a_checkpoint_keeps_them(zero: int) -> None:
    """The hooks are around the checkpoint (transformers' GradientCheckpointingLayer): each layer keeps casts of its own."""
    config = dict(step_cases("olmo")[0].fields) | {"num_hidden_layers": 4}
    workload = {"micro_batch_size": 1, "seq_len": 16}
    options = {"zero": zero, "recompute": "full", **workload}
    report, real = both(config, options, {"reshards": zero == 3, "recompute": True, **workload})
    assert phases(report) == [real.forward, real.backward, real.step]


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_a_reduction_holds_of_the_last_gradient(ranks: int) -> None:
    """A layer of OLMo's ends with a large weight; over one rank its gradient is let go sooner."""
    fields = LLAMA | {"model_type": "olmo", "attention_bias": False, "tie_word_embeddings": False}
    report, real = both(fields, {"gpus": ranks, **SHALLOW}, {"mesh": (ranks,), **SHALLOW})
    assert phases(report) == [real.forward, real.backward, real.step]


@pytest.mark.parametrize("ranks", [8, 64])
def test_llama_7b(ranks: int) -> None:
    config = {"model_type": "llama", "vocab_size": 32000}  # the defaults are the 7B's
    workload = {"micro_batch_size": 1, "seq_len": 2048}
    report, real = both(config, {"gpus": ranks, **workload}, {"mesh": (ranks,), **workload})
    assert phases(report) == [real.forward, real.backward, real.step]
    assert said(report) == counted(real.sent)


def test_foreach_has_a_temporary_of_the_shard() -> None:
    report, real = both(LLAMA, {"optimizer_implementation": "foreach"}, {"implementation": "foreach"})
    counters = 4 * len(report.model.weights())  # on CPU tensors Adam's step counters are on the same device
    assert phases(report)[2] == real.step - counters


@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_layer_of_every_family_is_gathered(model_type: str) -> None:
    """A program that called a layer around its hooks would have the layer's parameters for nothing."""
    program = paper.program_of(step_cases(model_type)[0].fields)
    hooks = Sharding(2, True, fp32, fp32, accumulating=False)
    choices = Choices(bf16, program.attention_kinds[0], False, False, hooks=hooks)
    run = trace(program, choices, 2, 16, program.layers)
    gathered = Counter((row.scope, row.layer) for row in run.rows if row.name == "gathered parameters")
    assert gathered == {(w.name, w.layer): 1 if w.layer is None else 2 for w in program.weights()}


def test_no_reshard_keeps_every_layer_to_its_backward() -> None:
    held = {zero: memcalc.estimate(LLAMA, engine="fsdp2", zero=zero, gpus=2, seq_len=32) for zero in (2, 3)}
    layer = sum(n for name, shape, _ in held[2].model.weights() if "layers.0." in name for n in [_size(shape)])
    assert held[2].phases["backward"] - held[3].phases["backward"] >= 4 * 2 * layer


def _size(shape: tuple[int, ...]) -> int:
    out = 1
    for n in shape:
        out *= n
    return out


def test_what_is_refused() -> None:
    def refused(**options: Any) -> str:
        with pytest.raises(memcalc.InputError) as error:
            memcalc.estimate("llama-7b", engine="fsdp2", gpus=8, **options)
        return str(error.value)

    assert refused(zero=0) == (
        "--engine fsdp2: shards weights, gradients and states; allowed: with --zero 3 (reshards after forward) or 2 (does not)"
    )
    assert "--zero 1: fsdp2" in refused(zero=1)
    assert "--shard-group 3: does not divide dp·cp = 8; allowed: 1, 2, 4, 8" in refused(zero=3, shard_group=3)
    assert "--optimizer muon: over fsdp2's shards" in refused(zero=3, optimizer="muon")
    fused = {"zero": 3, "optimizer": "sgd-momentum", "optimizer_implementation": "fused"}
    assert "fused: torch has no fused sgd-momentum over FSDP2's shards" in refused(**fused)
    assert "--grad-dtype fp16: is not what fsdp2 reduces gradients in; allowed: fp32, bf16" in refused(
        zero=3, grad_dtype="fp16"
    )


@pytest.mark.parametrize("model_type", ["minimax", "openai-gpt"])
def test_an_attention_that_meets_fp32_buffers_is_refused(model_type: str) -> None:
    case = step_cases(model_type)[0]
    workload = {"micro_batch_size": case.batch, "seq_len": case.seq, "attention": "eager"}
    with pytest.raises(RuntimeError, match=r"dtype|scalar type"):
        sharded_step(dict(case.fields), **SEVEN | workload)
    options = {"gpus": 7, "zero": 3, "engine": "fsdp2", **workload}
    line = f"--precision bf16-mixed: MixedPrecisionPolicy casts no buffers, and a {model_type}'s attention"
    with pytest.raises(memcalc.InputError, match=line):
        memcalc.estimate(case.fields, **options)
    assert memcalc.estimate(case.fields, precision="bf16", **options).peak


def test_model_states_of_a_size_are_16_bytes_over_the_ranks() -> None:
    report = memcalc.estimate(params=7_500_000_000, engine="fsdp2", zero=3, gpus=64)
    assert report.peak == 16 * 7_500_000_000 // 64 + (7_500_000_000 % 64 and 16)


@pytest.mark.parametrize(
    ("options", "divisor"),
    [({}, "⌈vocab/dp⌉"), ({"cp": 2}, "⌈vocab/(dp·cp)⌉"), ({"shard_group": 4}, "⌈vocab/shard group⌉")],
)
def test_a_shard_is_named_after_what_divides_it(options: dict[str, Any], divisor: str) -> None:
    report = memcalc.estimate("llama-7b", engine="fsdp2", gpus=8, zero=3, seq_len=64, **options)
    (table,) = (i for i in report.items if (i.component, i.name) == ("parameters", "model.embed_tokens.weight"))
    ranks = report.setup.shards
    assert table.formula.startswith(divisor) and dict(table.shape)[divisor] == 32000 // ranks


def test_what_a_setup_says_of_experts_can_be_given_back() -> None:
    report = memcalc.estimate("llama-7b", engine="fsdp2", gpus=8, tp=2, zero=3, seq_len=64)
    again = memcalc.estimate("llama-7b", engine="fsdp2", gpus=8, tp=2, zero=3, seq_len=64, etp=report.setup.etp)
    assert again.setup == report.setup


def test_a_norm_behind_the_experts_runs_in_their_blocks_frame() -> None:
    """A.X K1: what the router has returned is still there, here at the peak of forward."""
    fields = step_cases("axk1")[0].fields
    options: dict[str, Any] = {"gpus": 2, "zero": 3, "precision": "bf16-mixed", "seq_len": 32}
    rows = validate(fields, engine="fsdp2", **options).memory
    assert [row.name for row in rows if row.difference] == []
