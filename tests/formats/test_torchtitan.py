"""What `--torchtitan` reads: the values that torchtitan's trainer would use, a note or one line for everything else."""

from __future__ import annotations

from typing import Any

import pytest
from torchtitan_contents import NO_RECOMPUTATION, found, notes, options, refusal, with_keys

import memcalc
from memcalc.errors import InputError
from memcalc.formats.found import ACCUMULATION, REPLICAS
from memcalc.formats.torchtitan import read

MODERN = """
[job]
description = "a run"
[model]
name = "llama3"
flavor = "8B"
hf_assets_path = "./assets/hf/Llama-3.1-8B"
[optimizer]
name = "AdamW"
lr = 3e-4
[training]
local_batch_size = 2
seq_len = 8192
max_norm = 1.0
steps = 1000
[parallelism]
data_parallel_replicate_degree = 2
data_parallel_shard_degree = 8
tensor_parallel_degree = 4
context_parallel_degree = 2
[activation_checkpoint]
mode = "selective"
selective_ac_option = "op"
"""
OLD = """
[model]
name = "llama3"
flavor = "70B"
norm_type = "fused_rmsnorm"
tokenizer_path = "./torchtitan/datasets/tokenizer/original/tokenizer.model"
[optimizer]
name = "AdamW"
[training]
batch_size = 16
seq_len = 4096
data_parallel_degree = 4
tensor_parallel_degree = 2
compile = true
fp8_linear = "dynamic"
enable_loss_parallel = false
[experimental]
pipeline_parallel_degree = 4
pipeline_parallel_schedule = "interleaved_1f1b"
pipeline_parallel_split_points = "layers.10,layers.20,layers.30,layers.40,layers.50,layers.60,layers.70"
[checkpoint]
enable_checkpoint = false
[activation_checkpoint]
mode = "full"
"""


def test_a_file_of_today() -> None:
    got = found(MODERN)
    assert options(MODERN) == {
        "seq_len": 8192,
        "gpus": 2 * 8 * 4 * 2,
        "tp": 4,
        "pp": 1,
        "cp": 2,
        "shard_group": 16,
        "sequence_parallel": True,
        "cross_entropy": "vocab-parallel",
        "cp_comm_type": "all_gather",
        "engine": "fsdp2",
        "zero": 3,
        "sync_each_micro_batch": True,
        "precision": "bf16-mixed",
        "micro_batch_size": 2,
        ACCUMULATION: 1,
        "recompute": "op",
        "optimizer": "adamw",
        "optimizer_implementation": "fused",
        "clip_grad_norm": True,
    }
    assert got.options["tp"] == (4, "run.toml: parallelism.tensor_parallel_degree", True)
    assert got.options["pp"] == (1, "run.toml: parallelism.pipeline_parallel_degree, its default", False)
    assert got.model is not None
    assert got.model.value["intermediate_size"] == 14336
    assert len(got.notes) == 1
    given = {**options(MODERN), "global_batch_size": 2 * 16, "cross_entropy": "eager"}
    given.pop(ACCUMULATION)
    report = memcalc.estimate(memcalc.load_model(got.model.value), **given)
    assert report.setup.dp == 16


def test_a_file_of_2024() -> None:
    got = found(OLD)
    assert options(OLD) == {
        "seq_len": 4096,
        "gpus": 32,
        "tp": 2,
        "pp": 4,
        "cp": 1,
        "sequence_parallel": True,
        "cross_entropy": "eager",
        "engine": "fsdp2",
        "zero": 2,
        "precision": "bf16-mixed",
        "schedule": "interleaved",
        "virtual_stages": 2,
        "micro_batch_size": 2,  # as many micro-batches as stages
        ACCUMULATION: 8,
        "recompute": "full",
        "optimizer": "adamw",
        "optimizer_implementation": "foreach",
        "clip_grad_norm": True,
    }
    assert [note.split(":")[1].strip().split(" ")[0] for note in got.notes] == [
        "model.name",
        "training.compile",
        "training.fp8_linear",
    ]


