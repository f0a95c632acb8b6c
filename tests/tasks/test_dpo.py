"""DPO against TRL's own trainer and LM head over transformers' models: every number of a step, to the byte."""

from __future__ import annotations

from dataclasses import fields as fields_of
from typing import Any

import pytest
from cases import DROPOUTS, step_cases
from tasks.trl_oracle import reference_peak, validate
from validate.test_fake import GPT2, LLAMA, MIXTRAL, QWEN3, same

import memcalc
from memcalc.explanation.reasons import reason
from memcalc.families import FAMILIES
from memcalc.report.notes import notes
from memcalc.tasks.fused_head import POSITIONS, WORDS, position_tiles

DEEP = LLAMA | {"num_hidden_layers": 8}  # so many that paper runs fewer
LARGE_HEAD = LLAMA | {"vocab_size": 2 * WORDS + 100}
BF16: dict[str, Any] = {"precision": "bf16"}


@pytest.mark.parametrize(
    ("model", "options"),
    [
        (LLAMA, BF16),
        (LLAMA, BF16 | {"precompute_reference": True}),
        (LLAMA, BF16 | {"micro_batch_size": 1}),
        (LLAMA, {"precision": "fp32"}),
        (LLAMA, {"precision": "bf16-mixed", "global_batch_size": 6}),
        (LLAMA, {"precision": "bf16-autocast"}),
        (DEEP, {"precision": "bf16-autocast", "recompute": "full"}),
        (DEEP, BF16 | {"recompute": "full"}),
        (LLAMA, BF16 | {"clip_grad_norm": True, "optimizer_implementation": "for-loop"}),
        (LLAMA, BF16 | {"padded": True}),
        (LLAMA, BF16 | {"attention": "eager", "padded": True}),
        (LLAMA, BF16 | {"freeze": "embeddings,first:1"}),
        (LLAMA | {"tie_word_embeddings": True}, BF16),
        (LARGE_HEAD, BF16),
        (LARGE_HEAD, {"precision": "fp16-autocast"}),
        (LLAMA, BF16 | {"seq_len": 1200}),
        (LLAMA, {"precision": "bf16-autocast", "micro_batch_size": 4, "seq_len": 1200}),
        (GPT2, BF16),
        (QWEN3, {"precision": "bf16-mixed", "recompute": "full"}),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if "model_type" not in value else value["model_type"],
)
def test_a_step(model: dict[str, Any], options: dict[str, Any]) -> None:
    same(validate(model, **{"task": "dpo", "micro_batch_size": 2, "seq_len": 32} | options))


@pytest.mark.parametrize(
    "options",
    [
        BF16,
        BF16 | {"precompute_reference": True},
        BF16 | {"recompute": "full"},
        BF16 | {"lora_targets": "all-linear", "adapter_dtype": "bf16", "lora_dropout": 0.1},
        {"precision": "bf16-autocast", "lora_targets": "all-linear", "recompute": "full"},
        {"precision": "bf16-mixed", "global_batch_size": 6},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_adapters_are_their_own_reference(options: dict[str, Any]) -> None:
    """They are switched off for the reference's forward; there is no second model."""
    comparison = validate(DEEP, **{"task": "dpo", "lora_rank": 4, "micro_batch_size": 2, "seq_len": 32} | options)
    same(comparison)
    assert not [item for item in comparison.report.items if item.name.startswith("reference")]


def runs(family: str) -> bool:
    """Whether the task is estimated for a family's first case."""
    try:
        memcalc.estimate(step_cases(family)[0].fields, task="dpo", seq_len=8)
    except memcalc.InputError:
        return False
    return True


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family: str) -> None:
    if not runs(family):
        pytest.skip("the task is refused")
    case = step_cases(family)[0]
    same(validate(case.fields, task="dpo", micro_batch_size=case.batch, seq_len=case.seq, **BF16))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(
    "family",
    ["gpt2", "gpt_neox", "phi", "phi3", "stablelm", "falcon", "starcoder2"],
)
def test_dropout_is_off_where_it_is_a_module(family: str, attention: str) -> None:
    case = step_cases(family)[0]
    own = {field.name for field in fields_of(FAMILIES[family].program.Config)}
    fields = case.fields | {name: 0.1 for name in DROPOUTS if name in own and name != "layerdrop"}
    size = {"micro_batch_size": case.batch, "seq_len": case.seq}
    same(validate(fields, task="dpo", attention=attention, **size, **BF16))


@pytest.mark.parametrize(
    "options",
    [
        BF16,
        BF16 | {"precompute_reference": True},
        {"precision": "bf16-autocast", "recompute": "full"},
        {"precision": "bf16-mixed", "global_batch_size": 24},
        BF16 | {"lora_rank": 4, "recompute": "full"},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_with_ddp(options: dict[str, Any]) -> None:
    """Only the policy is in DistributedDataParallel."""
    same(validate(LLAMA, **{"task": "dpo", "engine": "ddp", "gpus": 4, "micro_batch_size": 2, "seq_len": 32} | options))


@pytest.mark.parametrize(
    "options",
    [
        {"zero": 0},
        {"zero": 0, "precision": "fp16-mixed"},
        {"zero": 1},
        {"zero": 1, "precision": "fp32"},
        {"zero": 2, "reduce_bucket_size": 2000, "recompute": "full", "global_batch_size": 24},
        {"zero": 2, "precompute_reference": True, "padded": True},
        {"zero": 1, "lora_rank": 4, "lora_targets": "all-linear", "recompute": "full"},
        {"zero": 2, "lora_rank": 4},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_with_deepspeed(options: dict[str, Any]) -> None:
    """The reference has an engine of its own, of stage 0 and without an optimizer (`prepare_deepspeed`)."""
    workload: dict[str, Any] = {"gpus": 4, "micro_batch_size": 2, "seq_len": 32}
    same(validate(DEEP, task="dpo", engine="deepspeed", **workload | options))


@pytest.mark.parametrize("dropout", ["resid_pdrop", "embd_pdrop", "attn_pdrop"])
def test_dropout_is_off(dropout: str) -> None:
    """TRL switches off the modules of dropout, the adapters' too (`disable_dropout`)."""
    options: dict[str, Any] = {"task": "dpo", "seq_len": 16, "attention": "eager", "lora_rank": 2}
    off = memcalc.estimate(GPT2 | {dropout: 0.0}, **options)
    assert memcalc.estimate(GPT2 | {dropout: 0.5}, **options).phases == off.phases
    assert memcalc.estimate(GPT2 | {dropout: 0.0}, lora_dropout=0.5, **options).phases == off.phases


def test_a_deep_stack_is_run_shallow() -> None:
    """Twelve layers or a hundred: what each more costs is the same."""
    phases = [
        memcalc.estimate(LLAMA | {"num_hidden_layers": depth}, task="dpo", seq_len=32, precision="bf16-autocast").phases
        for depth in (12, 13, 14)
    ]
    for phase in phases[0]:
        assert phases[1][phase] - phases[0][phase] == phases[2][phase] - phases[1][phase]


def test_a_reference_is_a_second_copy_of_the_weights() -> None:
    """And nothing else between steps: it has no gradients and no optimizer states."""
    plain, tuned = (memcalc.estimate("llama-7b", task=task, seq_len=64) for task in ("pretrain", "dpo"))
    assert tuned.total("parameters") - plain.total("parameters") == 2 * plain.model.num_parameters
    assert tuned.total("optimizer_states") == plain.total("optimizer_states")
    assert tuned.total("gradients") == plain.total("gradients")
    rows = {item.name: item for item in tuned.items}
    assert "dpo_trainer.py" in rows["reference model: lm_head.weight"].source
    assert tuned.model.num_parameters == plain.model.num_parameters


@pytest.mark.parametrize(
    ("model", "options"),
    [
        (LLAMA, BF16),
        (DEEP, {"precision": "bf16-autocast", "recompute": "full"}),
        (DEEP, BF16 | {"lora_rank": 4}),
        (LLAMA, BF16 | {"task": "kto", "global_batch_size": 6}),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if "model_type" not in value else "llama",
)
def test_the_peak_of_the_references_forward(model: dict[str, Any], options: dict[str, Any]) -> None:
    report = memcalc.estimate(model, **{"task": "dpo", "micro_batch_size": 2, "seq_len": 32} | options)
    assert report.reference_peak == reference_peak(report)
    assert memcalc.estimate(model, task="dpo", precompute_reference=True).reference_peak is None


def test_it_is_explained() -> None:
    report = memcalc.estimate(LLAMA, task="dpo", seq_len=32, **BF16)
    rows = {item.name: item for item in report.items}
    assert "never trains" in reason(report, rows["reference model: lm_head.weight"], "en")
    assert "no logits" in reason(report, rows["loss: hidden states of the labels"], "en")
    assert any("the reference's forward peaks at" in note for note in notes(report))


def test_tiles() -> None:
    assert position_tiles(100) == (100,)
    assert position_tiles(POSITIONS + 1) == (POSITIONS, 1)
    assert position_tiles(5 * POSITIONS) == (POSITIONS, POSITIONS)


def test_pretraining_is_as_it_was() -> None:
    plain, named = memcalc.estimate("llama-7b"), memcalc.estimate("llama-7b", task="pretrain")
    assert plain.phases == named.phases
    assert plain.model is memcalc.estimate(plain.model).model


@pytest.mark.parametrize(
    ("model", "options", "named"),
    [
        (
            LLAMA,
            {"task": "dpo", "precompute_reference": True, "gpus": 2, "zero": 3},
            "--task dpo: with --zero 3, which shards the head and the reference too",
        ),
        (
            LLAMA,
            {"task": "dpo", "cross_entropy": "eager"},
            "--cross-entropy eager: TRL's trainer has a head of its own",
        ),
        (LLAMA, {"task": "dpo", "kernels": "fused"}, "--kernels fused: with --task dpo is not modelled"),
        (LLAMA, {"task": "dpo", "recompute": "op"}, "--recompute op: TRL's trainer switches checkpointing"),
        (LLAMA, {"task": "dpo", "recompute": "full", "recompute_layers": 1}, "--recompute-layers 1: TRL's trainer"),
        (LLAMA, {"task": "dpo", "seq_len": 1}, "needs a token after the first one"),
        (LLAMA, {"task": "dpo", "lora_rank": 4, "lora_targets": "lm_head"}, "lm_head with --task dpo is not modelled"),
        (MIXTRAL, {"task": "dpo"}, "--task dpo: for a mixtral is not modelled"),
        (step_cases("bert")[0].fields, {"task": "dpo"}, "--task dpo: for a bert is not modelled"),
        (LLAMA, {"precompute_reference": True}, "--precompute-reference on: is an option of tasks with a reference"),
        (LLAMA, {"task": "dpo", "engine": "fsdp2", "gpus": 2}, "--task dpo: with engine fsdp2 is not modelled"),
        (LLAMA, {"task": "dpo", "engine": "megatron", "gpus": 2}, "--task dpo: with engine megatron is not modelled"),
        (
            step_cases("bloom")[0].fields | {"hidden_dropout": 0.1},
            {"task": "dpo"},
            "for a bloom whose hidden_dropout is not 0",
        ),
        (LLAMA, {"task": "rlhf"}, "--task rlhf: allowed: pretrain, sft, dpo, kto, ppo, grpo"),
    ],
)
def test_refusals(model: dict[str, Any], options: dict[str, Any], named: str) -> None:
    with pytest.raises(memcalc.InputError) as error:
        memcalc.estimate(model, **options)
    assert named in str(error.value)
    assert "\n" not in str(error.value)
