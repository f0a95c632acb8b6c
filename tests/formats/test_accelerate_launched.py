"""accelerate's configuration files: what the reader returns, beside what accelerate's own launcher and plugins make of
the same file."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from accelerate_contents import DDP, DEEPSPEED, FSDP, fsdp, megatron, parallel, refusal, values

from memcalc.formats import accelerate
from memcalc.formats.accelerate import read
from memcalc.formats.accelerate_fsdp import POLICIES, STRATEGIES
from memcalc.formats.accelerate_precision import WORDS
from memcalc.formats.found import ACCUMULATION

pytest.importorskip("accelerate", minversion="1.15")


def launched(content: Mapping[str, Any], folder: Path) -> tuple[Any, dict[str, str]]:
    """Return the arguments and the environment that `accelerate launch --config_file` gives to the processes. Raises
    whatever accelerate raises."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import (
        prepare_deepspeed_cmd_env,
        prepare_multi_gpu_env,
        prepare_simple_launcher_cmd_env,
    )

    path = folder / "acc.json"
    path.write_text(json.dumps({"main_process_port": 0, **content}))
    args = launch_command_parser().parse_args(["--config_file", str(path), "train.py"])
    args, defaults, mixed_is_from_file = _validate_launch_command(args)
    if args.use_deepspeed:
        fields = [*defaults.deepspeed_config, *(["mixed_precision"] if mixed_is_from_file else [])]
        args.deepspeed_fields_from_accelerate_config = ",".join(fields)
        return args, prepare_deepspeed_cmd_env(args)[1]
    if args.use_fsdp or args.use_megatron_lm or args.multi_gpu:
        return args, prepare_multi_gpu_env(args)
    return args, prepare_simple_launcher_cmd_env(args)[1]


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in list(os.environ):
        if name.startswith(("ACCELERATE_", "FSDP_", "MEGATRON_LM_", "PARALLELISM_CONFIG_")):
            monkeypatch.delenv(name)
    yield


def made(plugin: type, environment: dict[str, str]) -> Any:
    """Return a plugin as the environment of a process makes it."""
    from accelerate.utils import patch_environment

    with patch_environment(**environment):
        return plugin()


def test_keys_are_those_of_accelerate() -> None:
    from accelerate.commands.config.config_args import ClusterConfig
    from accelerate.utils import DistributedType, DynamoBackend, PrecisionType
    from accelerate.utils.constants import FSDP_AUTO_WRAP_POLICY, FSDP_SHARDING_STRATEGY

    assert {*accelerate.KNOWN_KEYS} == {*ClusterConfig.__dataclass_fields__, "fp16", "dynamo_backend"}
    assert {*accelerate.KINDS} == {kind.value for kind in DistributedType}
    assert {*accelerate.COMPILERS} == {one.value for one in DynamoBackend}
    assert {*WORDS} == {one.value for one in PrecisionType}
    assert list(STRATEGIES) == FSDP_SHARDING_STRATEGY
    assert list(POLICIES) == FSDP_AUTO_WRAP_POLICY


def random_fsdp(rng: random.Random) -> dict[str, Any]:
    some = {
        "fsdp_version": (1, 2, "1", "2"),
        "version": (1, 2),
        "fsdp_sharding_strategy": (*STRATEGIES, "full_shard", 1, 2, 3, 4, 5, "4", "ZERO"),
        "fsdp_reshard_after_forward": (True, False, "true", "no", "FULL_SHARD"),
        "fsdp_offload_params": (True, False, "true", "False"),
        "fsdp_activation_checkpointing": (True, False, "yes"),
        "activation_checkpointing_offload": (True, False, False, False),
        "fsdp_auto_wrap_policy": (*POLICIES, "no_wrap", "LAYERS"),
        "fsdp_backward_prefetch": ("BACKWARD_PRE", "NO_PREFETCH"),
        "fsdp_forward_prefetch": (True, False),
        "fsdp_other": (1,),
    }
    chosen = {key: rng.choice(values) for key, values in some.items() if rng.random() < 0.35}
    keys = list(chosen)
    rng.shuffle(keys)
    quiet = {"fsdp_sync_module_states": False, "fsdp_cpu_ram_efficient_loading": False}  # both want a device
    return {**{key: chosen[key] for key in keys}, **quiet}


