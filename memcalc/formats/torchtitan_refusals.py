"""The setups that torchtitan v0.2.2 does not run, each refused by name.

Source: torchtitan/distributed/parallel_dims.py and utils.py, torchtitan/models/llama3/infra/parallelize.py, the
models' args.py, and components/optimizer.py of v0.2.2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from memcalc.formats.torchtitan_flavors import Flavor
from memcalc.inputs.options import NOT_YET, Options, refuse
from memcalc.pipelining.schedules import NAMES

if TYPE_CHECKING:
    from memcalc.setup.setup import Setup

_FORMATS: Final = {"deepspeed": "deepspeed, accelerate", "megatron": "megatron", "fsdp1": "accelerate"}
"""The formats that an engine's setup can be written in."""
_OF_TRAINERS: Final = ("task", "lora_rank", "freeze", "quantize", "base_dtype", "precompute_reference")


def check(setup: Setup) -> None:
    """Raise InputError for a setup that torchtitan has nothing like."""
    if setup.engine in _FORMATS:
        why = f"torchtitan has FSDP2 and DDP; allowed: fsdp2, ddp, none, or the format {_FORMATS[setup.engine]}"
        refuse("engine", setup.engine, why)
    for name in _OF_TRAINERS:
        value: Any = getattr(setup, name)
        if value != Options._field_defaults[name]:
            why = "torchtitan trains all of a model on tokens"
            refuse(name, value, f"{why}; allowed: {Options._field_defaults[name]}, or the format training-args")
    _check_degrees(setup)
    _check_precision(setup)
    _check_optimizer(setup)
    divisor = 2 * setup.tp * setup.cp
    if (setup.seq_len or 0) % divisor:
        refuse("seq_len", setup.seq_len, f"torchtitan divides it by 2·tp·cp = {divisor}; allowed: a multiple")


def shards(setup: Setup) -> bool:
    """Tell whether torchtitan's FSDP is on, and with it the mixed precision: it is not over one rank."""
    return setup.engine == "fsdp2" and setup.shard_group > 1


def _check_degrees(setup: Setup) -> None:
    if setup.engine == "ddp" and setup.dp == 1:
        refuse("engine", "ddp", "torchtitan puts nothing around a model on one GPU; allowed: none, or more --gpus")
    if setup.engine == "fsdp2" and not shards(setup):
        if setup.gpus == 1:
            refuse("engine", "fsdp2", "torchtitan shards nothing on one GPU; allowed: none, or more --gpus")
        if setup.ep > 1:
            why = "torchtitan shares experts among ranks that shard"
            refuse("ep", setup.ep, f"{why}; allowed: 1, or a shard group of 2 or more")
        if setup.dp > 1:
            why = "torchtitan then has DDP, which goes with no other parallelism"
            refuse("shard_group", setup.shard_group, f"{why}; allowed: 2 or more, or --engine ddp")
    if setup.pp > 1 and setup.schedule == "zero-bubble" and setup.virtual_stages == 1:
        why = "torchtitan's InterleavedZeroBubble has more stages on a rank"
        refuse("virtual_stages", 1, f"{why}; allowed: 2 or more, or another --schedule")
    if setup.pp > 1 and setup.schedule in NAMES:
        refuse("schedule", setup.schedule, f"as a file of torchtitan {NOT_YET}1f1b, gpipe, interleaved, zero-bubble")


def _check_precision(setup: Setup) -> None:
    if shards(setup):
        kinds, why = ("bf16-mixed", "fp32", "bf16"), "is not what torchtitan's FSDP has"
    elif setup.engine == "fsdp2":
        kinds, why = ("fp32", "bf16"), "torchtitan has no mixed precision if tp and pp are all its parallelism"
    else:
        kinds, why = ("bf16-autocast", "fp32", "bf16"), "is not what torchtitan has without FSDP"
    if setup.precision not in kinds:
        refuse("precision", setup.precision, f"{why}; allowed: {', '.join(kinds)}")


def _check_optimizer(setup: Setup) -> None:
    if setup.optimizer not in ("adamw", "adam"):
        refuse("optimizer", setup.optimizer, "is not one of torchtitan's; allowed: adamw, adam")
    kept = setup.offload_optimizer, setup.offload_params
    if setup.offloads and (kept != ("cpu", "cpu") or not shards(setup)):
        why = "torchtitan's FSDP offloads states and weights to the host together"
        refuse("offload_optimizer", kept[0], f"{why}; allowed: none, or cpu with --offload-params cpu")


def check_flavor(setup: Setup, flavor: Flavor) -> None:
    """Raise InputError for a setup that does not go with the model's flavor."""
    if setup.cp > 1 and flavor.model.flex:
        why = f"torchtitan's {flavor.name} {flavor.flavor} has FlexAttention, over which no sequence is shared"
        refuse("cp", setup.cp, f"{why}; allowed: 1")