def test_an_empty_file_is_the_debug_model() -> None:
    got = read("", {})
    assert got.model is not None
    assert got.model.value["_name_or_path"] == "llama3 debugmodel"
    assert not got.model.is_given
    assert "gpus" not in got.options
    assert not any(value.is_given for value in got.options.values())
    assert {name: got.options[name].value for name in ("micro_batch_size", "seq_len", "recompute_layers", "zero")} == {
        "micro_batch_size": 8,
        "seq_len": 2048,
        "recompute_layers": 3,
        "zero": 3,
    }


@pytest.mark.parametrize(
    ("degrees", "engine", "gpus", "precision"),
    [
        ({}, "fsdp2", None, "bf16-mixed"),
        ({"data_parallel_shard_degree": 1}, "none", 1, "bf16-autocast"),
        ({"data_parallel_shard_degree": 1, "data_parallel_replicate_degree": 4}, "ddp", 4, "bf16-autocast"),
        ({"data_parallel_shard_degree": 1, "tensor_parallel_degree": 8}, "fsdp2", 8, "fp32"),
        ({"data_parallel_shard_degree": 1, "context_parallel_degree": 2}, "fsdp2", 2, "bf16-mixed"),
        ({"data_parallel_shard_degree": 4, "data_parallel_replicate_degree": 2}, "fsdp2", 8, "bf16-mixed"),
    ],
)
def test_engines(degrees: dict[str, int], engine: str, gpus: int | None, precision: str) -> None:
    got = options(with_keys("parallelism", **degrees))
    assert (got["engine"], got.get("gpus"), got["precision"]) == (engine, gpus, precision)
    assert ("zero" in got) == (engine == "fsdp2")
    assert ("sync_each_micro_batch" in got) == (engine != "none")


def test_replicas_of_open_shards() -> None:
    content = with_keys("parallelism", data_parallel_replicate_degree=4, context_parallel_degree=2)
    got = options(content)
    assert (got[REPLICAS], got.get("shard_group")) == (4, None)
    setup = memcalc.estimate(gpus=32, torchtitan=content).setup
    assert (setup.dp, setup.shard_group) == (16, 8)
    with pytest.raises(
        InputError, match=r"--gpus 6: leaves dp·cp = 6, which .*data_parallel_replicate_degree 4 does not divide"
    ):
        memcalc.estimate(gpus=6, torchtitan=with_keys("parallelism", data_parallel_replicate_degree=4))


def test_ddp_of_2024() -> None:
    got = options(with_keys("training", data_parallel_type="ddp", data_parallel_degree=8))
    assert (got["engine"], got["gpus"], got["precision"]) == ("ddp", 8, "fp32")
    got = options(with_keys("training", data_parallel_type="ddp"))
    assert (got["engine"], got.get("gpus")) == ("ddp", None)


def test_ddp_before_autocast() -> None:
    degrees = {"parallelism": {"data_parallel_shard_degree": 1}}
    old = with_keys("training", degrees, batch_size=4)
    assert options(old)["precision"] == "fp32"
    assert "training.batch_size" in notes(old)
    assert options(with_keys("training", degrees, local_batch_size=4))["precision"] == "bf16-autocast"


@pytest.mark.parametrize(
    ("keys", "precision", "grad_dtype"),
    [
        ({"mixed_precision_param": "float32"}, "fp32", None),
        ({"mixed_precision_reduce": "bfloat16"}, "bf16-mixed", "bf16"),
        ({"mixed_precision_reduce": "float32"}, "bf16-mixed", None),
        ({"dtype": "bfloat16"}, "bf16", None),
        ({"dtype": "bfloat16", "mixed_precision_reduce": "bfloat16"}, "bf16", None),
    ],
)
def test_precision(keys: dict[str, str], precision: str, grad_dtype: str | None) -> None:
    content = with_keys("training", **keys)
    got = options(content)
    assert (got["precision"], got.get("grad_dtype")) == (precision, grad_dtype)
    summed_otherwise = precision == "bf16" and "mixed_precision_reduce" not in keys
    assert ("reduced in fp32" in notes(content)) == summed_otherwise
    assert read("", content).options["precision"].is_given == (keys.keys() != {"mixed_precision_reduce"})