def test_fsdp_as_accelerate_resolves_it(tmp_path: Path) -> None:
    from accelerate.utils import FullyShardedDataParallelPlugin
    from torch.distributed.fsdp import CPUOffloadPolicy

    stages = {"FULL_SHARD": 3, "SHARD_GRAD_OP": 2, "HYBRID_SHARD": 3, "_HYBRID_SHARD_ZERO2": 2, "NO_SHARD": None}
    rng, read_ones = random.Random(11), 0
    for _ in range(120):
        content = {**FSDP, "fsdp_config": random_fsdp(rng)}
        content["mixed_precision"] = rng.choice(("bf16", "fp16", "no"))
        try:
            _, environment = launched(content, tmp_path)
            plugin = made(FullyShardedDataParallelPlugin, environment)
            if content["mixed_precision"] != "no":
                plugin.set_mixed_precision(content["mixed_precision"])
        except (ValueError, KeyError):
            assert refusal(content)
            continue
        read_ones += 1
        found = values(read("acc.yaml", content))
        if plugin.fsdp_version == 2:
            assert found["zero"] == (3 if plugin.reshard_after_forward else 2), content
            offloads = isinstance(plugin.cpu_offload, CPUOffloadPolicy)
        else:
            assert found.get("zero") == stages[plugin.sharding_strategy.name], content
            assert ("shard_group" in found) == ("HYBRID" in plugin.sharding_strategy.name)
            offloads = plugin.cpu_offload.offload_params
        assert (found.get("offload_params") == "cpu") == offloads
        assert (found.get("recompute") == "full") == plugin.activation_checkpointing
        policy = plugin.mixed_precision_policy
        if policy is not None and found["engine"] == "fsdp2":
            assert str(policy.reduce_dtype) == {"bf16": "torch.bfloat16", "fp16": "torch.float16"}[found["grad_dtype"]]
    assert read_ones > 40


def test_deepspeed_as_accelerate_resolves_it(tmp_path: Path) -> None:
    from accelerate.utils import DeepSpeedPlugin

    some: dict[str, tuple[Any, ...]] = {
        "zero_stage": (0, 1, 2, 3, "3"),
        "offload_optimizer_device": ("none", "cpu", "nvme", "None"),
        "offload_param_device": ("none", "cpu", "CPU"),
        "gradient_accumulation_steps": (1, 4, "8", "auto"),
        "gradient_clipping": (1.0, 0.5, "auto", 0),
        "zero3_init_flag": (True, False),
        "zero3_save_16bit_model": (True, False),
        "deepspeed_multinode_launcher": ("standard",),
        "zero_stages": (3,),
    }
    rng = random.Random(3)
    for _ in range(80):
        keys = {key: rng.choice(values) for key, values in some.items() if rng.random() < 0.5}
        word = rng.choice(("bf16", "fp16", "no", None))
        content = {**DEEPSPEED, "deepspeed_config": keys, **({} if word is None else {"mixed_precision": word})}
        _, environment = launched(content, tmp_path)
        plugin = made(DeepSpeedPlugin, environment)
        plugin.set_mixed_precision(word or "no")
        theirs = dict(plugin.deepspeed_config)
        del theirs["steps_per_print"]
        theirs["zero_optimization"].pop("stage3_gather_16bit_weights_on_model_save")
        found = read("acc.yaml", content)
        ours = dict(found.files["deepspeed"].value)
        for name in ("bf16", "fp16"):  # "auto" is what accelerate and the Trainer fill: off, if nobody asks for it
            switch = ours.setdefault(name, {"enabled": False})
            ours[name] = {"enabled": False} if switch["enabled"] == "auto" else switch
        assert ours == theirs, content
        assert ("precision" in found.options) == (word in ("no", None))


def test_a_file_of_deepspeed_excludes_what_accelerate_refuses(tmp_path: Path) -> None:
    from accelerate.utils import DeepSpeedPlugin

    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": 1}))
    some: dict[str, Any] = {
        "zero_stage": 2, "offload_optimizer_device": "cpu", "offload_param_device": "none", "gradient_clipping": 1.0,
        "gradient_accumulation_steps": 1, "zero3_save_16bit_model": True, "zero3_init_flag": True,
        "deepspeed_multinode_launcher": "standard", "offload_param_nvme_path": "/nvme", "deepspeed_hostfile": None,
    }  # fmt: skip
    for top in ({}, {"mixed_precision": "bf16"}, {"mixed_precision": "no"}, {"mixed_precision": None}):
        for key, value in ({} if top else some).items() or [("zero3_init_flag", False)]:
            content = {**DEEPSPEED, **top, "deepspeed_config": {"deepspeed_config_file": str(path), key: value}}
            _, environment = launched(content, tmp_path)
            try:
                made(DeepSpeedPlugin, environment)
            except ValueError:
                assert "accelerate refuses it" in refusal(content)
            else:
                assert read("acc.yaml", content).files["deepspeed"].value == str(path)


