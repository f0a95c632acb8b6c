"""Frozen weights against transformers' own code, torch's engines and DeepSpeed's: every number of a step, to the byte."""

from __future__ import annotations

from typing import Any

import pytest
from cases import step_cases
from crossed import crossed
from validate.test_fake import BART, BERT, GLM4_MOE, GPT2, LLAMA, MIXTRAL, RESNET, T5, same
from validated import validate

import memcalc
from memcalc.tape import profile

DEEP = LLAMA | {"num_hidden_layers": 9}  # so many that paper runs fewer
ALBERT = {
    "model_type": "albert", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 72,
    "vocab_size": 70, "embedding_size": 16, "architectures": ["AlbertForMaskedLM"],
}  # fmt: skip
"""A type that is traced."""
PARTS = ("embeddings", "embeddings,first:2", "last:1", "norms", "attention", "mlp", "all-but:head", "all-but:norms")


@pytest.mark.parametrize("freeze", PARTS)
@pytest.mark.parametrize(
    "options",
    [
        {"precision": "bf16"},
        {"precision": "bf16-mixed", "recompute": "full", "global_batch_size": 4},
        {"precision": "bf16-autocast"},
    ],
    ids=["bf16", "recompute", "autocast"],
)
def test_parts_of_a_model(freeze: str, options: dict[str, Any]) -> None:
    same(validate(LLAMA, freeze=freeze, micro_batch_size=2, seq_len=32, **options))


@pytest.mark.parametrize(
    "freeze", ["embeddings,first:1", "last:2", "all-but:norms", "all-but:last:1+head", "attention"]
)
@pytest.mark.parametrize(
    "options",
    [
        {"engine": "ddp", "precision": "bf16"},
        {"engine": "fsdp2", "zero": 3},
        {"engine": "fsdp2", "zero": 2, "recompute": "full", "global_batch_size": 16},
        {"engine": "fsdp2", "zero": 3, "recompute": "full", "precision": "bf16"},
        {"engine": "deepspeed", "zero": 0},
        {"engine": "deepspeed", "zero": 1, "reduce_bucket_size": 20_000},
        {"engine": "deepspeed", "zero": 2, "reduce_bucket_size": 20_000, "recompute": "full"},
        {"engine": "deepspeed", "zero": 3, "param_persistence_threshold": 100},
        {"engine": "deepspeed", "zero": 3, "param_persistence_threshold": 10, "recompute": "full"},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_engines(freeze: str, options: dict[str, Any]) -> None:
    same(validate(DEEP, freeze=freeze, gpus=4, micro_batch_size=2, seq_len=32, **options))


@pytest.mark.parametrize("freeze", ["embeddings", "all-but:norms", "all-but:attention", "all-but:last:1+head"])
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize(
    "family",
    [
        "qwen2",
        "mistral",
        "mixtral",
        "gemma2",
        "gpt2",
        "bert",
        "t5",
        "phi3",
        "falcon",
        "bart",
        "gpt_bigcode",
        "recurrent_gemma",
    ],
)
def test_families(family: str, recompute: str, freeze: str) -> None:
    case = step_cases(family)[0]
    workload = {"micro_batch_size": case.batch, "seq_len": case.seq, "precision": "bf16"}
    same(validate(case.fields, freeze=freeze, recompute=recompute, **workload))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "options"),
    [
        (RESNET, {"precision": "fp32", "seq_len": None, "freeze": "first:1,*convolution*"}),
        (RESNET, {"precision": "fp32", "seq_len": None, "freeze": "norms"}),
        (T5, {"precision": "bf16", "freeze": "encoder,embeddings", "recompute": "full"}),
        (BART, {"precision": "bf16", "freeze": "encoder", "recompute": "full"}),
        (T5, {"precision": "bf16-mixed", "freeze": "last:1", "engine": "deepspeed", "zero": 2, "gpus": 4}),
        (BERT, {"freeze": "embeddings", "engine": "ddp", "gpus": 4}),
        (GPT2, {"freeze": "embeddings,first:2", "engine": "fsdp2", "gpus": 4, "zero": 3, "recompute": "full"}),
        (MIXTRAL, {"freeze": "mlp", "engine": "fsdp2", "gpus": 4, "zero": 3}),
        (MIXTRAL, {"freeze": "all-but:norms", "engine": "deepspeed", "gpus": 4, "zero": 3, "recompute": "full"}),
        (
            GLM4_MOE,
            {"freeze": "first:1", "engine": "fsdp2", "gpus": 4, "zero": 3, "optimizer_implementation": "for-loop"},
        ),
        (LLAMA, {"precision": "bf16", "freeze": "embeddings,first:1", "input_require_grads": True}),
        (
            LLAMA,
            {"precision": "bf16", "freeze": "embeddings,first:1", "input_require_grads": False, "recompute": "full"},
        ),
        (LLAMA, {"precision": "bf16", "freeze": "all-but:last:1", "recompute": "op"}),
        (LLAMA, {"precision": "bf16", "freeze": "embeddings", "recompute": "full", "recompute_layers": 2}),
        (LLAMA, {"freeze": "embeddings,norms", "optimizer": "muon"}),
        (LLAMA, {"freeze": "embeddings", "optimizer": "adafactor", "global_batch_size": 6, "clip_grad_norm": True}),
        (ALBERT, {"precision": "bf16", "freeze": "embeddings"}),
        (ALBERT, {"precision": "bf16-mixed", "freeze": "embeddings", "engine": "ddp", "gpus": 2}),
    ],
)
def test_other_setups(model: dict[str, Any], options: dict[str, Any]) -> None:
    same(validate(model, **{"micro_batch_size": 2, "seq_len": 32} | options))


