"""torchtitan's own code, where it is installed: it resolves the values of the setup that its TOML was written of."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest
from hypothesis import given
from torchtitan_setups import EXAMPLES, model_of, setups, stages

from memcalc.errors import InputError
from memcalc.formats.torchtitan_flavors import WRITTEN_NAMES
from memcalc.formats.torchtitan_models import flavors
from memcalc.formats.torchtitan_writer import write
from memcalc.setup.setup import Setup

config = pytest.importorskip("torchtitan.config", exc_type=ImportError)


@EXAMPLES
@given(setups())
def test_torchtitan_resolves_the_same(case: tuple[str, Setup]) -> None:
    from torchtitan.distributed import ParallelDims

    name, setup = case
    try:
        file = write(setup, model_of(name))
    except InputError:
        return
    job = config.ConfigManager()._dict_to_dataclass(config.JobConfig, tomllib.loads(file.text))
    p, t = job.parallelism, job.training
    dims = ParallelDims(
        dp_replicate=p.data_parallel_replicate_degree,
        dp_shard=p.data_parallel_shard_degree,
        cp=p.context_parallel_degree,
        tp=p.tensor_parallel_degree,
        pp=p.pipeline_parallel_degree,
        ep=p.expert_parallel_degree,
        etp=p.expert_tensor_parallel_degree,
        world_size=setup.gpus,  # it raises an error if the degrees make another number
    )
    assert (dims.tp, dims.pp, dims.cp, dims.ep) == (setup.tp, setup.pp, setup.cp, setup.ep)
    batch_degree = dims.dp_replicate * dims.dp_shard
    whole = t.global_batch_size if t.global_batch_size > 0 else t.local_batch_size * batch_degree
    assert (batch_degree, whole) == (setup.dp, setup.global_batch_size)
    size = p.pipeline_parallel_microbatch_size if dims.pp_enabled else t.local_batch_size
    assert (size, t.seq_len) == (setup.micro_batch_size, setup.seq_len)
    assert t.seq_len % dims.seq_len_divisor == 0
    assert job.optimizer.implementation == setup.optimizer_implementation
    if dims.fsdp_enabled:
        assert setup.engine == "fsdp2"
        assert setup.shard_group == dims.dp_shard * dims.cp
        assert t.mixed_precision_reduce == {"fp32": "float32", "bf16": "bfloat16"}[setup.grad_dtype]
        policy = p.fsdp_reshard_after_forward
        reshards = policy == "always" or (policy == "default" and not dims.pp_enabled)
        assert setup.zero == (3 if reshards else 2)
    if dims.pp_enabled:
        assert stages_of(job, model_of(name).layers) == stages(setup, model_of(name).layers)


def stages_of(job: Any, layers: int) -> list[int]:
    """The layers of torchtitan's stages (pipeline_llm)."""
    from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class
    from torchtitan.distributed.pipeline_parallel import generate_llm_fqn_per_model_part

    p = job.parallelism
    ends = p.pipeline_parallel_first_stage_less_layers, p.pipeline_parallel_last_stage_less_layers
    single = issubclass(get_schedule_class(p.pipeline_parallel_schedule), PipelineScheduleSingle)
    number = p.pipeline_parallel_degree * (1 if single else 2)
    if p.pipeline_parallel_layers_per_stage is not None:
        number = -(-(layers + sum(ends)) // p.pipeline_parallel_layers_per_stage)
    parts = p.module_fqns_per_model_part or generate_llm_fqn_per_model_part(number, layers, *ends)
    return [sum(name.startswith("layers.") for name in part) for part in parts]


@pytest.mark.parametrize("name", WRITTEN_NAMES)
def test_torchtitan_has_every_flavor(name: str) -> None:
    spec = pytest.importorskip("torchtitan.protocols.train_spec", exc_type=ImportError)
    try:
        args = spec.get_train_spec(name).model_args
    except ImportError as error:
        pytest.skip(str(error))
    assert set(flavors(name)) <= set(args)
