"""Quantised bases over FSDP in files: the dtypes of what is not quantised, and the codes that FSDP1 does not take.

Source: accelerate/utils/fsdp_utils.py (fsdp2_prepare_model casts nothing beside Params4bit), transformers/distributed/fsdp.py
(update_fsdp_plugin_peft: the policy takes the dtype of the codes), torch/distributed/fsdp/_flat_param.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from memcalc.errors import InputError
from memcalc.formats.found import Value

_FOUR: Final = ("nf4", "fp4")
_INTEGERS: Final = "Cannot flatten integer dtype tensors"


def keeps_base(engine: Any, said: Mapping[str, Value]) -> bool:
    """Tell whether an engine shards what is not quantised in the dtype that it was loaded in."""
    return engine in ("fsdp2", "fsdp1") and "quantize" in said and said["quantize"].value in _FOUR


def with_base_as_loaded(said: Mapping[str, Value], loaded: Value, half: str) -> dict[str, Value]:
    """Return what files say with the dtype of the base, which the Trainer's precision `loaded` tells; none if it is `half`."""
    out = dict(said)
    if "base_dtype" not in out and str(loaded.value) == f"{half}-autocast":
        out["base_dtype"] = loaded._replace(value="fp32")
    elif "base_dtype" in out and out["base_dtype"].value == half:
        del out["base_dtype"]
    return out


def with_adapters_as_cast(given: Mapping[str, Any], said: Mapping[str, Value]) -> dict[str, Value]:
    """Return what files say of adapters that their trainer has cast to 16 bits: with FSDP2 nothing is fp32 then, which is plain
    `--precision bf16`."""
    options = {**{name: value.value for name, value in said.items()}, **given}
    half = str(options.get("adapter_dtype"))
    shards = options.get("engine") == "fsdp2" and options.get("quantize") in _FOUR
    if not shards or options.get("precision") != f"{half}-mixed" or "precision" in given or "precision" not in said:
        return dict(said)
    out = {name: value for name, value in said.items() if name != "grad_dtype"}
    return out | {"precision": said["precision"]._replace(value=half)}


def check_flat(given: Mapping[str, Any], said: Mapping[str, Value]) -> None:
    """Raise InputError for codes that FSDP1 does not flatten: integers, and floats of another dtype than the other weights'."""
    engine, kind = said.get("engine"), said.get("quantize")
    if engine is None or engine.value != "fsdp1" or {"engine", "quantize"} & set(given) or kind is None:
        return
    if kind.value == "int8":
        allowed = "4 bits, with bnb_4bit_quant_storage bfloat16"
        raise InputError(f"{kind.where}: int8 codes are no weights that FSDP1 shards ({_INTEGERS}); allowed: {allowed}")
    storage = said.get("quantize_storage")
    if kind.value in _FOUR and storage is not None and "quantize_storage" not in given and storage.value == "uint8":
        allowed = "bfloat16, the dtype of the other weights, or fsdp_version 2, which leaves codes whole on every GPU"
        raise InputError(f"{storage.where} uint8: FSDP1 shards no integers ({_INTEGERS}); allowed: {allowed}")