def test_weights_of_bf16_are_not_those_of_mixed_precision() -> None:
    content = with_keys("training", {"parallelism": {"data_parallel_shard_degree": 8}}, dtype="bfloat16")
    assert memcalc.estimate(torchtitan=content).setup.precision == "bf16"


@pytest.mark.parametrize(
    ("policy", "pp", "zero"), [("default", 1, 3), ("default", 2, 2), ("always", 2, 3), ("never", 1, 2)]
)
def test_resharding(policy: str, pp: int, zero: int) -> None:
    keys = {"fsdp_reshard_after_forward": policy, "pipeline_parallel_degree": pp}
    assert options(with_keys("parallelism", **keys))["zero"] == zero


def test_context_parallel() -> None:
    content = with_keys("parallelism", context_parallel_degree=2, context_parallel_rotate_method="alltoall")
    assert options(content)["cp_comm_type"] == "p2p"
    content = with_keys("parallelism", context_parallel_degree=2, context_parallel_load_balancer="ptrr")
    assert "context_parallel_load_balancer ptrr" in notes(content)
    assert "cp_comm_type" not in options(with_keys("parallelism", context_parallel_rotate_method="alltoall"))


def test_experts() -> None:
    degrees = {"expert_parallel_degree": 8, "expert_parallel_comm_backend": "deepep"}
    content = with_keys("parallelism", {"model": {"name": "qwen3", "flavor": "30B-A3B"}}, **degrees)
    got = options(content)
    assert got["ep"] == 8
    assert "clip_grad_norm" not in got
    assert "training.max_norm" in notes(content)
    assert "deepep" in notes(content)
    dense = with_keys("parallelism", **degrees)
    assert "ep" not in options(dense)
    assert options(dense)["clip_grad_norm"]
    content["parallelism"]["expert_tensor_parallel_degree"] = 3
    assert "expert_tensor_parallel_degree 3: allowed: 1" in refusal(content)


def test_offload() -> None:
    got = options(with_keys("training", enable_cpu_offload=True))
    assert (got["offload_params"], got["offload_optimizer"]) == ("cpu", "cpu")


@pytest.mark.parametrize(
    ("keys", "implementation"),
    [
        ({}, "fused"),
        ({"implementation": "for-loop"}, "for-loop"),
        ({"fused": True}, "fused"),
        ({"fused": False}, "foreach"),
    ],
)
def test_optimizer_implementation(keys: dict[str, Any], implementation: str) -> None:
    assert options(with_keys("optimizer", **keys))["optimizer_implementation"] == implementation


