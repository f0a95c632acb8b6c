"""DeepSpeed in an accelerate configuration: the JSON that accelerate makes of it, or the file that it names.

Source: DeepSpeedPlugin of accelerate/utils/dataclasses.py, prepare_deepspeed_cmd_env of utils/launch.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from memcalc.formats.accelerate_precision import Mixed, unmixed
from memcalc.formats.accelerate_sections import unread
from memcalc.formats.found import Found, Value
from memcalc.formats.section import AUTO, Section

IN_THE_FILE: Final = (
    "gradient_accumulation_steps", "gradient_clipping", "zero_stage", "offload_optimizer_device",
    "offload_param_device", "offload_param_nvme_path", "offload_optimizer_nvme_path", "zero3_save_16bit_model",
)  # fmt: skip
"""The keys that accelerate refuses beside deepspeed_config_file (_deepspeed_config_checks), and mixed_precision."""
_FILE: Final = "deepspeed_config_file"
_IGNORED: Final = (
    "deepspeed_hostfile", "deepspeed_multinode_launcher", "offload_optimizer_nvme_path", "offload_param_nvme_path",
    "zero3_init_flag", "zero3_save_16bit_model",
)  # fmt: skip
_FILTERS: Final = ("deepspeed_inclusion_filter", "deepspeed_exclusion_filter")
_DEVICES: Final = ("none", "cpu", "nvme")


def read_deepspeed(section: Section, mixed: Mixed) -> Found:
    """Return DeepSpeed's configuration for its own reader. Raises InputError."""
    section.ignore(*_IGNORED)
    named = section.text(_FILE)
    if named is not None and named.strip().lower() != "none":
        _refuse_doubled(section, mixed)
        return Found({}, files={"deepspeed": section.value(_FILE, named)}, notes=tuple(_notes(section)))
    made = Value(_made(section, mixed), section.where("")[: -len(".")])
    # The mapping has the precision, except where it is nobody's choice: then "auto" stands there.
    rest = unmixed(mixed) if mixed.word in ("no", "fp8") else Found({})
    return Found(rest.options, files={"deepspeed": made}, notes=(*_notes(section), *rest.notes))


def _refuse_doubled(section: Section, mixed: Mixed) -> None:
    for key in IN_THE_FILE:
        if key in section.content:
            section.refuse(key, f"accelerate refuses it beside {_FILE}; allowed: in that file")
    if mixed.is_written:
        allowed = "leave it out, and bf16 or fp16 in that file"
        mixed.top.refuse(mixed.key, f"accelerate refuses it beside {_FILE}; allowed: {allowed}")


def _made(section: Section, mixed: Mixed) -> dict[str, Any]:
    """Return the JSON that DeepSpeedPlugin makes, and set_mixed_precision fills. Where nobody asks for mixed precision
    "auto" is left, as TrainingArguments may ask for it."""
    stage = section.whole("zero_stage", 0, 3)
    accumulation: int | str | None = AUTO
    if not section.is_auto("gradient_accumulation_steps"):
        accumulation = section.whole("gradient_accumulation_steps", 1)
    clipping = AUTO if section.is_auto("gradient_clipping") else section.number("gradient_clipping")
    made: dict[str, Any] = {
        "train_batch_size": AUTO,
        "train_micro_batch_size_per_gpu": AUTO,
        "gradient_accumulation_steps": AUTO if accumulation is None else accumulation,
        "zero_optimization": {
            "stage": 2 if stage is None else stage,
            "offload_optimizer": _offload(section, "offload_optimizer_device"),
            "offload_param": _offload(section, "offload_param_device"),
        },
    }
    if clipping != 0:  # 0 leaves it to DeepSpeed
        made["gradient_clipping"] = AUTO if clipping is None else clipping
    section.ignore("gradient_accumulation_steps", "gradient_clipping")
    if mixed.word == "fp16":
        return {**made, "fp16": {"enabled": True, "auto_cast": True}}
    if mixed.word == "bf16":
        return {**made, "bf16": {"enabled": True}}
    return made if mixed.word == "fp8" else {**made, "fp16": {"enabled": AUTO}, "bf16": {"enabled": AUTO}}


def _offload(section: Section, key: str) -> dict[str, Any]:
    """Return where DeepSpeed offloads to. The launcher passes no path on, so it stays "none" with nvme."""
    device = section.choice(key, _DEVICES) or "none"
    return {"device": device, "nvme_path": "none" if device == "nvme" else None}


def _notes(section: Section) -> Iterable[str]:
    for key in _FILTERS:
        if section.raw(key) is not None:
            yield f"{section.path}{key} is not read: all GPUs of num_processes are estimated."
    classes = section.text("deepspeed_moe_layer_cls_names")
    if classes is not None:
        yield (
            f"{section.path}deepspeed_moe_layer_cls_names {classes}: ZeRO-3 gathers whole the modules that DeepSpeed "
            "gathers whole by itself."
        )
    yield from unread(section, (*IN_THE_FILE, *_IGNORED))
