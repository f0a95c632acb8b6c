"""Checkpoints that re-enter autograd against torch's own, to the byte: a step of transformers' models on every engine."""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import oracle
import paper
import per_op
import pytest
import torch
from cases import Case, step_cases
from reentrant_oracle import kernels_without_a_graph, validated
from validate.test_fake import BART, DEEPSEEK, GPT2, LLAMA, MIXTRAL, T5, same

import memcalc
from memcalc.core.dtypes import bf16
from memcalc.core.tensor import new_tensor
from memcalc.families import FAMILIES
from memcalc.tape.closures import left_in_closures
from memcalc.tasks.reentrant_checks import _NOT_MODELLED

if TYPE_CHECKING:
    from collections.abc import Mapping

DEEP = LLAMA | {"num_hidden_layers": 8}  # so many that paper runs fewer
BLOOM = {"model_type": "bloom", "hidden_size": 64, "n_layer": 4, "n_head": 4, "vocab_size": 300}
GEMMA = {"model_type": "gemma", "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 5, "num_attention_heads": 4,
         "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 300}  # fmt: skip
WORKLOAD: dict[str, Any] = {"micro_batch_size": 2, "seq_len": 32}
BF16 = {"precision": "bf16"}
SHARED = {"engine": "deepspeed", "zero": 3, "gpus": 4, "param_persistence_threshold": 10}
ADAPTED = {"lora_rank": 4, "lora_targets": "all-linear"}


def named(options: Mapping[str, Any]) -> str:
    return "-".join(map(str, options.values()))


@pytest.mark.parametrize(
    ("model", "options"),
    [
        (DEEP, BF16),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (GPT2, {"precision": "bf16", "padded": True, "attention": "eager"}),
                (T5, {"precision": "bf16-autocast", "attention": "eager"}),
                (LLAMA, {"precision": "bf16", "quantize": "nf4", **ADAPTED}),
                (LLAMA, {**SHARED, **ADAPTED}),
            )
        ),
    ],
    ids=["llama", "gpt2", "t5", "adapters over 4 bits", "adapters on ZeRO-3"],
)
def test_a_step(model: dict[str, Any], options: dict[str, Any]) -> None:
    same(validated(model, **WORKLOAD, **options))


@pytest.mark.slow
@pytest.mark.parametrize(
    "model", [DEEP, GPT2, MIXTRAL, T5, GEMMA, BLOOM, BART, DEEPSEEK], ids=lambda m: m["model_type"]
)
@pytest.mark.parametrize(
    "options",
    [
        BF16,
        {"precision": "bf16", "attention": "eager", "padded": True},
        {"precision": "bf16-autocast"},
        {"precision": "bf16-mixed", "global_batch_size": 6},
        {"precision": "bf16", "lora_rank": 4, "lora_targets": "default"},
    ],
    ids=named,
)
def test_one_gpu(model: dict[str, Any], options: dict[str, Any]) -> None:
    if "lora_rank" in options and model["model_type"] in ("mixtral", "deepseek_v3"):
        pytest.skip("peft has no default targets")
    same(validated(model, **WORKLOAD, **options))


@pytest.mark.slow
@pytest.mark.parametrize("model", [DEEP, GPT2, MIXTRAL, GEMMA, BLOOM], ids=lambda m: m["model_type"])
@pytest.mark.parametrize(
    "options",
    [
        {"engine": "ddp", "precision": "bf16-mixed"},
        {"engine": "fsdp2", "zero": 3},
        {"engine": "fsdp2", "zero": 2, "global_batch_size": 16},
        {"engine": "deepspeed", "zero": 1},
        {"engine": "deepspeed", "zero": 2, "reduce_bucket_size": 20_000},
        {"engine": "deepspeed", "zero": 3, "param_persistence_threshold": 10},
    ],
    ids=named,
)
def test_engines(model: dict[str, Any], options: dict[str, Any]) -> None:
    same(validated(model, gpus=4, **WORKLOAD, **options))


@pytest.mark.slow
@pytest.mark.parametrize("layers", [1, 5])
@pytest.mark.parametrize("options", [{}, {"engine": "fsdp2", "gpus": 2}, SHARED], ids=named)
def test_the_first_layers(options: dict[str, Any], layers: int) -> None:
    same(validated(DEEP, recompute_layers=layers, **WORKLOAD, **options))


@pytest.mark.slow
@pytest.mark.parametrize("targets", ["default", "all-linear"])
@pytest.mark.parametrize("model", [DEEP, GPT2, BLOOM, T5], ids=lambda m: m["model_type"])
@pytest.mark.parametrize(
    "options",
    [
        {"engine": "ddp", "precision": "bf16"},
        {"engine": "fsdp2"},
        {"engine": "deepspeed", "zero": 2, "reduce_bucket_size": 2000},
        {"engine": "deepspeed", "zero": 3, "param_persistence_threshold": 10},
    ],
    ids=named,
)
def test_adapters(model: dict[str, Any], options: dict[str, Any], targets: str) -> None:
    if options["engine"] == "fsdp2" and model is T5:
        pytest.skip("fsdp2 has no stacks of two kinds")
    same(validated(model, gpus=4, lora_rank=4, lora_targets=targets, **WORKLOAD, **options))


# --- every family


