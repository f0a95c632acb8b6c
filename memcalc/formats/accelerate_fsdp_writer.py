"""FSDP2 in an accelerate configuration that is written, and transformers' slices without shards.

Source: FullyShardedDataParallelPlugin of accelerate/utils/dataclasses.py, accelerate/parallelism_config.py of 1.15.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, NoReturn

from memcalc.formats.accelerate_part import Part, degrees, joined, mixed
from memcalc.inputs.options import refuse

if TYPE_CHECKING:
    from memcalc.inputs.model import Model
    from memcalc.setup.setup import Setup

_WHY: Final[Mapping[str, str]] = {
    "grad_dtype": "accelerate reduces gradients in the dtype that it gathers weights in",
    "ep": "the script gives transformers' DistributedConfig to the model",
    "sequence_parallel": "transformers' plans have none: the script parallelizes the model",
}


def fsdp_part(setup: Setup, model: Model) -> Part:
    """Return the sharding. Raises InputError for pipelines, and for replicas that are no groups of shards."""
    if setup.pp > 1:
        refuse("pp", setup.pp, "accelerate has no pipeline with FSDP; allowed: 1, or emit torchtitan")
    if setup.tp > 1 and setup.dp * setup.cp == 1:
        return _slices(setup)
    shards, replicas = setup.shard_group // setup.cp, setup.dp * setup.cp // setup.shard_group
    if shards == 1 and replicas > 1:
        _refuse_replicas(setup)
    return joined(
        Part({"distributed_type": "FSDP"}, frozenset({"engine"})),
        _precision(setup),
        _sharding(setup),
        _degrees(setup, shards, replicas),
    )


def _refuse_replicas(setup: Setup) -> NoReturn:
    """Refuse replicas alone, or beside parts of a sequence alone (ParallelismConfig.__post_init__)."""
    ranks = setup.dp * setup.cp
    what = "of parts of a sequence" if setup.cp > 1 else "with FSDP"
    allowed = ", ".join(str(n) for n in range(2 * setup.cp, ranks + 1, setup.cp) if ranks % n == 0)
    why = f"accelerate has no replicas {what} without shards beside them (dp_shard_size 1)"
    refuse("shard_group", setup.shard_group, f"{why}; allowed: {allowed}")


def _slices(setup: Setup) -> Part:
    """Return slices alone, which accelerate does not take for FSDP: nothing is left to shard."""
    if setup.precision.endswith("-mixed"):
        why = "accelerate casts gathered weights with FSDP only, which wants ranks to shard over beside those of --tp"
        allowed = f"fp32, {setup.precision.split('-')[0]}, or a smaller --tp"
        refuse("precision", setup.precision, f"{why} {setup.tp}; allowed: {allowed}")
    keys = {"distributed_type": "MULTI_GPU", "parallelism_config": degrees(tp_size=setup.tp)}
    why = {**_WHY, "zero": "there is nothing to gather without ranks to shard over"}
    return joined(Part(keys, frozenset({"engine", "tp", "shard_group"}), {"zero": 2}, why), mixed(setup, "mixed"))


def _precision(setup: Setup) -> Part:
    part, half = mixed(setup, "mixed"), setup.precision.split("-")[0]
    return joined(part, Part({}, frozenset(), {"grad_dtype": half})) if setup.precision.endswith("-mixed") else part


def _sharding(setup: Setup) -> Part:
    """Return the fsdp_config. Layers are units, and are recomputed all or not at all."""
    said = {"zero", "offload_optimizer", "offload_params"}
    keys: dict[str, Any] = {
        "fsdp_version": 2,
        "fsdp_reshard_after_forward": setup.zero == 3,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    }
    if setup.offload_params != "none":
        keys["fsdp_offload_params"] = True
    if setup.recompute == "full" and setup.recompute_layers is None:
        keys["fsdp_activation_checkpointing"] = True
        said.add("recompute")
    return Part({"fsdp_config": keys}, frozenset(said), {}, _WHY)


def _degrees(setup: Setup, shards: int, replicas: int) -> Part:
    """Return the parallelism_config. Without other axes FSDP shards over all processes by itself."""
    said = frozenset({"tp", "cp", "cp_comm_type", "shard_group"})
    if replicas * setup.tp * setup.cp == 1:
        return Part({}, said)
    keys = degrees(dp_replicate_size=replicas, dp_shard_size=shards, tp_size=setup.tp, cp_size=setup.cp)
    if setup.cp_comm_type == "p2p":  # torch's name for sending all to one neighbour
        keys["parallelism_config_cp_comm_strategy"] = "alltoall"
    return Part({"parallelism_config": keys}, said)
