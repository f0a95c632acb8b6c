"""The keys of TRL's ModelConfig in training arguments that are written: the model, adapters, quantised weights.

Source: trl/trainer/model_config.py, trl/trainer/utils.py (get_quantization_config, get_peft_config) of 1.16.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from memcalc.formats.accelerate_part import Part, joined
from memcalc.inputs.model import bundled_spec, load_model
from memcalc.quantized.chosen import base_dtype_name
from memcalc.tasks import OF_TRL

if TYPE_CHECKING:
    from memcalc.inputs.model import Model
    from memcalc.setup.setup import Setup

_HUB_ID: Final = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
_DTYPES: Final = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_ATTENTION: Final = ("eager", "sdpa", "flash_attention_2", "flash_attention_3")
_OF_ADAPTERS: Final = frozenset({"lora_rank", "lora_targets", "lora_dropout", "dora", "modules_to_save"})


def has_model_config(setup: Setup) -> bool:
    """Tell whether the file has keys of ModelConfig: beside adapters, and for TRL's trainers."""
    return setup.lora_rank > 0 or setup.task in OF_TRL


def model_part(setup: Setup, model: Model) -> Part:
    """Return the keys of ModelConfig; none where TrainingArguments say all."""
    if not has_model_config(setup):
        return Part({}, frozenset())
    keys: dict[str, Any] = {}
    name = _name(model)
    if name is not None:
        keys["model_name_or_path"] = name
    keys["dtype"] = _DTYPES[_weights(setup)]
    return joined(Part(keys, frozenset()), _attention(setup, model), _adapters(setup), _quantized(setup))


def _attention(setup: Setup, model: Model) -> Part:
    """Return the key of the attention, which is named where it is not the model's first."""
    version = setup.flash_attention_version or 2
    named = f"flash_attention_{version}" if setup.attention == "flash" else setup.attention
    if named not in _ATTENTION:
        return Part({}, frozenset())
    first = model.program.attention_kinds[0]
    is_named = setup.attention != first or (setup.packing and setup.task != "sft")
    says = frozenset({"attention", "flash_attention_version"} if setup.flash_attention_version else {"attention"})
    return Part({"attn_implementation": named} if is_named else {}, says)


def _name(model: Model) -> str | None:
    """Return the Hub id of a model, or its bundled name; None if only its shape is known."""
    spec = bundled_spec(model.name)
    if spec is None:
        return model.name if _HUB_ID.fullmatch(model.name) else None
    if load_model(model.name).fields != model.fields:
        return None
    return next((alias for alias in spec["aliases"] if _HUB_ID.fullmatch(alias)), model.name)


def _weights(setup: Setup) -> str:
    """Return the dtype that the weights are loaded in. FSDP casts what it gathers, and wants one dtype in a unit."""
    if setup.engine == "fsdp2" and setup.precision.endswith("-mixed") and setup.quantize in ("none", "int8"):
        return "fp32"
    return base_dtype_name(setup)


def _adapters(setup: Setup) -> Part:
    if not setup.lora_rank:
        return Part({}, frozenset())
    keys: dict[str, Any] = {"use_peft": True, "lora_r": setup.lora_rank}
    if setup.lora_targets not in (None, "default"):
        keys["lora_target_modules"] = _targets(_names(setup.lora_targets))
    keys["lora_dropout"] = setup.lora_dropout or 0.0
    if setup.dora:
        keys["use_dora"] = True
    if setup.modules_to_save is not None:
        keys["lora_modules_to_save"] = _names(setup.modules_to_save)
    why = {
        "lora_bias": "TRL's adapters have none (get_peft_config)",
        "adapter_dtype": "peft makes adapters in fp32, and SFTTrainer casts them to bf16 over quantised weights",
    }
    return Part(keys, _OF_ADAPTERS, {}, why)


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.replace("+", ",").split(",")]


def _targets(names: list[str]) -> list[str]:
    """Return the list of modules. ModelConfig makes a text of a list of one, which peft takes for a pattern."""
    if len(names) > 1 or names == ["all-linear"]:
        return names
    escaped = names[0].replace(".", r"\.")
    return [rf"(.*\.)?{escaped}"]


def _quantized(setup: Setup) -> Part:
    if setup.quantize == "none":
        return Part({}, frozenset())
    if setup.quantize == "int8":
        return Part({"load_in_8bit": True}, frozenset({"quantize"}))
    keys: dict[str, Any] = {"load_in_4bit": True, "bnb_4bit_quant_type": setup.quantize}
    if setup.double_quant:
        keys["use_bnb_nested_quant"] = True
    if setup.quantize_storage not in (None, "uint8"):
        keys["bnb_4bit_quant_storage"] = _DTYPES[setup.quantize_storage]
    takes = {"quantize_compute_dtype": _weights(setup)}
    why = {"quantize_compute_dtype": "TRL multiplies quantised weights in the dtype that it loads the model in"}
    return Part(keys, frozenset({"quantize", "double_quant", "quantize_storage"}), takes, why)
