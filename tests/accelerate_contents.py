"""Contents of accelerate's configuration files for tests, and what their reader returns, in plain values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from memcalc.errors import InputError
from memcalc.formats.accelerate import read
from memcalc.formats.found import ACCUMULATION, Found
from memcalc.inputs.options import check_options

DDP = {"distributed_type": "MULTI_GPU", "num_processes": 8, "num_machines": 1}
FSDP = {**DDP, "distributed_type": "FSDP"}
DEEPSPEED = {**DDP, "distributed_type": "DEEPSPEED"}
MEGATRON = {**DDP, "distributed_type": "MEGATRON_LM"}
WRAPPED = {"fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}


def values(found: Found) -> dict[str, Any]:
    """Return the options' values, defaults too, after the check that memcalc takes them."""
    plain = {name: value.value for name, value in found.options.items()}
    check_options({name: value for name, value in plain.items() if name != ACCUMULATION})
    return plain


def given(found: Found) -> dict[str, Any]:
    return {name: value.value for name, value in found.options.items() if value.is_given}


def fsdp(**keys: Any) -> dict[str, Any]:
    return {**FSDP, "mixed_precision": "bf16", "fsdp_config": {**WRAPPED, **keys}}


def parallel(kind: Mapping[str, Any], **degrees: Any) -> dict[str, Any]:
    return {**kind, "parallelism_config": {f"parallelism_config_{name}": one for name, one in degrees.items()}}


def megatron(**keys: Any) -> dict[str, Any]:
    return {
        **MEGATRON,
        "mixed_precision": "bf16",
        "megatron_lm_config": {f"megatron_lm_{k}": v for k, v in keys.items()},
    }


def refusal(content: Mapping[str, Any]) -> str:
    with pytest.raises(InputError) as error:
        read("acc.yaml", content)
    text = str(error.value)
    assert "\n" not in text
    assert text.startswith("--accelerate acc.yaml: ")
    return text