def test_megatron_as_accelerate_resolves_it(tmp_path: Path) -> None:
    from accelerate.utils import MegatronLMPlugin

    some: dict[str, tuple[Any, ...]] = {
        "tp_degree": (1, 2),
        "pp_degree": (1, 2),
        "num_micro_batches": (1, 4),
        "gradient_clipping": (0.0, 1.0),
        "sequence_parallelism": (True, False, "true"),
        "use_distributed_optimizer": (True, False),
        "recompute_activations": (True, False),
        "recompute_granularity": ("full", "selective"),
        "context_parallel_size": (1, 2),
        "expert_model_parallel_size": (1, 2),
        "expert_tensor_parallel_size": (1, 2),
        "decoder_last_pipeline_num_layers": (1, 7),
        "optimizer_cpu_offload": (True, False),
    }
    rng = random.Random(7)
    for _ in range(60):
        content = megatron(**{key: rng.choice(values) for key, values in some.items() if rng.random() < 0.5})
        _, environment = launched(content, tmp_path)
        theirs = made(MegatronLMPlugin, environment).megatron_lm_default_args
        ours = values(read("acc.yaml", content))
        assert ours.get("tp", 1) == theirs["tensor_model_parallel_size"]
        assert ours.get("pp", 1) == theirs["pipeline_model_parallel_size"]
        assert ours.get("ep", 1) == theirs["expert_model_parallel_size"]
        assert ours.get("etp", 1) == theirs["expert_tensor_parallel_size"]
        assert ours.get(ACCUMULATION, 1) == theirs["num_micro_batches"]
        assert ours["zero"] == int(theirs["use_distributed_optimizer"])
        assert ours["recompute"] == theirs["recompute_granularity"]
        assert ours["clip_grad_norm"] == (theirs["clip_grad"] > 0)
        assert ours["cp"] == theirs["context_parallel_size"]
        assert ours.get("last_stage_layers") == theirs["decoder_last_pipeline_num_layers"]
        assert (ours.get("offload_optimizer") == "cpu") == theirs["optimizer_cpu_offload"]
        sliced = theirs["sequence_parallel"] and theirs["tensor_model_parallel_size"] > 1
        assert ours["sequence_parallel"] == sliced


def validated(content: Mapping[str, Any], folder: Path) -> Any:
    """Return accelerate's parallelism_config of a file, after accelerate's own checks."""
    from accelerate.parallelism_config import ParallelismConfig
    from accelerate.utils import DistributedType, patch_environment

    args, environment = launched(content, folder)
    kind = DistributedType(content["distributed_type"])
    with patch_environment(**environment):
        config = ParallelismConfig()
    is_fsdp2 = kind == DistributedType.FSDP and str(getattr(args, "fsdp_version", 1)) == "2"
    accelerator = SimpleNamespace(
        multi_device=kind == DistributedType.MULTI_GPU, num_processes=args.num_processes, is_fsdp2=is_fsdp2,
        distributed_type=kind, is_main_process=False,
    )  # fmt: skip
    config._validate_accelerator(accelerator)
    return config


def test_parallelism_as_accelerate_validates_it(tmp_path: Path) -> None:
    rng, read_ones = random.Random(2), 0
    for _ in range(400):
        degrees = {
            name: rng.choice((1, 2, 2, 4)) for name in ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size")
        }
        degrees = {name: degree for name, degree in degrees.items() if rng.random() < 0.7}
        version = rng.choice((2, 2, 2, 1))
        content = parallel(rng.choice((fsdp(fsdp_version=version), DDP)), **degrees)
        try:
            config = validated(content, tmp_path)
        except ValueError:
            assert refusal(content)
            continue
        kind = content["distributed_type"]
        if kind == "MULTI_GPU" and (config.cp_size > 1 or (config.tp_size > 1 and config.dp_shard_size > 1)):
            assert "needs distributed_type FSDP" in refusal(content)  # refused later, or never sharded
            continue
        read_ones += 1
        found = values(read("acc.yaml", content))
        assert found.get("tp", 1) == config.tp_size
        assert found.get("cp", 1) == config.cp_size
        if kind == "FSDP" and config.dp_replicate_enabled:
            assert found["shard_group"] == config.dp_shard_size * config.cp_size
        elif kind == "FSDP":
            assert "shard_group" not in found
    assert read_ones > 20


@pytest.mark.parametrize(
    ("content", "is_refused"),
    [
        ({**DDP, "num_process": 4}, True),
        ({"num_processes": 4}, True),
        ({"distributed_type": "TPU"}, True),
        ({**DDP, "gpu_ids": "3"}, True),
        ({**DDP, "gpu_ids": "2,3", "num_processes": 2}, False),
        ({**DDP, "gpu_ids": "all", "fp16": True, "dynamo_backend": "NO"}, False),
        ({"distributed_type": "NO"}, False),
    ],
)
def test_the_launcher_refuses_the_same(content: dict[str, Any], is_refused: bool, tmp_path: Path) -> None:
    if is_refused:
        with pytest.raises(ValueError):
            launched(content, tmp_path)
        assert refusal(content)
    else:
        launched(content, tmp_path)
        assert values(read("acc.yaml", content))
