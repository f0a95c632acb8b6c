"""DoRA against peft: names and shapes of weights, and every number of a step on every engine, to the byte."""

from __future__ import annotations

from typing import Any

import pytest
from cases import step_cases
from tuning.peft_step import parameters, validate
from tuning.tuned_weights import weights_of
from validate.test_fake import LLAMA, same

import memcalc
from memcalc.families import FAMILIES
from memcalc.report.notes import notes
from memcalc.report.title import title

DEEP = LLAMA | {"num_hidden_layers": 8}  # so many that paper runs fewer
BIASED = LLAMA | {"attention_bias": True}
FAMILIES_RUN = ("qwen2", "gpt2", "bert", "t5", "phi3", "bart", "bloom", "opt", "gpt_neox", "gemma3_text", "cohere")
UNMODELLED = ("zamba2",)


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "resnet"])
def test_parameters_are_pefts(family: str) -> None:
    fields = step_cases(family)[0].fields
    model, compared = memcalc.load_model(fields), 0
    for targets in ("default", "all-linear", "q_proj,o_proj", "o_proj", "in_proj"):
        try:
            ours = weights_of(model, lora_rank=3, lora_targets=targets, dora=True)
        except memcalc.InputError:
            continue
        given = {"default": None, "all-linear": "all-linear"}.get(targets, targets.split(","))
        assert ours == parameters(fields, {"target_modules": given, "use_dora": True}), targets
        compared += 1
    assert compared or family in UNMODELLED


@pytest.mark.parametrize(
    "options",
    [
        {"precision": "bf16"},
        {"precision": "bf16", "adapter_dtype": "bf16"},
        {"precision": "bf16-mixed", "lora_targets": "all-linear"},
        {"precision": "bf16-mixed", "lora_targets": "all-linear", "global_batch_size": 6, "recompute": "full"},
        {"precision": "bf16", "recompute": "full", "adapter_dtype": "bf16", "lora_dropout": 0.1},
        {"precision": "bf16", "recompute": "op"},
        {"precision": "fp32", "lora_dropout": 0.1},
        {"precision": "bf16", "lora_dropout": 0.1, "lora_targets": "all-linear"},
        {"precision": "bf16-autocast", "lora_targets": "q_proj,o_proj"},
        {"precision": "bf16-autocast", "lora_targets": "q_proj,o_proj", "lora_dropout": 0.1},
        {"precision": "bf16", "lora_targets": "lm_head,q_proj"},
        {"precision": "fp16", "clip_grad_norm": True, "optimizer_implementation": "for-loop", "global_batch_size": 6},
        {"precision": "fp16-mixed", "optimizer": "adafactor", "adapter_dtype": "fp16"},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_one_gpu(options: dict[str, Any]) -> None:
    same(validate(LLAMA, lora_rank=4, dora=True, micro_batch_size=2, seq_len=32, **options))


@pytest.mark.parametrize(
    "options",
    [
        {"precision": "bf16-mixed", "lora_bias": "all"},
        {"precision": "bf16", "lora_bias": "lora_only", "adapter_dtype": "bf16"},
        {"precision": "bf16-mixed", "lora_dropout": 0.1},
        {"precision": "bf16-mixed", "lora_bias": "all", "engine": "deepspeed", "zero": 2, "gpus": 4},
        {"precision": "bf16-mixed", "engine": "deepspeed", "zero": 3, "gpus": 4, "param_persistence_threshold": 10},
    ],
)
def test_a_layer_with_a_bias(options: dict[str, Any]) -> None:
    same(validate(BIASED, lora_rank=4, dora=True, micro_batch_size=2, seq_len=32, **options))


@pytest.mark.parametrize("targets", ["default", "all-linear"])
@pytest.mark.parametrize(
    "options",
    [
        {"engine": "ddp", "precision": "bf16"},
        {"engine": "ddp", "precision": "bf16-mixed", "recompute": "full"},
        {"engine": "fsdp2", "zero": 3},
        {"engine": "fsdp2", "zero": 2, "recompute": "full", "global_batch_size": 16},
        {"engine": "fsdp2", "zero": 3, "recompute": "full", "precision": "bf16", "adapter_dtype": "bf16"},
        {"engine": "fsdp2", "zero": 3, "lora_dropout": 0.1},
        {"engine": "deepspeed", "zero": 0},
        {"engine": "deepspeed", "zero": 1, "reduce_bucket_size": 2000},
        {"engine": "deepspeed", "zero": 2, "reduce_bucket_size": 2000, "recompute": "full"},
        {"engine": "deepspeed", "zero": 3, "param_persistence_threshold": 100},
        {"engine": "deepspeed", "zero": 3, "param_persistence_threshold": 10, "recompute": "full"},
        {"engine": "deepspeed", "zero": 3, "param_persistence_threshold": 10, "lora_dropout": 0.1},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_engines(targets: str, options: dict[str, Any]) -> None:
    shape = {"gpus": 4, "micro_batch_size": 2, "seq_len": 32}
    same(validate(DEEP, lora_rank=4, dora=True, lora_targets=targets, **shape, **options))


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("family", FAMILIES_RUN)
def test_families(family: str, recompute: str) -> None:
    case = step_cases(family)[0]
    workload = {"micro_batch_size": case.batch, "seq_len": case.seq, "precision": "bf16", "recompute": recompute}
    same(validate(case.fields, lora_rank=3, dora=True, lora_targets="all-linear", **workload))


def kept_by_a_layer(**options: Any) -> int:
    kept = [
        memcalc.estimate(
            LLAMA | {"num_hidden_layers": depth}, precision="bf16", lora_rank=4, lora_targets="all-linear",
            micro_batch_size=2, seq_len=32, **options,
        ).total("saved_activations")
        for depth in (3, 4)
    ]  # fmt: skip
    return kept[1] - kept[0]


def test_what_a_layer_keeps() -> None:
    """More than LoRA, for T tokens: 6·T of each output, or 4·T with 16-bit adapters. With dropout 8·T, and an fp32 copy of
    each weight. Three vectors of magnitudes are there always."""
    h, q, kv, f, tokens = 96, 144, 48, 200, 2 * 32
    outputs, weights = q + 2 * kv + h + 2 * f + h, h * (q + 2 * kv) + q * h + 3 * h * f
    for options, nbytes, copies in (
        ({}, 6 * tokens + 3 * 4, 0),
        ({"adapter_dtype": "bf16"}, 4 * tokens + 3 * 2, 0),
        ({"lora_dropout": 0.1}, 8 * tokens + 3 * 4, 4),
    ):
        more = kept_by_a_layer(dora=True, **options) - kept_by_a_layer(**options)
        assert more == nbytes * outputs + copies * weights


def test_what_a_report_says() -> None:
    report = memcalc.estimate(LLAMA, lora_rank=4, dora=True, precision="bf16", lora_dropout=0.1)
    assert any("keeps an fp32 copy of its weight from forward to its backward" in note for note in notes(report))
    assert "DoRA adapters of rank 4" in title(report)
    less = memcalc.estimate(LLAMA, lora_rank=4, dora=True, precision="bf16")
    assert not any("DoRA" in note for note in notes(less))


def test_dora_needs_adapters() -> None:
    with pytest.raises(memcalc.InputError, match="--dora on: is an option of adapters; allowed: with --lora-rank"):
        memcalc.estimate(LLAMA, dora=True)
