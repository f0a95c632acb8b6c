"""`--recompute-layers` over transformers' layers: each has a switch of its own, which is left on in the first ones."""

from __future__ import annotations

from typing import Any

import pytest
from cases import DROPOUTS, step_cases
from ddp_oracle import replicated_step
from deepspeed_oracle import OPTIONS, PRECISIONS, deepspeed_step
from fsdp2_oracle import sharded_step
from oracle import training_step
from validated import validate

import memcalc
from memcalc.core.dims import evaluate
from memcalc.core.dtypes import bf16
from memcalc.estimation.report import Report
from memcalc.tape.profile import Choices, full_profile, profile

LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 48, "intermediate_size": 100, "num_hidden_layers": 7, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 10, "vocab_size": 301, "attention_bias": True,
}  # fmt: skip
GEMMA2 = {"model_type": "gemma2", "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 9, "head_dim": 16,
          "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 300, "sliding_window": 32}  # fmt: skip
GPT2: dict[str, Any] = {
    "model_type": "gpt2", "n_embd": 64, "n_layer": 12, "n_head": 4, "n_positions": 64, "vocab_size": 501,
    "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
}  # fmt: skip
WORKLOAD = {"micro_batch_size": 2, "seq_len": 33}


def phases(report: Report) -> list[int]:
    return [report.phases[phase] for phase in ("forward", "backward", "step")]


def ours(config: Any, layers: int, **options: Any) -> Report:
    how = {**WORKLOAD, "recompute": "full", "recompute_layers": layers, "optimizer_implementation": "fused"}
    return memcalc.estimate(config, **how | options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "attention", "layers"),
    [
        (LLAMA, "sdpa", 1),
        (LLAMA, "eager", 5),
        (LLAMA, "sdpa", 7),
        (GEMMA2, "eager", 3),
        (GEMMA2, "eager", 4),
        (GPT2, "sdpa", 5),
    ],
)
def test_one_gpu(config: dict[str, Any], attention: str, layers: int) -> None:
    real = training_step(
        config, recompute=True, recompute_layers=layers, attention=attention, implementation="fused", **WORKLOAD
    )
    report = ours(config, layers, attention=attention, precision="bf16")
    assert report.total("saved_activations") == real.saved
    assert phases(report) == [real.forward, real.backward, real.step]


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["deepseek_v3", "qwen3_next", "zamba2", "mamba", "phi3"])
def test_families_of_several_kinds_of_layers(model_type: str) -> None:
    """validate runs transformers' own, with the switch."""
    case = step_cases(model_type)[0]
    fields = case.fields | dict.fromkeys(DROPOUTS, 0.0)
    kind = memcalc.load_model(dict(fields)).program.attention_kinds[0]
    how = {"attention": kind, "precision": "bf16", "micro_batch_size": case.batch, "seq_len": case.seq}
    compared = validate(fields, recompute="full", recompute_layers=1, **how)
    assert [(row.name, row.predicted) for row in compared.memory] == [(r.name, r.measured) for r in compared.memory]


def test_ddp() -> None:
    report = ours(GPT2, 4, engine="ddp", gpus=4, precision="fp32")
    import torch

    real = replicated_step(GPT2, gpus=4, dtype=torch.float32, recompute="full", recompute_layers=4, **WORKLOAD)
    assert phases(report) == [real.forward, real.backward, real.step]


@pytest.mark.slow
@pytest.mark.parametrize(("zero", "layers"), [(3, 1), (3, 4), (2, 3)])
def test_fsdp2(zero: int, layers: int) -> None:
    config = LLAMA | {"num_hidden_layers": 11}
    how: dict[str, Any] = {"recompute": True, "recompute_layers": layers, "reshards": None if zero == 3 else False}
    real = sharded_step(config, mesh=(8,), implementation="fused", **WORKLOAD, **how)
    report = ours(config, layers, engine="fsdp2", gpus=8, zero=zero)
    assert phases(report) == [real.forward, real.backward, real.step]
    assert sum(c.calls for c in report.collectives) == len(real.sent)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_deepspeed(zero: int) -> None:
    kept = (
        {"param_persistence_threshold": 0, "max_live_parameters": 50_000, "max_reuse_distance": 50_000}
        if zero == 3
        else {}
    )
    kept |= {"reduce_bucket_size": 30_000} if zero else {}
    config = LLAMA | {"num_hidden_layers": 4}
    how: dict[str, Any] = {"recompute": True, "recompute_layers": 2, "steps": 3 if zero == 3 else 2}
    named = {OPTIONS[name]: n for name, n in kept.items()}
    runs = [
        deepspeed_step(config, gpus=2, zero=zero, rank=rank, **WORKLOAD, **how, **named)
        for rank in ((0, 1) if zero == 2 else (0,))
    ]
    report = ours(config, 2, engine="deepspeed", gpus=2, zero=zero, precision=PRECISIONS["bf16"], **kept)
    highest = [max(getattr(run, phase) for run in runs) for phase in ("forward", "backward", "step")]
    assert phases(report) == highest


