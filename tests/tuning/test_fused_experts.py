"""Adapters of experts that are one parameter each, against peft's own ParamWrapper: names and shapes, and every number of a
step, to the byte."""

from __future__ import annotations

from typing import Any

import pytest
from cases import step_cases
from tuning.tuned_weights import weights_of
from validate.test_fake import MIXTRAL, same

import memcalc
from memcalc.errors import InputError
from memcalc.tuning.default_targets import FUSED, NOT_ALL
from memcalc.validate import as_trained

TYPES = sorted(FUSED - NOT_ALL - {"ernie4_5_moe"})  # whose router has a module within it
LORA: dict[str, Any] = {"lora_rank": 4, "lora_targets": "all-linear", "engine": "none", "precision": "bf16"}
OF_EXPERTS = {"mixtral": "q_proj,w1,w2,w3", "minimax": "w2", "minimax_m2": "block_sparse_moe.gate,v_proj"}


def pefts(fields: dict[str, Any], targets: list[str] | str) -> list[tuple[str, list[int], bool]]:
    peft = pytest.importorskip("peft")
    import torch

    from memcalc.tracing.modules import configuration, on_meta, quiet

    kept = {name: value for name, value in fields.items() if name != "model_type"}
    with quiet(), torch.device("meta"):
        model = on_meta(configuration(fields["model_type"], kept))
        own: Any = peft.get_peft_model(model, peft.LoraConfig(r=3, target_modules=targets)).get_base_model()
    return [(name, list(p.shape), p.requires_grad) for name, p in own.named_parameters()]


@pytest.mark.parametrize("family", sorted(FUSED))
def test_parameters_are_pefts(family: str) -> None:
    fields = step_cases(family)[-1].fields
    model = memcalc.load_model(fields)
    names = OF_EXPERTS.get(family, "o_proj,up_proj,gate_proj")
    if family in TYPES:
        assert weights_of(model, lora_rank=3, lora_targets="all-linear") == pefts(fields, "all-linear")
    for targets in (names, names.split(",")[0]):
        assert weights_of(model, lora_rank=3, lora_targets=targets) == pefts(fields, targets.split(","))


def test_a_layer_of_mixtral() -> None:
    """w1 and w3 are one parameter, whose adapter has twice the rank for each of 8 experts."""
    own = {w.name: [d.size for d in w.shape] for w in weights_of_mixtral("w1,w3") if w.layer == 0}
    assert own["model.layers.*.mlp.experts.lora_A.default.weight"] == [8 * 2 * 4, 4096]
    assert own["model.layers.*.mlp.experts.lora_B.default.weight"] == [2 * 14336, 8 * 2 * 4]
    assert own["model.layers.*.mlp.experts.base_layer.gate_up_proj"] == [8, 2 * 14336, 4096]


def weights_of_mixtral(targets: str) -> Any:
    return memcalc.estimate("mixtral-8x7b", lora_rank=4, lora_targets=targets).model.program.weights()


@pytest.mark.parametrize(
    "options",
    [
        {"micro_batch_size": 2, "seq_len": 24},
        *(
            pytest.param(one, marks=pytest.mark.slow)
            for one in (
                {"lora_rank": 8, "recompute": "full", "lora_targets": "w1,w3,gate"},
                {"engine": "ddp", "gpus": 2, "precision": "bf16-autocast"},
                {"engine": "deepspeed", "gpus": 2, "zero": 2, "precision": "bf16-mixed"},
            )
        ),
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_a_step(options: dict[str, Any]) -> None:
    if options.get("engine") == "deepspeed":
        pytest.importorskip("deepspeed")
    same(as_trained.validate(MIXTRAL, **{**LORA, "seq_len": 16, **options}))


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"precision": "fp32"},
        {"precision": "bf16-autocast", "recompute": "full"},
        {"adapter_dtype": "bf16", "recompute": "full"},
        {"lora_rank": 8, "engine": "ddp", "gpus": 2},
        {"engine": "deepspeed", "gpus": 2, "zero": 1, "precision": "bf16-mixed"},
    ],
    ids=lambda options: "-".join(map(str, options.values())) or "plain",
)
@pytest.mark.parametrize("family", TYPES)
def test_families(family: str, options: dict[str, Any]) -> None:
    if family == "minimax" and options.get("precision") == "bf16-mixed":
        pytest.skip("refused: its fp32 buffers do not go with DeepSpeed's 16-bit weights")
    for case in step_cases(family)[:2]:
        workload = {"micro_batch_size": case.batch, "seq_len": case.seq}
        same(as_trained.validate(dict(case.fields), **LORA | workload | options))


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"quantize": "nf4", "double_quant": True},
        {"quantize": "nf4", "prepare_kbit_training": True, "recompute": "full"},
        {"modules_to_save": "lm_head"},
        {"lora_bias": "all"},
        {"padded": True},
        {"engine": "ddp", "gpus": 2, "global_batch_size": 8, "clip_grad_norm": True},
        {"engine": "deepspeed", "zero": 2, "gpus": 4, "precision": "bf16-mixed", "offload_optimizer": "cpu"},
        {"optimizer": "adamw-8bit"},
        {"recompute": "full", "recompute_layers": 1},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "deepseek_v3"])
