"""A setup as torchtitan's TOML for v0.2.2, whose trainer has FSDP2, DDP or one GPU.

Source: torchtitan/config/job_config.py, train.py and torchtitan/distributed/parallel_dims.py of v0.2.2.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

from memcalc.formats.torchtitan_flavors import flavor_of
from memcalc.formats.torchtitan_refusals import check, check_flavor, shards
from memcalc.formats.torchtitan_stages_writer import ends_that_stages_say, stage_keys
from memcalc.formats.unsaid import unsaid
from memcalc.formats.written import Written

if TYPE_CHECKING:
    from memcalc.inputs.model import Model
    from memcalc.setup.setup import Setup

_HEAD: Final = "# torchtitan v0.2.2"
_DTYPES: Final = {"fp32": "float32", "bf16": "bfloat16"}
_OPTIMIZERS: Final = {"adamw": "AdamW", "adam": "Adam"}
_RANKS_OF_A_SEQUENCE: Final = {"p2p": "alltoall"}
_WHY: Final[Mapping[str, str]] = {
    "attention": "the model's flavor decides it, and has torch's scaled_dot_product_attention",
    "clip_grad_norm": "torchtitan always clips the norm of the gradients",
    "cross_entropy": "torchtitan has torch's cross_entropy, and loss_parallel with tensor parallelism",
    "etp": "torchtitan splits all of a layer over the same ranks",
    "first_stage_layers": "the file has the same stages without it",
    "last_stage_layers": "the file has the same stages without it",
    "gpus_per_node": "the launcher says it: torchrun --nproc-per-node",
    "kernels": "torchtitan's modules call torch's own kernels",
    "liger": "torchtitan's modules call torch's own kernels",
    "padded": "torchtitan fills every sequence with tokens",
    "recompute": "torchtitan recomputes ops or whole layers, not attention alone",
    "sequence_parallel": "torchtitan's tensor parallelism always splits the sequence between layers",
    "sync_each_micro_batch": "torchtitan reduces gradients after every micro-batch",
}
_SAID: Final = frozenset({
    "gpus", "dp", "tp", "pp", "cp", "ep", "zero", "shard_group", "cp_comm_type", "schedule", "virtual_stages",
    "micro_batch_size", "seq_len", "global_batch_size", "precision", "grad_dtype", "optimizer",
    "optimizer_implementation", "engine", "offload_optimizer", "offload_params",
})  # fmt: skip
"""The options that the file says, or that follow from those."""


class _Recomputation(NamedTuple):
    """The keys of activation checkpointing, and the options that they mean."""

    keys: dict[str, Any]
    recompute: str
    layers: int | None = None


def write(setup: Setup, model: Model) -> Written:
    """Return the file. Raises InputError for what torchtitan does not have: other engines and models, adapters."""
    check(setup)
    flavor = flavor_of(model, setup.seq_len or 1)
    check_flavor(setup, flavor)
    layers = flavor.model.layers
    recomputation = _recomputation(setup, layers)
    text = _toml(
        {
            "model": {"name": flavor.name, "flavor": flavor.flavor},
            "optimizer": _optimizer(setup),
            "training": {**_batch(setup), **_precision(setup), **_offload(setup)},
            "parallelism": {**_degrees(setup), **_methods(setup), **stage_keys(setup, layers)},
            "activation_checkpoint": recomputation.keys,
        }
    )
    return Written(text, _unsaid(setup, model, recomputation))


def _optimizer(setup: Setup) -> dict[str, Any]:
    keys = {"name": _OPTIMIZERS[setup.optimizer], "implementation": setup.optimizer_implementation}
    return {key: value for key, value in keys.items() if value != "fused"}


def _batch(setup: Setup) -> dict[str, Any]:
    """Return the sizes of a batch. A pipeline cuts a local batch into all micro-batches of a step."""
    size, number = setup.micro_batch_size, setup.micro_batches
    if setup.pp > 1:
        return {"local_batch_size": size * number, "seq_len": setup.seq_len}
    whole = {"global_batch_size": setup.global_batch_size} if number > 1 else {}
    return {"local_batch_size": size, **whole, "seq_len": setup.seq_len}


def _precision(setup: Setup) -> dict[str, Any]:
    """Return the dtypes. FSDP casts weights and reduces gradients; autocast is on where no axis but replicas is, and
    float32 turns it off."""
    keys: dict[str, Any] = {}
    is_sharded = shards(setup)
    if setup.precision == "bf16":
        keys["dtype"] = _DTYPES["bf16"]
    if (setup.precision == "fp32" and is_sharded) or (setup.precision in _DTYPES and setup.engine != "fsdp2"):
        keys["mixed_precision_param"] = _DTYPES["fp32"]
    if is_sharded and setup.grad_dtype != "fp32":
        keys["mixed_precision_reduce"] = _DTYPES[setup.grad_dtype]
    return keys


def _offload(setup: Setup) -> dict[str, Any]:
    return {"enable_cpu_offload": True} if setup.offloads else {}


def _degrees(setup: Setup) -> dict[str, Any]:
    """Return the degrees. That of sharding is given even if all ranks shard, as it makes the file say the GPUs."""
    shards = setup.shard_group // setup.cp if setup.engine == "fsdp2" else 1
    keys = {
        "data_parallel_replicate_degree": setup.dp // shards,
        "data_parallel_shard_degree": shards,
        "tensor_parallel_degree": setup.tp,
        "pipeline_parallel_degree": setup.pp,
        "context_parallel_degree": setup.cp,
        "expert_parallel_degree": setup.ep,
    }
    return {key: degree for key, degree in keys.items() if degree > 1 or key == "data_parallel_shard_degree"}


def _methods(setup: Setup) -> dict[str, Any]:
    """Return how the ranks of each axis do their part."""
    keys: dict[str, Any] = {}
    if setup.engine == "fsdp2" and (setup.zero == 3) != (setup.pp == 1):
        keys["fsdp_reshard_after_forward"] = "always" if setup.zero == 3 else "never"
    if setup.tp > 1 and setup.cross_entropy != "vocab-parallel":
        keys["disable_loss_parallel"] = True
    if setup.cp_comm_type in _RANKS_OF_A_SEQUENCE:
        keys["context_parallel_rotate_method"] = _RANKS_OF_A_SEQUENCE[setup.cp_comm_type]
    return keys


def _recomputation(setup: Setup, layers: int) -> _Recomputation:
    """Return the activation checkpointing: of every n-th layer if that makes as many layers as the setup has."""
    if setup.recompute == "op":
        return _Recomputation({"mode": "selective", "selective_ac_option": "op"}, "op")
    if setup.recompute != "full":
        return _Recomputation({"mode": "none"}, "none")
    some = setup.recompute_layers
    every = next((n for n in range(2, layers + 1) if layers // n == some), None)
    if every is None:
        return _Recomputation({"mode": "full"}, "full")
    return _Recomputation({"mode": "selective", "selective_ac_option": str(every)}, "full", some)


def _unsaid(setup: Setup, model: Model, recomputation: _Recomputation) -> dict[str, str]:
    """Return the options in which the setup is not what torchtitan does."""
    first, last = ends_that_stages_say(setup, model.layers)
    done: dict[str, Any] = {
        "first_stage_layers": first,
        "last_stage_layers": last,
        "sequence_parallel": setup.tp > 1,
        "sync_each_micro_batch": True,
        "clip_grad_norm": setup.ep == 1,
        "recompute": recomputation.recompute,
        "recompute_layers": recomputation.layers,
    }
    said = _SAID | {"cross_entropy"} if setup.tp > 1 else _SAID
    return unsaid(setup, model, said, done, {**_WHY, "recompute_layers": _layers_why(model.layers)})


def _layers_why(layers: int) -> str:
    some = sorted({layers // n for n in range(1, layers + 1)}, reverse=True)
    shown = ", ".join(str(n) for n in some[:5])
    return f"torchtitan recomputes every n-th layer, here {shown}{', …' if len(some) > 5 else ''} of {layers} layers"


def _toml(sections: Mapping[str, Mapping[str, Any]]) -> str:
    lines = [_HEAD]
    for name, keys in sections.items():
        lines += ["", f"[{name}]", *(f"{key} = {_value(value)}" for key, value in keys.items())]
    return "\n".join(lines) + "\n"


def _value(value: Any) -> str:
    """Return a text, a number, a switch or a list of lists in TOML, which writes them as JSON does."""
    if not isinstance(value, list):
        return json.dumps(value)
    return "[\n" + "".join(f"    {json.dumps(one)},\n" for one in cast("list[list[str]]", value)) + "]"
