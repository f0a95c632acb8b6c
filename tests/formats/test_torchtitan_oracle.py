"""torchtitan's own code, where it is installed: what it resolves and refuses, and how it divides layers over stages."""

from __future__ import annotations

import random
from typing import Any

import pytest

from memcalc.errors import InputError
from memcalc.formats.torchtitan import read
from memcalc.pipelining.programs import divided

pytest.importorskip("torchtitan.config", exc_type=ImportError)


def job_config(content: dict[str, Any]) -> Any:
    from torchtitan.config import ConfigManager, JobConfig

    return ConfigManager()._dict_to_dataclass(JobConfig, content)


def some_content(rng: random.Random) -> dict[str, dict[str, Any]]:
    every: dict[str, dict[str, list[Any]]] = {
        "training": {
            "local_batch_size": [1, 4, 8],
            "seq_len": [1024, 8192],
            "dtype": ["float32", "bfloat16"],
            "global_batch_size": [-1, 64],
        },
        "parallelism": {
            "data_parallel_replicate_degree": [1, 2],
            "data_parallel_shard_degree": [-1, 1, 2, 4],
            "tensor_parallel_degree": [1, 2],
            "pipeline_parallel_degree": [1, 2],
            "context_parallel_degree": [1, 2],
            "fsdp_reshard_after_forward": ["default", "always", "never"],
            "disable_loss_parallel": [True, False],
        },
        "optimizer": {"name": ["Adam", "AdamW"], "implementation": ["for-loop", "foreach", "fused"]},
        "activation_checkpoint": {"mode": ["none", "full", "selective"]},
    }
    content = {
        section: {key: rng.choice(values) for key, values in keys.items() if rng.random() < 0.6}
        for section, keys in every.items()
    }
    content["activation_checkpoint"]["selective_ac_option"] = "op"
    return content


@pytest.mark.parametrize("seed", range(200))
def test_values(seed: int) -> None:
    from torchtitan.distributed import ParallelDims

    content = some_content(random.Random(seed))
    job = job_config(content)
    p, t = job.parallelism, job.training
    shard = p.data_parallel_shard_degree
    others = p.data_parallel_replicate_degree * p.context_parallel_degree
    others *= p.tensor_parallel_degree * p.pipeline_parallel_degree
    dims = ParallelDims(
        dp_replicate=p.data_parallel_replicate_degree,
        dp_shard=shard,
        cp=p.context_parallel_degree,
        tp=p.tensor_parallel_degree,
        pp=p.pipeline_parallel_degree,
        ep=1,
        etp=1,
        world_size=others * (4 if shard == -1 else shard),
    )
    ddp = dims.dp_replicate_enabled and not dims.fsdp_enabled
    if ddp and dims.world_size != dims.dp_replicate:  # parallelize_llama
        with pytest.raises(InputError, match="data_parallel_replicate_degree"):
            read("", content)
        return
    options = {name: value.value for name, value in read("", content).options.items()}
    assert options.get("gpus") == (None if shard == -1 else dims.world_size)
    assert (options["tp"], options["pp"], options["cp"]) == (dims.tp, dims.pp, dims.cp)
    assert options["engine"] == ("ddp" if ddp else "none" if dims.world_size == 1 else "fsdp2")
    if dims.fsdp_enabled and dims.dp_replicate_enabled and shard != -1:
        assert options["shard_group"] == dims.dp_shard * dims.cp
    if options["engine"] == "fsdp2":
        keeps = p.fsdp_reshard_after_forward == "never" or (
            p.fsdp_reshard_after_forward == "default" and dims.pp_enabled
        )
        assert options["zero"] == (2 if keeps else 3)
    autocast = not dims.fsdp_enabled and not dims.tp_enabled and not dims.pp_enabled  # maybe_enable_amp
    expected = "bf16-mixed" if dims.fsdp_enabled else "bf16-autocast" if autocast else "fp32"
    assert options["precision"] == ("bf16" if t.dtype == "bfloat16" else expected)
    assert options["seq_len"] == t.seq_len
    assert options["optimizer"] == job.optimizer.name.lower()
    assert options["optimizer_implementation"] == job.optimizer.implementation
    assert options["micro_batch_size"] == (
        p.pipeline_parallel_microbatch_size if dims.pp_enabled else t.local_batch_size
    )
    if t.global_batch_size < 0:
        size = options["micro_batch_size"]
        assert options["gradient_accumulation_steps"] * size == t.local_batch_size
    else:
        assert options["global_batch_size"] == t.global_batch_size
    mode = job.activation_checkpoint.mode
    assert options["recompute"] == ("op" if mode == "selective" else mode)
    assert options.get("cross_entropy") == (
        None if not dims.tp_enabled else "eager" if p.disable_loss_parallel else "vocab-parallel"
    )


@pytest.mark.parametrize("seed", range(200))
def test_stages(seed: int) -> None:
    from torchtitan.distributed.pipeline_parallel import generate_llm_fqn_per_model_part

    rng = random.Random(seed)
    flavor, layers = rng.choice([("debugmodel", 6), ("8B", 32), ("70B", 80), ("405B", 126)])
    ranks, first, last = rng.choice([2, 3, 4, 6, 8, 16]), rng.randint(0, 3), rng.randint(0, 3)
    content = {
        "model": {"name": "llama3", "flavor": flavor},
        "parallelism": {
            "pipeline_parallel_degree": ranks,
            "pipeline_parallel_first_stage_less_layers": first,
            "pipeline_parallel_last_stage_less_layers": last,
        },
        "activation_checkpoint": {"mode": "none"},
    }
    try:
        parts = generate_llm_fqn_per_model_part(ranks, layers, first, last)
        counts = [sum(name.startswith("layers.") for name in part) for part in parts]
    except ValueError:
        counts = [0]
    if min(counts) < 1:
        with pytest.raises(InputError, match="pipeline_parallel_degree"):
            read("", content)
        return
    options = {name: value.value for name, value in read("", content).options.items()}
    given = options.get("first_stage_layers"), options.get("last_stage_layers")
    assert divided(layers, ranks, *given) == counts


def test_unknown_keys_of_known_sections_are_those_of_the_dataclasses() -> None:
    """Every key of JobConfig is known."""
    from dataclasses import fields, is_dataclass

    def paths(cls: Any) -> dict[str, Any]:
        return {f.name: paths(f.type) if is_dataclass(f.type) else None for f in fields(cls)}

    from torchtitan.config import JobConfig

    from memcalc.formats.torchtitan_config import TitanConfig

    def filled(tree: dict[str, Any]) -> dict[str, Any]:
        return {key: filled(below) if below is not None else "x" for key, below in tree.items()}

    content = filled(paths(JobConfig))
    content["job"]["custom_config_module"] = content["experimental"]["custom_args_module"] = ""
    assert TitanConfig("", content).unknown_keys() == []
