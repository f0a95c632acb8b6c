"""Reading of accelerate's configuration file, as `accelerate launch --config_file` reads it.

Source: accelerate/commands/config/config_args.py (ClusterConfig), commands/launch.py, utils/launch.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from memcalc.errors import quoted
from memcalc.formats.accelerate_deepspeed import read_deepspeed
from memcalc.formats.accelerate_fsdp import read_fsdp, version_of
from memcalc.formats.accelerate_megatron import read_megatron
from memcalc.formats.accelerate_parallelism import read_parallelism
from memcalc.formats.accelerate_precision import in_autocast, read_mixed
from memcalc.formats.accelerate_processes import Processes, read_processes
from memcalc.formats.found import Found, Value
from memcalc.formats.section import Section

KNOWN_KEYS: Final = (
    "command_file", "commands", "compute_environment", "debug", "deepspeed_config", "distributed_type",
    "downcast_bf16", "dynamo_backend", "dynamo_config", "enable_cpu_affinity", "fp16", "fp8_config", "fsdp_config",
    "gpu_ids", "machine_rank", "main_process_ip", "main_process_port", "main_training_function",
    "megatron_lm_config", "mixed_precision", "mpirun_config", "num_machines", "num_processes", "parallelism_config",
    "rdzv_backend", "same_network", "tpu_env", "tpu_name", "tpu_use_cluster", "tpu_use_sudo", "tpu_vm", "tpu_zone",
    "use_cpu",
)  # fmt: skip
"""The keys that accelerate 1.15 accepts: ClusterConfig's, and two old ones that it converts."""
COMPILERS: Final = (
    "NO", "EAGER", "AOT_EAGER", "INDUCTOR", "AOT_TS_NVFUSER", "NVPRIMS_NVFUSER", "CUDAGRAPHS", "OFI", "FX2TRT",
    "ONNXRT", "TENSORRT", "AOT_TORCHXLA_TRACE_ONCE", "TORCHXLA_TRACE_ONCE", "TVM", "HPU_BACKEND", "NEURON",
)  # fmt: skip
"""DynamoBackend of accelerate/utils/dataclasses.py."""
_WITHOUT_GPU: Final = ("MULTI_CPU", "XLA", "MULTI_NEURON")
_OTHER_CHIPS: Final = ("MULTI_NPU", "MULTI_MLU", "MULTI_SDAA", "MULTI_MUSA", "MULTI_XPU", "MULTI_HPU")
_ON_GPUS: Final = ("NO", "MULTI_GPU", "FSDP", "DEEPSPEED", "MEGATRON_LM")
KINDS: Final = (*_ON_GPUS, *_OTHER_CHIPS, *_WITHOUT_GPU)
"""DistributedType of accelerate/utils/dataclasses.py."""
_SECTION_OF: Final = {"FSDP": "fsdp_config", "DEEPSPEED": "deepspeed_config", "MEGATRON_LM": "megatron_lm_config"}


def read(file: str, content: Mapping[str, Any]) -> Found:
    """Return what an accelerate configuration says. Raises InputError for what accelerate refuses, and for processes
    that run without a GPU."""
    top = Section("--accelerate", file, content)
    if top.raw("compute_environment") not in (None, "LOCAL_MACHINE"):
        top.refuse("compute_environment", "is not modelled; allowed: LOCAL_MACHINE")
    top.refuse_unknown(KNOWN_KEYS)
    kind = _kind(top)
    _refuse_cpu(top, kind)
    processes = read_processes(top, kind)
    mixed = read_mixed(top)
    parallelism = read_parallelism(top.section("parallelism_config"), kind, processes)
    if kind == "DEEPSPEED":
        engine = read_deepspeed(top.section("deepspeed_config"), mixed)
    elif kind == "FSDP":
        engine = read_fsdp(top.section("fsdp_config"), mixed, processes, parallelism.sizes)
    elif kind == "MEGATRON_LM":
        engine = read_megatron(top.section("megatron_lm_config"), mixed, processes)
    else:
        engine = in_autocast(mixed)
    launched = Found({**_engine(top, kind, processes), **processes.options(top)})
    notes = Found({}, notes=(*_chip_notes(top, kind), *processes.notes, *_unused(top, kind), *_compile_notes(top)))
    return _joined((launched, engine, parallelism.found, notes))


def _kind(top: Section) -> str:
    """Return the distributed_type. YAML reads NO without quotes as false; nothing distributed is the same."""
    if "distributed_type" not in top.content:
        top.refuse("distributed_type", f"accelerate needs it; allowed: {', '.join(_ON_GPUS)}")
    value = top.raw("distributed_type")
    if value is None or value is False:
        return "NO"
    if not isinstance(value, str) or value not in KINDS:
        top.refuse("distributed_type", f"allowed: {', '.join(_ON_GPUS)}")
    if value in _WITHOUT_GPU:
        top.refuse("distributed_type", f"has no GPU to estimate; allowed: {', '.join(_ON_GPUS)}")
    return value


def _engine(top: Section, kind: str, processes: Processes) -> dict[str, Value]:
    """Return the engine of a distributed_type. One process of MULTI_GPU has no DDP (multi_device of accelerator.py), and
    no engine is named, so that another number of GPUs may be."""
    fsdp = f"fsdp{version_of(top.section('fsdp_config'))}" if kind == "FSDP" else ""
    named = {"NO": "none", "FSDP": fsdp, "DEEPSPEED": "deepspeed", "MEGATRON_LM": "megatron"}.get(kind, "ddp")
    return {} if named == "ddp" and processes.total == 1 else {"engine": top.value("distributed_type", named)}


def _refuse_cpu(top: Section, kind: str) -> None:
    """Raise InputError for training on the CPU. Only the launcher of a single process reads use_cpu."""
    if top.flag("use_cpu") and kind == "NO":
        top.refuse("use_cpu", "there is no GPU to estimate; allowed: false")


def _chip_notes(top: Section, kind: str) -> Iterable[str]:
    if kind in _OTHER_CHIPS:
        yield f"distributed_type {kind}: DDP, estimated as on NVIDIA GPUs."
    if top.flag("use_cpu"):
        yield f"use_cpu true: accelerate starts {kind} on GPUs all the same, and so it is estimated."


def _unused(top: Section, kind: str) -> Iterable[str]:
    """Name the sections of other kinds, which accelerate sets and nothing reads."""
    for other, key in _SECTION_OF.items():
        if other != kind and any(value is not None for value in top.section(key).content.values()):
            yield f"{key} is not used: distributed_type is {kind}."


def _compile_notes(top: Section) -> Iterable[str]:
    """Tell of torch.compile. A dynamo_backend beside the section replaces it."""
    section, key = top.section("dynamo_config"), "dynamo_backend"
    if key in top.content:
        section = top
    else:
        key = section.first("dynamo_backend", "backend")
    value = section.raw(key)
    word = "NO" if value is None or value is False else str(value).upper()
    if word not in COMPILERS:
        section.refuse(key, "allowed: no, inductor, eager, or another backend of torch.compile")
    if word != "NO":
        what = "torch.compile is not modelled; eager code is estimated, which as a rule needs more."
        yield f"{section.path}{key} {quoted(value)}: {what}"


def _joined(parts: Iterable[Found]) -> Found:
    """Return what all parts say; a later part's option replaces an earlier one's."""
    options: dict[str, Value] = {}
    files: dict[str, Value] = {}
    notes: list[str] = []
    for part in parts:
        options |= part.options
        files |= part.files
        notes += part.notes
    return Found(options, files=files, notes=tuple(notes))
