"""accelerate's configuration files: processes, precision, whole files and nonsense."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from accelerate_contents import DDP, DEEPSPEED, FSDP, MEGATRON, refusal, values

from memcalc.errors import InputError
from memcalc.formats import accelerate
from memcalc.formats.accelerate import read
from memcalc.formats.loading import load

# The number of GPUs, and one process for each.


def test_one_process() -> None:
    found = read("acc.yaml", {"distributed_type": "NO", "mixed_precision": "no"})
    assert values(found) == {"engine": "none", "gpus": 1, "precision": "fp32"}
    assert not found.options["precision"].is_given


@pytest.mark.parametrize("kind", [False, None, "NO"])
def test_yaml_reads_no_as_false(kind: object) -> None:
    found = read("acc.yaml", {"distributed_type": kind, "num_processes": 8, "mixed_precision": False})
    assert values(found)["engine"] == "none"
    assert values(found)["gpus"] == 1
    assert any("num_processes 8" in note for note in found.notes)


def test_one_process_of_several_has_no_ddp() -> None:
    assert values(read("", {**DDP, "num_processes": 1, "mixed_precision": "bf16"})) == {
        "gpus": 1,
        "precision": "bf16-autocast",
    }


def test_several_machines() -> None:
    found = read("acc.yaml", {**DDP, "num_processes": "16", "num_machines": 2})
    assert found.options["gpus"] == (16, "acc.yaml: num_processes", True)
    assert found.options["gpus_per_node"] == (8, "acc.yaml: num_machines", True)


def test_machines_that_are_not_given_are_a_default() -> None:
    found = read("acc.yaml", {"distributed_type": "MULTI_GPU", "num_processes": 4, "num_machines": None})
    assert found.options["gpus_per_node"] == (4, "acc.yaml: num_machines, its default", False)


def test_processes_that_do_not_divide_are_cut() -> None:
    found = read("acc.yaml", {**DDP, "num_processes": 9, "num_machines": 2})
    assert (values(found)["gpus"], values(found)["gpus_per_node"]) == (8, 4)
    assert any("num_processes 9" in note for note in found.notes)


@pytest.mark.parametrize("number", [-1, None])
def test_processes_of_the_command_line(number: int | None) -> None:
    found = read("acc.yaml", {**DDP, "num_processes": number})
    assert "gpus" not in found.options
    assert any("num_processes" in note and "command line" in note for note in found.notes)


@pytest.mark.parametrize(
    ("content", "word"),
    [
        ({}, "distributed_type"),
        ({"distributed_type": "TPU"}, "distributed_type 'TPU'"),
        ({"distributed_type": "fsdp"}, "distributed_type 'fsdp'"),
        ({"distributed_type": "MULTI_CPU"}, "has no GPU"),
        ({"distributed_type": "XLA"}, "has no GPU"),
        ({"distributed_type": "NO", "use_cpu": True}, "use_cpu True"),
        ({**DDP, "num_processes": "${NUM_GPUS}"}, "num_processes '${NUM_GPUS}'"),
        ({**DDP, "num_processes": 0}, "num_processes 0"),
        ({**DDP, "num_machines": 16}, "num_processes 8"),
        ({**DDP, "gpu_ids": "0"}, "gpu_ids '0'"),
        ({**DDP, "mixed_precision": "tf32"}, "mixed_precision 'tf32'"),
        ({**DDP, "compute_environment": "AMAZON_SAGEMAKER"}, "compute_environment"),
        ({**DDP, "gradient_accumulation_steps": 2}, "gradient_accumulation_steps: unknown key"),
        ({**DDP, "mixed_precison": "bf16"}, "mixed_precison: unknown key; did you mean mixed_precision?"),
        ({**DDP, "dynamo_backend": "fast"}, "dynamo_backend 'fast'"),
        ({**DDP, "fsdp_config": "full_shard"}, "fsdp_config 'full_shard'"),
    ],
)
def test_refused(content: dict[str, Any], word: str) -> None:
    assert word in refusal(content)


def test_other_chips_and_cpus_are_noted() -> None:
    found = read("acc.yaml", {**DDP, "distributed_type": "MULTI_NPU", "use_cpu": True})
    assert values(found)["engine"] == "ddp"
    assert any("MULTI_NPU" in note for note in found.notes)
    assert any("use_cpu" in note for note in found.notes)


# Precision.


@pytest.mark.parametrize(
    ("kind", "word", "options"),
    [
        (DDP, "bf16", {"precision": "bf16-autocast"}),
        (DDP, "FP16", {"precision": "fp16-autocast"}),
        (DDP, "fp8", {"precision": "fp8-mixed"}),
        (FSDP, "bf16", {"precision": "bf16-mixed", "grad_dtype": "bf16"}),
        (FSDP, "fp16", {"precision": "fp16-mixed", "grad_dtype": "fp16"}),
        (MEGATRON, "bf16", {"precision": "bf16-mixed"}),
        (MEGATRON, "no", {"precision": "fp32"}),
    ],
)
def test_precision(kind: dict[str, Any], word: str, options: dict[str, str]) -> None:
    found = read("acc.yaml", {**kind, "mixed_precision": word})
    assert {name: found.options[name].value for name in options} == options
    assert all(found.options[name].is_given for name in options)
    assert found.options["precision"].where == "acc.yaml: mixed_precision"


@pytest.mark.parametrize("kind", [DDP, FSDP, DEEPSPEED])
@pytest.mark.parametrize("word", ["no", False, None])
def test_no_mixed_precision_leaves_it_to_the_script(kind: dict[str, Any], word: object) -> None:
    found = read("acc.yaml", {**kind, "mixed_precision": word})
    assert found.options["precision"][0::2] == ("fp32", False)
    assert any("mixed_precision" in note for note in found.notes)


def test_an_old_switch() -> None:
    assert values(read("", {**DDP, "fp16": True}))["precision"] == "fp16-autocast"
    assert values(read("", {**DDP, "fp16": True, "mixed_precision": "bf16"}))["precision"] == "bf16-autocast"


def test_compiled_models_are_noted() -> None:
    for keys in ({"dynamo_backend": "inductor"}, {"dynamo_config": {"dynamo_backend": "INDUCTOR"}}):
        assert any("torch.compile" in note for note in read("", {**DDP, **keys}).notes)
    for keys in ({"dynamo_backend": False}, {"dynamo_config": {}}, {"dynamo_backend": "NO"}):
        assert not any("torch.compile" in note for note in read("", {**DDP, **keys}).notes)


# Files.

WRITTEN = """\
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: {kind}
downcast_bf16: 'no'
enable_cpu_affinity: false
{sections}
machine_rank: 0
main_process_ip: null
main_training_function: main
mixed_precision: {precision}
num_machines: 1
num_processes: 8
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: false
"""


@pytest.mark.parametrize(
    ("kind", "precision", "engine"),
    [("NO", "no", "none"), ("MULTI_GPU", "bf16", "ddp"), ("FSDP", "fp16", "fsdp1"), ("DEEPSPEED", "bf16", "deepspeed")],
)
def test_a_file_as_accelerate_writes_it(tmp_path: Path, kind: str, precision: str, engine: str) -> None:
    sections = "deepspeed_config: {}\nfsdp_config: {}\nmegatron_lm_config: {}\ndynamo_config: {}"
    path = tmp_path / "acc.yaml"
    path.write_text(WRITTEN.format(kind=kind, precision=precision, sections=sections))
    found = read(*load("--accelerate", path))
    assert values(found)["engine"] == engine
    assert found.options["engine"].where == "acc.yaml: distributed_type"


# Nonsense.

KEYS = {
    "": accelerate.KNOWN_KEYS,
    "fsdp_config": (
        "fsdp_version", "version", "fsdp_sharding_strategy", "fsdp_reshard_after_forward", "fsdp_offload_params",
        "fsdp_auto_wrap_policy", "fsdp_transformer_layer_cls_to_wrap", "fsdp_activation_checkpointing",
        "fsdp_activation_checkpointing_offload", "fsdp_backward_prefetch", "fsdp_forward_prefetch",
        "fsdp_min_num_params", "fsdp_ignored_modules",
    ),
    "deepspeed_config": (
        "zero_stage", "offload_optimizer_device", "offload_param_device", "gradient_accumulation_steps",
        "gradient_clipping", "deepspeed_config_file", "deepspeed_moe_layer_cls_names", "deepspeed_inclusion_filter",
    ),
    "parallelism_config": tuple(
        f"parallelism_config_{name}"
        for name in (
            "dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "sp_size", "cp_backend", "sp_backend",
            "cp_comm_strategy", "sp_seq_length", "sp_seq_length_is_variable", "sp_attn_implementation",
        )
    ),
    "megatron_lm_config": tuple(
        f"megatron_lm_{name}"
        for name in (
            "tp_degree", "pp_degree", "num_micro_batches", "sequence_parallelism", "recompute_activations",
            "use_distributed_optimizer", "recompute_granularity", "recompute_method", "recompute_num_layers",
            "context_parallel_size", "expert_model_parallel_size", "gradient_clipping", "use_custom_fsdp",
            "decoder_last_pipeline_num_layers", "attention_dropout",
        )
    ),
    "dynamo_config": ("dynamo_backend", "backend", "dynamo_mode"),
}  # fmt: skip
NONSENSE = (
    None, True, False, 0, 1, 2, 8, -1, 2.5, float("nan"), float("inf"), 10**400, "", "no", "auto", "true", "5e7",
    "${X}", "{{ x }}", "bf16", "cpu", "FULL_SHARD", "a\nb", [], ["a"], [[1]], {}, {"a": 1}, {1: None},
)  # fmt: skip


def test_nonsense_is_one_line() -> None:
    rng = random.Random(5)
    for kind in (*accelerate.KINDS, False):
        for _ in range(150):
            content: dict[str, Any] = {"distributed_type": kind, "num_processes": 8, "mixed_precision": "bf16"}
            for section, keys in KEYS.items():
                some = {key: rng.choice(NONSENSE) for key in rng.sample(keys, rng.choice((0, 0, 1, 2)))}
                if section:
                    content[section] = some
                else:
                    content |= {key: value for key, value in some.items() if key != "distributed_type"}
            try:
                values(read("acc.yaml", content))
            except InputError as error:
                assert "\n" not in str(error)


@pytest.mark.parametrize("section", [name for name in KEYS if name])
def test_each_key_takes_nonsense(section: str) -> None:
    kinds = {"fsdp_config": "FSDP", "deepspeed_config": "DEEPSPEED", "megatron_lm_config": "MEGATRON_LM"}
    for key in (*KEYS[section], "unknown", 7):
        for value in NONSENSE:
            content = {**DDP, "distributed_type": kinds.get(section, "MULTI_GPU"), section: {key: value}}
            try:
                values(read("acc.yaml", content))
            except InputError as error:
                assert "\n" not in str(error)
