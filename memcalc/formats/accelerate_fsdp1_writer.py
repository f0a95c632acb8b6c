"""FSDP1 in an accelerate configuration that is written.

Source: FullyShardedDataParallelPlugin of accelerate/utils/dataclasses.py 1.15.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from memcalc.formats.accelerate_part import Part, joined, mixed
from memcalc.inputs.options import refuse

if TYPE_CHECKING:
    from memcalc.inputs.model import Model
    from memcalc.setup.setup import Setup

_PREFETCH: Final = {"pre": "BACKWARD_PRE", "post": "BACKWARD_POST", "none": "NO_PREFETCH"}
_STRATEGIES: Final = {3: "FULL_SHARD", 2: "SHARD_GRAD_OP"}
_HYBRID: Final = {3: "HYBRID_SHARD", 2: "HYBRID_SHARD_ZERO2"}
_WHY: Final = {"grad_dtype": "accelerate reduces gradients in the dtype that it gathers weights in"}


def fsdp1_part(setup: Setup, model: Model) -> Part:
    """Return the sharding. Raises InputError for groups of shards that are no nodes."""
    strategies = _STRATEGIES
    if setup.replicas > 1:
        if setup.shard_group != setup.gpus_per_node:
            why = "accelerate's HYBRID_SHARD shards over the processes of a node"
            refuse("shard_group", setup.shard_group, f"{why}; allowed: {setup.gpus_per_node}, {setup.dp}")
        strategies = _HYBRID
    keys: dict[str, Any] = {
        "fsdp_version": 1,
        "fsdp_sharding_strategy": strategies[setup.zero],
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_use_orig_params": bool(setup.use_orig_params),
        "fsdp_backward_prefetch": _PREFETCH[str(setup.backward_prefetch)],
        "fsdp_forward_prefetch": bool(setup.forward_prefetch),
    }
    said = {"engine", "zero", "shard_group", "use_orig_params", "backward_prefetch", "forward_prefetch"}
    if setup.recompute == "full" and setup.recompute_layers is None:
        keys["fsdp_activation_checkpointing"] = True
        said.add("recompute")
    half = setup.precision.split("-")[0]
    of_half = {"grad_dtype": half} if setup.precision.endswith("-mixed") else {}
    part = Part({"distributed_type": "FSDP", "fsdp_config": keys}, frozenset(said), of_half, _WHY)
    return joined(part, mixed(setup, "mixed"))