def test_step_in_backward() -> None:
    content = with_keys("optimizer", early_step_in_backward=True)
    assert "clip_grad_norm" not in options(content)
    assert "early_step_in_backward true" in notes(content)


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("compile", "enable", True),
        ("training", "compile", True),
        ("model", "converters", ["float8"]),
        ("model", "converters", ["quantize.linear.mx"]),
        ("model", "norm_type", "layernorm"),
        ("model", "use_flex_attn", True),
        ("float8", "enable_float8_linear", True),
        ("training", "fp8_linear", "dynamic"),
        ("fault_tolerance", "enable", True),
        ("debug", "deterministic", True),
        ("activation_checkpoint", "per_op_sac_force_recompute_mm_shapes_by_fqns", ["attention.wq"]),
        ("fork", "some_key", 1),
    ],
)
def test_notes(section: str, key: str, value: Any) -> None:
    content = with_keys(section, **{key: value})
    assert "\n" not in notes(content)
    assert (f"{section}.{key}" if section != "fork" else "fork") in notes(content)


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("compile", "enable", False),
        ("compile", "components", ["loss"]),
        ("model", "norm_type", "fused_rmsnorm"),
        ("training", "fp8_linear", ""),
        ("float8", "enable_fsdp_float8_all_gather", True),
        ("lr_scheduler", "warmup_steps", 2),
        ("validation", "enable", True),
        ("training", "max_norm", float("inf")),
        ("activation_checkpoint", "per_op_sac_force_recompute_mm_shapes_by_fqns", ["moe.router.gate"]),
    ],
)
def test_what_changes_nothing(section: str, key: str, value: Any) -> None:
    assert notes(with_keys(section, **{key: value})) == ""


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (
            {"model": {"name": "flux", "flavor": "flux-dev"}, "encoder": {"t5_encoder": "x"}},
            "model.name 'flux': makes images",
        ),
        ({"model": {"name": "gpt_oss", "flavor": "20b"}}, "model.name 'gpt_oss': "),
        ({"model": {"name": "vlm"}}, "model.name 'vlm': is not modelled"),
        ({"model": {"flavor": "9B"}}, "model.flavor '9B': not one of llama3's; allowed: debugmodel, 8B"),
        ({"model": {"flavor": "${FLAVOR}"}}, "model.flavor"),
        ({"model": {"name": ["llama3"]}}, "model.name"),
        ({"model": {"config": "some/model"}}, "model.config: unknown key"),
        ({"training": {"seq_length": 4096}}, "training.seq_length: unknown key; did you mean seq_len?"),
        ({"trainning": {"seq_len": 4096}}, "trainning: unknown key; did you mean training?"),
        ({"training": {"seq_len": "${SEQ}"}}, "training.seq_len '${SEQ}': allowed: a whole number from 1 to"),
        ({"training": {"seq_len": 0}}, "training.seq_len 0: allowed"),
        ({"training": {"dtype": "float16"}}, "training.dtype 'float16': allowed: float32, bfloat16"),
        ({"training": {"dtype": "bfloat16", "mixed_precision_param": "float32"}}, "mixed_precision_param"),
        ({"training": {"max_norm": "<norm>"}}, "training.max_norm '<norm>': allowed: a number"),
        ({"training": {"global_batch_size": 0}}, "training.global_batch_size 0: allowed: -1"),
        ({"training": [1]}, "training [1]: allowed: a mapping"),
        ({"parallelism": {"data_parallel_shard_degree": 0}}, "data_parallel_shard_degree 0: allowed: -1"),
        ({"parallelism": {"data_parallel_shard_degree": -2}}, "data_parallel_shard_degree -2: allowed"),
        ({"parallelism": {"tensor_parallel_degree": -1}}, "tensor_parallel_degree -1: allowed"),
        ({"optimizer": {"name": "Muon"}}, "optimizer.name 'Muon': allowed: AdamW, Adam"),
        (
            {
                "parallelism": {
                    "data_parallel_replicate_degree": 2,
                    "data_parallel_shard_degree": 1,
                    "tensor_parallel_degree": 2,
                }
            },
            "data_parallel_replicate_degree 2: torchtitan's DDP",
        ),
    ],
)
def test_refusals(content: dict[str, Any], words: str) -> None:
    assert words in refusal({**NO_RECOMPUTATION, **content})


def test_modules_that_add_keys() -> None:
    content = {**NO_RECOMPUTATION, "job": {"custom_config_module": "mine.config"}, "training": {"seq_length": 1}}
    assert "training.seq_length: keys of mine.config" in notes(content)


def test_models_of_the_hub() -> None:
    model = {"model": {"name": "transformers_modeling_backend", "flavor": "full"}}
    content = {**NO_RECOMPUTATION, **model, "hf_transformers": {"model": "Qwen/Qwen3-4B"}}
    got = read("", content)
    assert got.model == ("Qwen/Qwen3-4B", "--torchtitan: hf_transformers.model", True)
    assert "needs [hf_transformers] model" in refusal(model)
    assert "the number of layers" in refusal({**content, "activation_checkpoint": {}})
