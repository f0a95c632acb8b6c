"""torchtitan's TOML of a setup: reading it gives the setup again."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest
from hypothesis import given
from torchtitan_setups import ENDS, EXAMPLES, model_of, resolved, setups, stages

import memcalc
from memcalc.errors import InputError
from memcalc.formats.given import with_files
from memcalc.formats.torchtitan_flavors import WRITTEN_NAMES, flavor_of
from memcalc.formats.torchtitan_models import flavors
from memcalc.formats.torchtitan_writer import write
from memcalc.formats.written import Written
from memcalc.inputs.model import Model
from memcalc.inputs.options import Options, check_options
from memcalc.setup.resolved import resolve
from memcalc.setup.setup import Setup


def written(name: str = "llama3 8B", **options: Any) -> Written:
    model = model_of(name)
    return write(resolved(model, **options), model)


def content(name: str = "llama3 8B", **options: Any) -> dict[str, Any]:
    return tomllib.loads(written(name, **options).text)


def refusal(name: str = "llama3 8B", **options: Any) -> str:
    setup, model = resolved(model_of(name), **options), model_of(name)
    with pytest.raises(InputError) as caught:
        write(setup, model)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def read_again(file: Written, setup: Setup) -> tuple[Model, Setup]:
    """The model and the setup of the file and the unsaid options."""
    unsaid = {name: getattr(setup, name) for name in file.unsaid}
    model, options, _ = with_files(None, {**unsaid, "torchtitan": tomllib.loads(file.text)})
    if "gpu" not in unsaid:
        options.pop("gpu", None)  # of the machine that the test runs on
    return model, resolve(check_options(options), model)


@EXAMPLES
@given(setups())
def test_reading_gives_the_same_setup(case: tuple[str, Setup]) -> None:
    name, setup = case
    model = model_of(name)
    try:
        file = write(setup, model)
    except InputError as error:
        assert str(error).split(" ")[0] in {f"--{one.replace('_', '-')}" for one in Options._fields}
        assert "\n" not in str(error)
        return
    again_model, again = read_again(file, setup)
    assert again_model.weights() == model.weights()
    assert stages(again, model.layers) == stages(setup, model.layers)
    ends = dict.fromkeys(ENDS)  # the same stages can have two names
    assert again._replace(**ends) == setup._replace(**ends)


def test_a_file() -> None:
    file = written(
        gpus=64, engine="fsdp2", tp=2, sequence_parallel=True, cross_entropy="vocab-parallel", shard_group=8,
        micro_batch_size=2, global_batch_size=128, seq_len=8192, recompute="op", clip_grad_norm=True,
        optimizer_implementation="fused", sync_each_micro_batch=True,
    )  # fmt: skip
    assert file.unsaid == {}
    assert (
        file.text
        == """# torchtitan v0.2.2

[model]
name = "llama3"
flavor = "8B"

[optimizer]
name = "AdamW"

[training]
local_batch_size = 2
global_batch_size = 128
seq_len = 8192

[parallelism]
data_parallel_replicate_degree = 4
data_parallel_shard_degree = 8
tensor_parallel_degree = 2

