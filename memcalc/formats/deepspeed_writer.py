"""A setup as DeepSpeed's JSON.

Source: deepspeed/runtime/config.py, runtime/zero/config.py, runtime/engine.py (_configure_basic_optimizer) of 0.19.8.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from memcalc.formats.deepspeed_names import FILE_SIZES, NVME_PATH, OF_FILES, OWN_OPTIMIZERS
from memcalc.formats.unsaid import unsaid
from memcalc.formats.written import Written
from memcalc.inputs.options import PLUS_PLUS, refuse

if TYPE_CHECKING:
    from memcalc.inputs.model import Model
    from memcalc.setup.setup import Setup

DEFAULT_SIZES: Final[Mapping[str, int]] = {
    "reduce_bucket_size": 500_000_000,
    "max_live_parameters": 1_000_000_000,
    "max_reuse_distance": 1_000_000_000,
    "param_persistence_threshold": 100_000,
    "prefetch_bucket_size": 50_000_000,
    "sub_group_size": 1_000_000_000,
}
"""DeepSpeed's sizes in elements (runtime/zero/config.py)."""
_OF_STAGE_3: Final = (
    "max_live_parameters", "max_reuse_distance", "param_persistence_threshold", "prefetch_bucket_size",
)  # fmt: skip
"""The sizes whose keys begin with stage3_."""
_ADAMS: Final = {"adamw": "AdamW", "adam": "Adam"}
_MOMENTA: Final = {"sgd": None, "sgd-momentum": 0.9}
"""torch's SGD, without and with the usual momentum."""
_LEARNING_RATE: Final = 1e-3
"""The default of DeepSpeed's and torch's optimizers. It is written, as transformers' Trainer does not put in its own where there
is none, but refuses another one than its own."""
_CLIPS_AT: Final = 1.0
_OTHER_FORMATS: Final = {
    "none": "emit accelerate", "ddp": "emit accelerate, torchrun", "fsdp2": "emit accelerate, torchtitan",
    "megatron": "emit megatron", "fsdp1": "emit accelerate",
}  # fmt: skip
_SAID: Final = frozenset({
    "engine", "cp", "cp_comm_type", "ep", "zero", "shard_group", "micro_batch_size", "global_batch_size", "precision",
    "grad_dtype", "clip_grad_norm", "overlap_comm", *PLUS_PLUS, "offload_optimizer", "offload_params", *DEFAULT_SIZES,
    *FILE_SIZES,
})  # fmt: skip
"""The options that the file says, or that follow from those."""
_OF_OPTIMIZER: Final = ("optimizer", "optimizer_implementation")
_WHY: Final[Mapping[str, str]] = {
    "gpus": "the launcher starts the processes (deepspeed --num_gpus, torchrun)",
    "compression_phase": "a run has both: the optimizer's freeze_step (var_freeze_step) is the first of the second one",
    "optimizer": "DeepSpeed cannot make it: the script hands it to deepspeed.initialize",
    "tp": "an argument of Megatron-DeepSpeed (--tensor-model-parallel-size)",
    "pp": "an argument of Megatron-DeepSpeed (--pipeline-model-parallel-size)",
}


def write(setup: Setup, model: Model) -> Written:
    """Return the file. Raises InputError for another engine than DeepSpeed's."""
    if setup.engine != "deepspeed":
        why = "is nothing that DeepSpeed's JSON describes"
        refuse("engine", setup.engine, f"{why}; allowed: deepspeed, or {_OTHER_FORMATS[setup.engine]}")
    content = {
        **_batches(setup),
        "gradient_clipping": _CLIPS_AT if setup.clip_grad_norm else 0.0,
        **_precision(setup),
        **_optimizer(setup),
        "zero_optimization": _zero(setup),
        **({} if setup.nvme_threads in (None, 1) else {"aio": {"intra_op_parallelism": setup.nvme_threads}}),
        **_ranks(setup),
    }
    said = {*_SAID, *(_OF_OPTIMIZER if "optimizer" in content else ()), *(("tp", "autotp") if setup.autotp else ())}
    return Written(json.dumps(content, indent=2) + "\n", unsaid(setup, model, said, {}, _WHY))