# --- the depth


FREEZES = ("last:1", "first:3", "last:8", "embeddings,first:20", "model.layers.1?.*", "all-but:head")
RUNS: tuple[dict[str, Any], ...] = (
    {"precision": "bf16"},
    {"engine": "fsdp2", "gpus": 8, "zero": 3},
    {"engine": "deepspeed", "gpus": 8, "zero": 3},
    {"engine": "deepspeed", "gpus": 8, "zero": 2},
    {"engine": "ddp", "gpus": 8, "recompute": "full"},
)


@pytest.mark.parametrize(("freeze", "options"), crossed(FREEZES, RUNS))
def test_a_run_with_few_layers_is_the_full_one(
    freeze: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def read() -> Any:
        report = memcalc.estimate(LLAMA | {"num_hidden_layers": 30}, freeze=freeze, seq_len=64, **options)
        sent = sorted((one.name, one.payload, one.calls) for one in report.collectives)
        return report.phases, report.total("saved_activations"), sent, report.allocated, report.reserved

    def whole(program: Any, choices: Any, ends: int) -> profile.Cut:
        return profile.Cut(program.layers, choices, profile.NO_MIDDLE)

    few = read()
    monkeypatch.setattr(profile, "_cut", whole)
    assert few == read()


def test_layers_that_are_not_reached_keep_nothing() -> None:
    """Backward ends at the first layer that needs a gradient."""
    kept = [
        memcalc.estimate(DEEP, freeze=f"embeddings,first:{n}", seq_len=64).total("saved_activations") for n in (3, 4, 5)
    ]
    whole = memcalc.estimate(DEEP, seq_len=64).total("saved_activations")
    assert kept[0] - kept[1] == kept[1] - kept[2] > 0
    assert kept[0] < whole * 10 / 12


# --- parts, and what is refused


def test_trainable_parameters() -> None:
    whole = memcalc.load_model("llama-7b")
    report = memcalc.estimate(whole, freeze="all-but:head")
    assert report.to_dict()["model"]["trainable_parameters"] == 32_000 * 4096
    assert report.model.num_parameters == whole.num_parameters == whole.trainable_parameters


def test_plus_is_a_comma() -> None:
    one, other = (
        memcalc.estimate(LLAMA, freeze=text).model.trainable_parameters for text in ("mlp,norms", "mlp+norms")
    )
    assert one == other


def test_a_tied_head_is_the_embedding() -> None:
    trained = {
        part: memcalc.estimate("gpt2", freeze=part).model.trainable_parameters for part in ("head", "transformer.wte")
    }
    assert trained["head"] == trained["transformer.wte"] < memcalc.load_model("gpt2").num_parameters


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"freeze": "adapters"}, "--freeze adapters: this model has no parameters in adapters; allowed: embeddings,"),
        ({"freeze": "first:9"}, "--freeze first:9: allowed in first:N: a whole number from 1 to 3"),
        ({"freeze": "last:0"}, "--freeze last:0: allowed in last:N"),
        ({"freeze": "embeddings,,head"}, "no parameters in an empty part"),
        ({"freeze": "["}, "no parameters in ["),
        ({"freeze": "*"}, "--freeze *: leaves nothing to train"),
        ({"freeze": 3}, "--freeze 3: allowed: names of parts"),
        ({"freeze": " "}, "allowed: names of parts"),
        ({"freeze": "norms", "engine": "megatron", "gpus": 2}, "--freeze norms: with engine megatron is not modelled"),
        (
            {"freeze": "norms", "engine": "deepspeed", "gpus": 2, "tp": 2},
            "--freeze norms: with engine deepspeed and --tp 2 is not modelled",
        ),
        ({"freeze": "norms", "kernels": "megatron"}, "--kernels megatron: with --freeze is not modelled"),
        ({"input_require_grads": 1}, "--input-require-grads 1: allowed: true, false"),
    ],
)
def test_refusals(options: dict[str, Any], named: str) -> None:
    with pytest.raises(memcalc.InputError) as error:
        memcalc.estimate(LLAMA, **options)
    assert named in str(error.value)
    assert "\n" not in str(error.value)


def test_traced_models_under_zero_3_are_refused() -> None:
    with pytest.raises(
        memcalc.InputError, match="traced, is not modelled by this version; allowed: with --zero 0, 1, 2"
    ):
        memcalc.estimate(ALBERT, freeze="embeddings", engine="deepspeed", zero=3, gpus=2)


def test_a_bare_number_of_parameters_has_no_parts() -> None:
    with pytest.raises(memcalc.InputError, match="--freeze norms: model states of a bare number"):
        memcalc.estimate(params="7B", freeze="norms")
