"""The options of an inference run, as given, and the values that each may have."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any, Final, NamedTuple

from memcalc.core.dtypes import DType, bf16, fp16, fp32, uint8
from memcalc.errors import InputError, nearest, one_line, quoted
from memcalc.inputs.options import option_name
from memcalc.units import to_bytes


class Asked(NamedTuple):
    """Every option of `memcalc infer`. None stands for the default."""

    batch_size: int = 1
    """The sequences that run together."""
    prompt_len: int | None = None
    """The tokens of each prompt."""
    new_tokens: int | None = None
    """The tokens that each sequence gets. Each of them goes through the model once."""
    dtype: str = "bf16"
    """The dtype of weights and activations."""
    quantize: str | None = None
    """How weights are kept in fewer bits; None: as the configuration says."""
    group_size: int | None = None
    """The inputs that share a scale, for int4, gptq and awq."""
    double_quant: bool = False
    """True if the scales of nf4 and fp4 are quantised too."""
    kv_dtype: str = "auto"
    """The dtype of keys and values in the cache; "auto": that of the model."""
    cache: str = "dynamic"
    """transformers' DynamicCache or StaticCache."""
    attention: str | None = None
    tp: int = 1
    pp: int = 1
    ep: int = 1
    gpu: str | None = None
    engine: str = "transformers"
    block_size: int | None = None
    gpu_memory_utilization: float | None = None
    mem_fraction_static: float | None = None
    cuda_graph_memory: str | None = None
    """The memory of its CUDA graphs that vLLM has measured, with a unit, or 0 without graphs; None: not known."""
    zero_inference: str = "none"
    """The place of the weights between the forwards of their modules, if not on the GPU."""


DTYPES: Final[Mapping[str, DType]] = {"bf16": bf16, "fp16": fp16, "fp32": fp32}
KV_DTYPES: Final[Mapping[str, DType]] = {
    **DTYPES,
    "fp8": DType("fp8_e4m3", uint8.itemsize),
    "fp8_e4m3": DType("fp8_e4m3", uint8.itemsize),
    "fp8_e5m2": DType("fp8_e5m2", uint8.itemsize),
    "int8": DType("int8", uint8.itemsize, is_floating_point=False),
}
CHOICES: Final[Mapping[str, Collection[str]]] = {
    "dtype": tuple(DTYPES),
    "kv_dtype": ("auto", *KV_DTYPES),
    "cache": ("dynamic", "static"),
    "attention": ("sdpa", "eager"),
    "engine": ("transformers", "vllm", "sglang"),
    "zero_inference": ("none", "cpu", "nvme"),
}
WHOLE: Final[Mapping[str, tuple[int, int]]] = {
    "batch_size": (1, 10**7),
    "prompt_len": (1, 10**8),
    "new_tokens": (0, 10**8),
    "tp": (1, 10**6),
    "pp": (1, 10**6),
    "ep": (1, 10**6),
    "block_size": (1, 10**6),
}


def check(given: Mapping[str, Any]) -> Asked:
    """Return the options. Raise InputError for an unknown name or a value that is not allowed."""
    known = Asked._fields
    for name in given:
        if name not in known:
            close = nearest(name, known)
            hint = f"did you mean {', '.join(close)}?" if close else f"allowed: {', '.join(known)}"
            raise InputError(f"{option_name(one_line(name))}: unknown option of infer; {hint}")
    asked = Asked(**{name: value for name, value in given.items() if value is not None})
    for name, (least, most) in WHOLE.items():
        value = getattr(asked, name)
        if value is not None and (type(value) is not int or not least <= value <= most):
            raise InputError(f"{option_name(name)} {quoted(value)}: allowed: a whole number from {least} to {most}")
    for name, allowed in CHOICES.items():
        value = getattr(asked, name)
        if value is not None and value not in allowed:
            also = "; --quantize has weights in fewer bits" if name == "dtype" else ""
            raise InputError(f"{option_name(name)} {quoted(value)}: allowed: {', '.join(allowed)}{also}")
    for name in ("gpu_memory_utilization", "mem_fraction_static"):
        value = getattr(asked, name)
        if value is not None and type(value) not in (int, float):
            raise InputError(f"{option_name(name)} {quoted(value)}: allowed: a number from 0 to 1")
    if asked.group_size is not None and type(asked.group_size) is not int:
        raise InputError(f"--group-size {quoted(asked.group_size)}: allowed: 16, 32, 64, 128, 256, 512, 1024, -1")
    if type(asked.double_quant) is not bool:  # pyright: ignore[reportUnnecessaryComparison]
        raise InputError(f"--double-quant {quoted(asked.double_quant)}: allowed: on, off")
    for name in ("quantize", "gpu", "cuda_graph_memory"):
        value = getattr(asked, name)
        if value is not None and not isinstance(value, str):
            raise InputError(f"{option_name(name)} {quoted(value)}: allowed: a name")
    graph_bytes(asked.cuda_graph_memory)
    return asked


def graph_bytes(given: str | None) -> int | None:
    """Return the bytes of CUDA graphs: "0", or a number with a unit ("1.2GiB"). Raises InputError for anything else."""
    if given is None:
        return None
    if given.strip() == "0":
        return 0
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?([MGmg])([Ii]?)[Bb]", given.strip(), re.ASCII)
    if match is None or float(match[1]) > 10**6:
        allowed = "allowed: 0 without graphs, or a number with a unit, such as 1.2GiB"
        raise InputError(f"--cuda-graph-memory {quoted(given)}: {allowed}")
    return to_bytes(float(match[1]), f"{match[2].upper()}{'i' if match[3] else ''}B")


def kv_dtype_of(asked: Asked) -> DType:
    """Return the dtype of keys and values in the cache."""
    return DTYPES[asked.dtype] if asked.kv_dtype == "auto" else KV_DTYPES[asked.kv_dtype]