MIXTRAL: dict[str, Any] = {
    "model_type": "mixtral", "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 300,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "options"),
    [
        (LLAMA, {"engine": "fsdp2", "gpus": 4, "tp": 2, "zero": 3}),
        (LLAMA, {"engine": "fsdp2", "gpus": 4, "tp": 2, "zero": 2, "sequence_parallel": True}),
        (LLAMA, {"engine": "fsdp2", "gpus": 4, "cp": 2, "zero": 3}),
        (LLAMA, {"engine": "deepspeed", "gpus": 4, "cp": 2, "zero": 2, "reduce_bucket_size": 10_000}),
        (MIXTRAL, {"engine": "fsdp2", "gpus": 4, "ep": 2, "zero": 3}),
    ],
    ids=["tp", "sequence parallel", "cp", "ulysses", "ep"],
)
def test_with_another_axis(config: dict[str, Any], options: dict[str, Any]) -> None:
    fields = config | {"num_hidden_layers": 3, "vocab_size": 300, "head_dim": 16, "hidden_size": 64}
    compared = validate(fields, recompute="full", recompute_layers=2, seq_len=32, micro_batch_size=2, **options)
    rows = compared.memory + compared.communication
    assert [(row.name, row.predicted) for row in rows] == [(row.name, row.measured) for row in rows]


@pytest.mark.parametrize("name", ["llama-7b", "gemma-2-9b", "deepseek-v2-lite", "gpt-oss-20b"])
@pytest.mark.parametrize("share", [3, 2, 1])
def test_a_cut_stack_is_the_whole_one(name: str, share: int) -> None:
    program = memcalc.load_model(name).program
    kind, layers = program.attention_kinds[0], max(1, program.layers // share - (share == 1))
    choices = Choices(bf16, kind, True, False, recompute_layers=layers)
    cut, whole = profile(program, choices, 2, 64), full_profile(program, choices, 2, 64)
    assert cut.saved.poly == whole.saved.poly
    for at in ((2, 64), (3, 1000)):
        for phase in ("forward", "backward"):
            for weight in (0, 1):  # without and with gradients
                most = [
                    max(evaluate(m.poly, *at) + weight * m.gradients for m in getattr(one, phase))
                    for one in (cut, whole)
                ]
                assert most[0] == most[1]
    assert len(cut.run.log) < len(whole.run.log)


def test_more_layers_save_less() -> None:
    saved = [ours("llama-7b", n, precision="bf16").total("saved_activations") for n in (1, 8, 31, 32)]
    everything = memcalc.estimate("llama-7b", recompute="full", precision="bf16", **WORKLOAD)
    assert saved == sorted(saved, reverse=True)
    assert saved[-1] == everything.total("saved_activations")
    each = (saved[0] - saved[1]) // 7
    assert saved == [saved[0] - each * (n - 1) for n in (1, 8, 31, 32)]


@pytest.mark.parametrize(
    ("model", "options", "line"),
    [
        ("llama-7b", {"recompute_layers": 33}, "--recompute-layers 33: llama-7b has 32 layers; allowed: 1 to 32"),
        ("llama-7b", {"recompute": "op"}, "--recompute-layers 2: needs --recompute full"),
        ("llama-7b", {"recompute": None}, "--recompute-layers 2: needs --recompute full"),
        (
            {"model_type": "recurrent_gemma"},
            {},
            "--recompute-layers 2: for a recurrent_gemma, whose layers keep their states, is not modelled",
        ),
        ("t5-small", {}, "--recompute-layers 2: t5-small has more than one stack of layers"),
        (
            "llama-7b",
            {"gpus": 2, "pp": 2, "engine": "fsdp2", "zero": 3},
            "--recompute-layers 2: with engine fsdp2 and pp above 1 is not modelled",
        ),
        (
            "llama-7b",
            {"gpus": 2, "tp": 2, "engine": "deepspeed"},
            "--recompute-layers 2: with engine deepspeed and tp above 1 is not modelled",
        ),
    ],
)
def test_what_is_refused(model: Any, options: dict[str, Any], line: str) -> None:
    with pytest.raises(memcalc.InputError, match=line):
        memcalc.estimate(model, **{"recompute": "full", "recompute_layers": 2, "seq_len": 64} | options)