[activation_checkpoint]
mode = "selective"
selective_ac_option = "op"
"""
    )


def test_what_torchtitan_does_by_itself_is_unsaid() -> None:
    assert written(gpus=8, engine="fsdp2", gpus_per_node=4, gpu="h100-80gb").unsaid.keys() == {
        "clip_grad_norm", "sync_each_micro_batch", "gpus_per_node", "gpu"
    }  # fmt: skip
    unsaid = written(gpus=8, engine="fsdp2", recompute="full", recompute_layers=20).unsaid
    assert "32, 16, 10, 8, 6, … of 32 layers" in unsaid["recompute_layers"]


@pytest.mark.parametrize(
    ("options", "keys"),
    [
        ({"engine": "fsdp2", "precision": "bf16-mixed"}, {}),
        ({"engine": "fsdp2", "precision": "fp32"}, {"mixed_precision_param": "float32"}),
        (
            {"engine": "fsdp2", "precision": "bf16"},
            {"dtype": "bfloat16", "mixed_precision_reduce": "bfloat16"},
        ),
        ({"engine": "fsdp2", "grad_dtype": "bf16"}, {"mixed_precision_reduce": "bfloat16"}),
        ({"engine": "ddp", "precision": "bf16-autocast"}, {}),
        ({"engine": "ddp", "precision": "fp32"}, {"mixed_precision_param": "float32"}),
        ({"engine": "ddp", "precision": "bf16"}, {"dtype": "bfloat16", "mixed_precision_param": "float32"}),
        ({"engine": "fsdp2", "tp": 2, "precision": "fp32"}, {}),
        ({"engine": "fsdp2", "tp": 2, "precision": "bf16"}, {"dtype": "bfloat16"}),
    ],
)
def test_precision(options: dict[str, Any], keys: dict[str, str]) -> None:
    training = content(gpus=2, **options)["training"]
    assert {key: value for key, value in training.items() if "size" not in key and key != "seq_len"} == keys


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {"first_stage_less_layers": 0, "last_stage_less_layers": 0}),
        ({"first_stage_layers": 8, "last_stage_layers": 7}, {}),
        (
            {"first_stage_layers": 7, "last_stage_layers": 7},
            {"first_stage_less_layers": 2, "last_stage_less_layers": 1},
        ),
        (
            {"schedule": "interleaved", "virtual_stages": 2},
            {"schedule": "Interleaved1F1B", "first_stage_less_layers": 0, "last_stage_less_layers": 0},
        ),
        (
            {"schedule": "interleaved", "virtual_stages": 4},
            {
                "schedule": "Interleaved1F1B",
                "layers_per_stage": 2,
                "first_stage_less_layers": 0,
                "last_stage_less_layers": 0,
            },
        ),
        ({"schedule": "interleaved", "virtual_stages": 3}, {"schedule": "Interleaved1F1B", "layers_per_stage": 3}),
    ],
)
def test_stages(options: dict[str, Any], expected: dict[str, Any]) -> None:
    keys = content(gpus=8, engine="fsdp2", zero=2, pp=4, global_batch_size=32, **options)
    begin = "pipeline_parallel_"
    pipeline = {key.removeprefix(begin): value for key, value in keys["parallelism"].items() if begin in key}
    assert pipeline == {"degree": 4, **expected}
    assert keys["training"]["local_batch_size"] == 16


def test_uneven_stages_are_lists_of_modules() -> None:
    keys = content(
        gpus=4, engine="fsdp2", precision="fp32", pp=4, global_batch_size=4, first_stage_layers=3, last_stage_layers=12
    )
    parts = keys["parallelism"]["module_fqns_per_model_part"]
    assert [len(part) for part in parts] == [3 + 1, 9, 8, 12 + 2]
    assert parts[0] == ["tok_embeddings", "layers.0", "layers.1", "layers.2"]
    assert parts[-1][-3:] == ["layers.31", "norm", "output"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"gpus": 8, "zero": 2}, "--engine deepspeed: torchtitan has FSDP2 and DDP; allowed: fsdp2, ddp, none, or the"),
        ({"gpus": 8, "engine": "megatron"}, "or the format megatron"),
        ({"gpus": 8, "engine": "fsdp2", "lora_rank": 8}, "--lora-rank 8: "),
        ({"freeze": "embeddings"}, "--freeze embeddings: "),
        ({"task": "sft"}, "--task sft: "),
        ({"gpus": 8, "engine": "fsdp2", "optimizer": "lion"}, "--optimizer lion: is not one of torchtitan's"),
        ({"gpus": 8, "engine": "fsdp2", "precision": "fp16-mixed"}, "--precision fp16-mixed: is not what"),
        ({"gpus": 8, "engine": "fsdp2", "tp": 8}, "--precision bf16-mixed: torchtitan has no mixed precision if"),
        ({"gpus": 8, "engine": "fsdp2", "shard_group": 1}, "--shard-group 1: torchtitan then has DDP"),
        ({"gpus": 8, "engine": "fsdp2", "tp": 2, "ep": 2, "shard_group": 1}, "--ep 2: torchtitan shares experts"),
        ({"engine": "fsdp2"}, "--engine fsdp2: torchtitan shards nothing on one GPU"),
        ({"engine": "ddp", "precision": "fp32"}, "--engine ddp: torchtitan puts nothing around"),
        ({}, "--precision bf16-mixed: is not what torchtitan has without FSDP; allowed: bf16-autocast, fp32, bf16"),
        ({"gpus": 8, "engine": "fsdp2", "seq_len": 1001}, "--seq-len 1001: torchtitan divides it by 2·tp·cp = 2"),
        (
            {
                "gpus": 8, "engine": "fsdp2", "zero": 2, "pp": 2, "schedule": "zero-bubble", "global_batch_size": 16,
            },
            "--virtual-stages 1: ",
        ),
    ],
)  # fmt: skip
def test_refusals(options: dict[str, Any], words: str) -> None:
    assert words in refusal("qwen3 debugmodel_moe" if "ep" in options else "llama3 8B", **options)


def test_flex_attention_shares_no_sequence() -> None:
    model = model_of("deepseek_v3 16B")
    setup = resolved(model, gpus=8, engine="fsdp2")._replace(cp=2, shard_group=8, dp=4)
    with pytest.raises(InputError, match="--cp 2: torchtitan's deepseek_v3 16B has FlexAttention"):
        write(setup, model)


def test_offload() -> None:
    model = model_of("llama3 8B")
    setup = resolved(model, gpus=8, engine="fsdp2")
    both = setup._replace(offload_optimizer="cpu", offload_params="cpu")
    assert "enable_cpu_offload = true" in write(both, model).text
    with pytest.raises(InputError, match="--offload-optimizer cpu: torchtitan's FSDP offloads"):
        write(setup._replace(offload_optimizer="cpu"), model)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("llama-3.1-8b", ("llama3", "8B")),
        ("llama-3-70b", ("llama3", "70B")),
        ("llama-3.3-70b", ("llama3", "70B")),
        ("qwen3-4b", ("qwen3", "4B")),
        ("qwen3-30b-a3b", ("qwen3", "30B-A3B")),
        ("deepseek-v3", ("deepseek_v3", "671B")),
    ],
)
def test_flavors_of_published_models(name: str, expected: tuple[str, str]) -> None:
    assert flavor_of(memcalc.load_model(name), 2048)[:2] == expected


def test_every_flavor_is_its_own() -> None:
    for name in WRITTEN_NAMES:
        for flavor in flavors(name):
            assert flavor_of(model_of(f"{name} {flavor}"), 2048)[:2] == (name, flavor)


@pytest.mark.parametrize(
    "change",
    [
        {"vocab_size": 128257},
        {"num_hidden_layers": 31},
        {"attention_bias": True},
        {"hidden_act": "gelu"},
        {"tie_word_embeddings": True},
        {"attention_dropout": 0.1},
        {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
    ],
)
def test_other_models_are_refused(change: dict[str, Any]) -> None:
    fields = model_of("llama3 8B").fields
    assert fields is not None
    with pytest.raises(InputError) as caught:
        flavor_of(memcalc.load_model({**fields, "_name_or_path": "mine", **change}), 2048)
    assert str(caught.value).startswith(
        "--model mine: torchtitan v0.2.2 has no flavor of these sizes; allowed: llama3 "
    )
    assert "8B, 70B, 405B; " in str(caught.value)
    with pytest.raises(InputError, match="--model llama-7b: "):
        flavor_of(memcalc.load_model("llama-7b"), 2048)
