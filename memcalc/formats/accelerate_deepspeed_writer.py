"""DeepSpeed in an accelerate configuration that is written: the keys from which accelerate makes DeepSpeed's JSON.

Source: DeepSpeedPlugin of accelerate/utils/dataclasses.py, prepare_deepspeed_cmd_env of utils/launch.py of 1.15.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from memcalc.formats.accelerate_part import Part, degrees, joined, mixed
from memcalc.formats.deepspeed_names import FILE_SIZES, NVME_PATH
from memcalc.formats.deepspeed_writer import DEFAULT_SIZES
from memcalc.inputs.options import PLUS_PLUS, refuse

if TYPE_CHECKING:
    from memcalc.inputs.model import Model
    from memcalc.setup.setup import Setup

_JSON: Final = "only DeepSpeed's JSON says it (memcalc emit deepspeed; deepspeed_config_file names it)"
_WHY: Final[Mapping[str, str]] = {
    **dict.fromkeys((*DEFAULT_SIZES, *FILE_SIZES, "overlap_comm", *PLUS_PLUS, "ep"), _JSON),
    "clip_grad_norm": "accelerate does not pass on a gradient_clipping of 0, and DeepSpeed clips without it; " + _JSON,
}
_SAID: Final = frozenset({
    "engine", "zero", "shard_group", "global_batch_size", "grad_dtype", "offload_optimizer", "offload_params",
})  # fmt: skip


def deepspeed_part(setup: Setup, model: Model) -> Part:
    """Return the keys. Raises InputError for slices and stages, which are Megatron-DeepSpeed's."""
    for axis in ("tp", "pp"):
        degree = getattr(setup, axis)
        if degree > 1:
            why = "is Megatron-DeepSpeed's, and accelerate trains transformers' modules with DeepSpeed"
            refuse(axis, degree, f"{why}; allowed: 1, or emit deepspeed")
    section: dict[str, Any] = {"zero_stage": setup.zero, "gradient_accumulation_steps": setup.micro_batches}
    if setup.clip_grad_norm:
        section["gradient_clipping"] = 1.0
    for key, device in (("offload_optimizer", setup.offload_optimizer), ("offload_param", setup.offload_params)):
        if device != "none":
            section[f"{key}_device"] = device
        if device == "nvme":
            section[f"{key}_nvme_path"] = NVME_PATH
    if setup.gpus > setup.gpus_per_node:
        section["deepspeed_multinode_launcher"] = "standard"  # accelerate on each node; others want a hostfile
    keys = {"distributed_type": "DEEPSPEED", "deepspeed_config": section}
    return joined(
        Part(keys, _SAID, {**DEFAULT_SIZES, **FILE_SIZES, "clip_grad_norm": True}, _WHY),
        mixed(setup, "mixed"),
        _shared(setup),
    )


def _shared(setup: Setup) -> Part:
    """Return the ranks that share a sequence (Ulysses), whose length and attention are keys of the same section."""
    if setup.cp == 1:
        return Part({}, frozenset())
    keys: dict[str, Any] = {
        **degrees(sp_size=setup.cp),
        "parallelism_config_sp_seq_length": setup.seq_len,
        "parallelism_config_sp_seq_length_is_variable": False,
    }
    version = ("flash_attention_version",) if setup.has_flash_attn else ()
    if setup.attention == "flash":
        keys["parallelism_config_sp_attn_implementation"] = f"flash_attention_{setup.flash_attention_version or 2}"
    return Part({"parallelism_config": keys}, frozenset({"cp", "cp_comm_type", "seq_len", "attention", *version}))