def _batches(setup: Setup) -> dict[str, int]:
    """Return all three sizes: together they say the data-parallel ranks."""
    return {
        "train_batch_size": setup.global_batch_size,
        "train_micro_batch_size_per_gpu": setup.micro_batch_size,
        "gradient_accumulation_steps": setup.micro_batches,
    }


def _precision(setup: Setup) -> dict[str, Any]:
    """Return the switches of mixed precision, and the dtype of gradients where it is another one."""
    half = setup.precision.split("-")[0]
    keys: dict[str, Any] = {} if half == "fp32" else {half: {"enabled": True}}
    if setup.grad_dtype != half:
        keys["data_types"] = {"grad_accum_dtype": setup.grad_dtype}
    return keys


def _optimizer(setup: Setup) -> dict[str, Any]:
    """Return the optimizer's section if DeepSpeed can make it, and the leave for one that it does not know with ZeRO."""
    leave: dict[str, Any] = {"zero_allow_untested_optimizer": True} if setup.zero else {}
    params: dict[str, Any] = {"lr": _LEARNING_RATE}
    if setup.optimizer in _ADAMS:
        if setup.optimizer == "adam":
            params["adam_w_mode"] = False
        if setup.optimizer_implementation != "fused":  # torch's own in place of FusedAdam
            params |= {"torch_adam": True, **_loops(setup)}
        return {"optimizer": {"type": _ADAMS[setup.optimizer], "params": params}}
    if setup.optimizer in _MOMENTA:
        momentum = _MOMENTA[setup.optimizer]
        params |= {} if momentum is None else {"momentum": momentum}
        params |= {"fused": True} if setup.optimizer_implementation == "fused" else _loops(setup)
        return {"optimizer": {"type": "SGD", "params": params}, **leave}
    if setup.optimizer in OWN_OPTIMIZERS:
        return {"optimizer": {"type": OWN_OPTIMIZERS[setup.optimizer], "params": params}}
    return leave


def _loops(setup: Setup) -> dict[str, bool]:
    """Return torch's switch for an update one by one; all at once is its default on a GPU."""
    return {"foreach": False} if setup.optimizer_implementation == "for-loop" else {}


def _zero(setup: Setup) -> dict[str, Any]:
    keys: dict[str, Any] = {"stage": setup.zero}
    if setup.overlap_comm:
        keys["overlap_comm"] = True
    for name, off in PLUS_PLUS.items():
        if getattr(setup, name) != off:
            keys[name] = getattr(setup, name)
    for name, default in DEFAULT_SIZES.items():
        size = getattr(setup, name)
        if size not in (None, default):
            keys[f"stage3_{name}" if name in _OF_STAGE_3 else name] = size
    for key, device in (("offload_optimizer", setup.offload_optimizer), ("offload_param", setup.offload_params)):
        if device != "none":
            keys[key] = {"device": device, "pin_memory": True}  # earlier versions do not pin by default
        if device == "nvme":
            keys[key] |= {"nvme_path": NVME_PATH, **{name: getattr(setup, of) for name, of in OF_FILES[key].items()}}
    return keys


def _ranks(setup: Setup) -> dict[str, Any]:
    """Return the ranks that share a sequence (Ulysses), experts (AutoEP) and linear layers (AutoTP)."""
    keys: dict[str, Any] = {}
    if setup.cp > 1:
        keys["sequence_parallel_size"] = setup.cp
    if setup.ep > 1:
        keys["expert_parallel"] = {"enabled": True, "autoep_size": setup.ep}
    if setup.autotp:
        keys["tensor_parallel"] = {"autotp_size": setup.tp}
    return keys
