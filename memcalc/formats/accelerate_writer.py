"""A setup as the configuration file of `accelerate launch`.

Source: accelerate/commands/config/config_args.py (ClusterConfig), commands/launch.py, utils/launch.py of 1.15.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from memcalc.formats.accelerate_deepspeed_writer import deepspeed_part
from memcalc.formats.accelerate_fsdp1_writer import fsdp1_part
from memcalc.formats.accelerate_fsdp_writer import fsdp_part
from memcalc.formats.accelerate_megatron_writer import megatron_part
from memcalc.formats.accelerate_part import Part, joined, mixed
from memcalc.formats.unsaid import unsaid
from memcalc.formats.written import Written
from memcalc.inputs.options import refuse

if TYPE_CHECKING:
    from memcalc.inputs.model import Model
    from memcalc.setup.setup import Setup

_WHY: Final[Mapping[str, str]] = {
    "global_batch_size": "the script accumulates gradients (Accelerator(gradient_accumulation_steps=...))",
    "micro_batch_size": "the script's data loader decides it",
    "gpus_per_node": "accelerate takes a node to have as many GPUs as processes",
    "sync_each_micro_batch": "the script decides it (GradientAccumulationPlugin(sync_each_batch=True))",
    "comm_hook": "the script hands it to the Accelerator (DistributedDataParallelKwargs(comm_hook=...))",
    "clip_grad_norm": "the script clips (accelerator.clip_grad_norm_)",
}


def write(setup: Setup, model: Model) -> Written:
    """Return the file. Raises InputError for what accelerate has nothing like."""
    part = joined(_PARTS[setup.engine](setup, model), _processes(setup))
    content = {"compute_environment": "LOCAL_MACHINE", **part.keys}
    return Written(_yaml(content), unsaid(setup, model, part.said, part.takes, {**_WHY, **part.why}))


def _alone(setup: Setup, model: Model) -> Part:
    """Return one process."""
    return joined(Part({"distributed_type": "NO"}, frozenset({"engine"})), mixed(setup, "autocast"))


def _replicas(setup: Setup, model: Model) -> Part:
    """Return DDP, which accelerate has with several processes only."""
    if setup.gpus == 1:
        refuse("gpus", 1, "accelerate has no DDP in one process; allowed: 2 or more, or --engine none")
    return joined(Part({"distributed_type": "MULTI_GPU"}, frozenset({"engine"})), mixed(setup, "autocast"))


_PARTS: Final[Mapping[str, Callable[[Setup, Model], Part]]] = {
    "none": _alone, "ddp": _replicas, "fsdp2": fsdp_part, "deepspeed": deepspeed_part, "megatron": megatron_part,
    "fsdp1": fsdp1_part,
}  # fmt: skip


def _processes(setup: Setup) -> Part:
    """Return the processes, one for each GPU. Raises InputError for GPUs that do not fill their nodes."""
    nodes, rest = divmod(setup.gpus, setup.gpus_per_node)
    if nodes and rest:
        each = f"accelerate starts as many processes on every node, of {setup.gpus_per_node} GPUs (--gpus-per-node)"
        refuse("gpus", setup.gpus, f"{each}; allowed: up to {setup.gpus_per_node}, or a multiple of it")
    nodes = max(nodes, 1)
    takes = {"gpus_per_node": setup.gpus // nodes} if setup.gpus > 1 else {}
    return Part({"num_machines": nodes, "num_processes": setup.gpus}, frozenset({"gpus"}), takes)


def _yaml(content: Mapping[str, Any]) -> str:
    import yaml as library

    yaml: Any = library  # its stubs leave out types
    return yaml.safe_dump(dict(content), sort_keys=False)