def test_more_options(family: str, options: dict[str, Any]) -> None:
    case = step_cases(family)[0]
    same(
        as_trained.validate(dict(case.fields), **LORA | {"micro_batch_size": case.batch, "seq_len": case.seq} | options)
    )


def test_real_adapters_have_the_dtype_of_their_parameter() -> None:
    """With tensors that have data peft casts them, where it is not told to make them fp32."""
    peft = pytest.importorskip("peft")
    import torch
    import transformers

    model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**MIXTRAL)).bfloat16()
    own = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["w1", "w3"]), autocast_adapter_dtype=False)
    assert {p.dtype for name, p in own.named_parameters() if "lora_" in name} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"lora_targets": "w1,w2"}, "--lora-targets w1,w2: peft adapts w1 and w3 of a mixtral together"),
        ({"lora_dropout": 0.1}, r"--lora-dropout 0.1: peft's adapters of fused experts \(ParamWrapper\)"),
        ({"dora": True}, "--dora on: peft's adapters of fused experts"),
        ({"zero": 3, "gpus": 2}, "--lora-targets all-linear: an adapter of fused experts with ZeRO-3"),
        ({"engine": "fsdp2", "gpus": 2}, "an adapter of fused experts with engine fsdp2"),
        ({"task": "dpo"}, "--task dpo: with an adapter of fused experts"),
        (
            {"lora_targets": "gate", "task": "dpo"},
            "--task dpo: with an adapter of a router, which is one parameter, is not",
        ),
        (
            {"lora_targets": "gate,q_proj", "dora": True},
            r"--dora on: peft's adapters of a router \(ParamWrapper\) have none",
        ),
        ({"recompute": "op"}, "--recompute op: with an adapter of fused experts"),
        ({"reentrant_checkpoints": True, "recompute": "full"}, "--reentrant-checkpoints on: with an adapter of fused"),
        ({"model": "ernie4_5_moe"}, "--lora-targets all-linear: an adapter of gate, which has a module within it,"),
        (
            {"model": "hunyuan_v1_moe"},
            "--lora-targets all-linear: for a hunyuan_v1_moe, not all of whose linear layers",
        ),
        ({"lora_targets": "gate_proj,q_proj"}, "gate_proj is no linear layer of this model"),
    ],
)
def test_refused(options: dict[str, Any], named: str) -> None:
    options = dict(options)
    kind = options.pop("model", None)
    model = MIXTRAL if kind is None else dict(step_cases(kind)[0].fields)
    with pytest.raises(InputError, match=named):
        memcalc.estimate(model, **{"lora_rank": 4, "lora_targets": "all-linear", "seq_len": 16, **options})


def test_a_router_alone_is_no_copy_of_experts() -> None:
    def told(targets: str) -> bool:
        report = memcalc.estimate(MIXTRAL, lora_rank=4, lora_targets=targets, seq_len=16)
        return any("keeps a copy of its experts" in note for note in report.to_dict()["notes"])

    assert [told("gate"), told("gate,w2")] == [False, True]
