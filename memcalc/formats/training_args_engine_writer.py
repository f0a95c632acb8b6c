"""The engine in training arguments that are written: DDP, FSDP2, or DeepSpeed's JSON as a nested mapping.

Source: transformers/training_args.py (_process_fsdp_args), trainer.py, integrations/deepspeed.py of 5.23.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from memcalc.formats.accelerate_part import Part
from memcalc.formats.deepspeed_writer import DEFAULT_SIZES
from memcalc.formats.deepspeed_writer import write as deepspeed
from memcalc.inputs.options import PLUS_PLUS, refuse

if TYPE_CHECKING:
    from memcalc.inputs.model import Model
    from memcalc.setup.setup import Setup

_AXES: Final = {
    "fsdp2": {
        "tp": "accelerate, torchtitan", "pp": "torchtitan", "cp": "accelerate, torchtitan", "ep": "torchtitan",
    },
    "deepspeed": {"tp": "deepspeed", "pp": "deepspeed", "cp": "accelerate, deepspeed"},
}  # fmt: skip
"""The axes that the file cannot say with an engine -> the formats that can. AutoEP is in DeepSpeed's JSON."""
_OF_FSDP: Final = frozenset({"engine", "zero", "shard_group", "offload_optimizer", "offload_params"})
_OF_DEEPSPEED: Final = frozenset({
    "engine", "zero", "shard_group", "ep", "grad_dtype", "overlap_comm", "offload_optimizer", "offload_params",
    *DEFAULT_SIZES, *PLUS_PLUS,
})  # fmt: skip


def check_engine(setup: Setup) -> None:
    """Raise InputError for an engine and for a layout that the Trainer's arguments do not describe."""
    if setup.engine == "megatron":
        why = "is nothing that TrainingArguments describe"
        refuse("engine", "megatron", f"{why}; allowed: none, ddp, fsdp2, deepspeed, or emit megatron")
    if setup.engine == "fsdp1":
        refuse(
            "engine",
            "fsdp1",
            "the Trainer drops FSDP's version 1; allowed: none, ddp, fsdp2, deepspeed, or emit accelerate",
        )
    for axis, formats in _AXES.get(setup.engine, {}).items():
        degree = getattr(setup, axis)
        if degree > 1:
            why = "no key of TrainingArguments says it (its parallelism_config is an object of Python)"
            refuse(axis, degree, f"{why}; allowed: 1, or emit {formats}")
    if setup.shard_group != setup.dp * setup.cp:
        why = "FSDP2 as TrainingArguments have it shards over all ranks"
        allowed = f"{setup.dp * setup.cp}, or emit accelerate, torchtitan"
        refuse("shard_group", setup.shard_group, f"{why}; allowed: {allowed}")


def engine_part(setup: Setup, model: Model) -> Part:
    """Return the keys of an engine. Without them the Trainer has DDP if a launcher starts it."""
    if setup.engine == "fsdp2":
        return _sharded(setup)
    if setup.engine == "deepspeed":
        return _deepspeed(setup, model)
    if setup.engine == "none":
        return Part({}, frozenset({"engine"}))
    keys = {"ddp_find_unused_parameters": False}
    if setup.gpus == 1:
        return Part(keys, frozenset(), {}, {"engine": "a launcher of one process decides it (torchrun)"})
    return Part(keys, frozenset({"engine"}))


def has_own_recomputation(setup: Setup) -> bool:
    """Tell whether FSDP's section has the switch. transformers' own also asks for the gradient of the embeddings' output."""
    return setup.engine == "fsdp2" and not setup.input_require_grads


def _sharded(setup: Setup) -> Part:
    keys: dict[str, Any] = {"version": 2, "reshard_after_forward": setup.zero == 3}
    if has_own_recomputation(setup) and setup.recompute == "full" and setup.recompute_layers is None:
        keys["activation_checkpointing"] = True
    if setup.offload_params != "none":
        keys["cpu_offload"] = True
    return Part({"fsdp": True, "fsdp_config": keys}, _OF_FSDP)


def _deepspeed(setup: Setup, model: Model) -> Part:
    """Return DeepSpeed's JSON. The Trainer refuses a learning rate in it that is not its own."""
    content: dict[str, Any] = json.loads(deepspeed(setup, model).text)
    if "optimizer" not in content:
        return Part({"deepspeed": content}, _OF_DEEPSPEED)
    content["optimizer"]["params"]["lr"] = "auto"
    return Part({"deepspeed": content}, _OF_DEEPSPEED | {"optimizer", "optimizer_implementation"})