def on_paper(case: Case, attention: str) -> paper.PaperStep:
    """The step on paper, with what the graph of the step before holds."""

    def made() -> paper.PaperRun:
        run = paper.PaperRun(paper.program_of(case.fields), case.batch, case.seq, bf16, attention, recompute=True)
        run.run.reentrant, run.run.positional = True, run.program.positional
        run.left_behind[:] = run.program.left_behind(run.run)
        return run

    again, run = made(), made()
    held = left_in_closures(again.program, again.run, None, again.batch)
    run.left_behind += [new_tensor(run.memory, row.shape, row.dtype, row.name) for row in held]
    return run.step()


FIRST = [
    case
    for family in FAMILIES
    if paper.program_of(step_cases(family)[0].fields).recomputes and family not in _NOT_MODELLED
    for case in step_cases(family)[:1]
]


@pytest.mark.slow
@pytest.mark.parametrize("case", FIRST, ids=[case.id for case in FIRST])
def test_families(case: Case) -> None:
    attention = paper.program_of(case.fields).attention_kinds[
        -1
    ]  # eager where there is a choice: masks are written out
    ours = on_paper(case, attention)
    step: Any = oracle.training_step
    with patch.dict(per_op.CHECKPOINTS, full={"use_reentrant": True}), kernels_without_a_graph():
        theirs = step.__wrapped__(
            deepcopy(case.fields), micro_batch_size=case.batch, seq_len=case.seq, attention=attention, recompute=True,
            optimizer="sgd", balanced=case.balanced, real=case.real or case.balanced,
        )  # fmt: skip
    start, resident = ours.start, theirs.resident
    assert (ours.saved, ours.forward - start, ours.backward - start) == (
        theirs.saved, theirs.forward - resident, theirs.backward - resident,
    )  # fmt: skip
    assert ours.flops == theirs.flops


# --- what it is, and what is refused


def test_a_layer_is_run_to_its_end() -> None:
    """There is no early stop: the product of the last linear layer is computed again too, 2 · 2048 tokens · 4096 · 11008 FLOPs
    in each of 32 layers."""

    def recomputed(*, reentrant: bool) -> int:
        report = memcalc.estimate("llama-7b", recompute="full", precision="bf16", reentrant_checkpoints=reentrant)
        return sum(item["flops"] for item in report.to_dict()["compute"]["items"] if item["phase"] == "recomputation")

    assert recomputed(reentrant=True) - recomputed(reentrant=False) == 32 * 2 * 2048 * 4096 * 11008


def test_torch_fails_as_refused() -> None:
    """The relative embeddings of DeBERTa are outside of the checkpoint, and its backward goes through them again and again."""
    (case, *_) = step_cases("deberta-v2")
    step: Any = oracle.training_step
    with (
        patch.dict(per_op.CHECKPOINTS, full={"use_reentrant": True}),
        pytest.raises(RuntimeError, match="a second time"),
    ):
        step.__wrapped__(deepcopy(case.fields), micro_batch_size=2, seq_len=16, attention="eager", recompute=True)


def test_weights_that_get_no_gradient_are_refused_and_have_none() -> None:
    """Nothing in front of the first layer wants a gradient: torch warns, and trains the norm and the head alone."""
    options: dict[str, Any] = {"freeze": "embeddings", "input_require_grads": False, **WORKLOAD}
    with pytest.raises(
        memcalc.InputError, match=r"--reentrant-checkpoints on: nothing that model\.layers\.0 is given wants a"
    ):
        memcalc.estimate(LLAMA, recompute="full", reentrant_checkpoints=True, **options)
    model: Any = oracle.build(deepcopy(LLAMA), "eager", torch.float32)
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.disable_input_require_grads()
    model.get_input_embeddings().weight.requires_grad_(False)
    ids = torch.zeros((1, 4), dtype=torch.int64)
    with pytest.warns(UserWarning, match="None of the inputs have requires_grad"):
        model(input_ids=ids, labels=ids).loss.backward()
    assert [name for name, weight in model.named_parameters() if weight.grad is not None] == [
        "model.norm.weight",
        "lm_head.weight",
    ]


@pytest.mark.parametrize(
    ("model", "options", "why"),
    [
        ("llama-7b", {"recompute": "none"}, "needs --recompute full"),
        ("llama-7b", {"recompute": "op"}, "needs --recompute full"),
        ("llama-7b", {"engine": "megatron"}, "code of its own"),
        ("llama-7b", {"gpus": 2, "tp": 2, "engine": "fsdp2"}, "with --tp 2"),
        ("llama-7b", {"gpus": 2, "engine": "fsdp1"}, "with engine fsdp1"),
        ("llama-7b", {"kernels": "fused"}, "with --kernels fused"),
        ("llama-7b", {"lora_rank": 4, "quantize": "int8", "precision": "bf16"}, "with --quantize int8"),
        ("llama-7b", {"lora_rank": 4, "quantize": "nf4", "gpus": 2, "engine": "fsdp2"}, "shared out by fsdp2"),
        ("llama-7b", {"optimizer": "lomo", "precision": "bf16"}, "with --optimizer lomo"),
        (step_cases("zamba2")[0].fields, {}, "a checkpoint in a checkpoint"),
        (step_cases("deberta-v2")[0].fields, {}, "relative embeddings"),
    ],
)
def test_refusals(model: Any, options: dict[str, Any], why: str) -> None:
    with pytest.raises(memcalc.InputError, match="--reentrant-checkpoints on: ") as error:
        memcalc.estimate(model, **{"recompute": "full", "reentrant_checkpoints": True, "seq_len": 16} | options)
    assert why in str(error.value)
