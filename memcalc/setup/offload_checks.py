"""Refusals of offload: engines that offload nothing, and combinations that are not modelled."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from memcalc.core.dims import numel
from memcalc.inputs.options import NOT_YET, Options, refuse

if TYPE_CHECKING:
    from memcalc.inputs.model import Model

_ENGINES: Final = {"offload_params": "deepspeed, fsdp2", "offload_optimizer": "deepspeed"}
_AXES: Final = ("tp", "pp", "cp", "ep")
_TENSORS: Final = 4
_BUFFER: Final = 100_000_000
_LEAST: Final = 1024**2
"""DeepSpeed's default of buffer_size in elements, and the bytes of the smallest part that has a file."""
_PRECISIONS: Final = ("fp32", "bf16-mixed", "fp16-mixed")


def check_offload(options: Options, engine: str, model: Model | None) -> None:
    """Raise InputError for offload that the engine does not have, or that is not modelled."""
    names = [name for name in ("offload_params", "offload_optimizer") if getattr(options, name) != "none"]
    for name in names:
        value = getattr(options, name)
        if engine == "fsdp2":
            _check_fsdp2(name, options, model)
            continue
        if engine != "deepspeed":
            refuse(name, value, f"with engine {engine} {NOT_YET}with --engine {_ENGINES[name]}")
        _check_zero(name, options)
        if model is None:
            refuse(name, value, f"with --params, a number of parameters alone, {NOT_YET}with --model")
        _check_deepspeed(name, options, model)
        if value == "nvme":
            _check_files(name, options, model)


def offload_optimizer_of(options: Options, engine: str) -> str:
    """Return where the optimizer is. FSDP2's policy moves it with the weights."""
    moved = engine == "fsdp2" and options.offload_params != "none"
    return options.offload_params if moved else options.offload_optimizer


def _check_fsdp2(name: str, options: Options, model: Model | None) -> None:
    """Refuse what CPUOffloadPolicy does not do, and what no test has compared."""
    value = getattr(options, name)
    if value == "nvme":
        refuse(name, value, "FSDP2's CPUOffloadPolicy has no files; allowed: none, cpu")
    if options.offload_params == "none":
        refuse(
            name,
            value,
            "FSDP2's CPUOffloadPolicy moves weights and optimizer together; allowed: with --offload-params cpu",
        )
    if model is None:
        refuse(name, value, f"with --params, a number of parameters alone, {NOT_YET}with --model")
    if options.optimizer not in ("adamw", "adam"):
        refuse(name, value, f"with optimizer {options.optimizer} {NOT_YET}with --optimizer adamw, adam")
    for axis in _AXES:
        if getattr(options, axis) > 1:
            refuse(name, value, f"with --{axis} {getattr(options, axis)} {NOT_YET}with --{axis} 1")


def _check_files(name: str, options: Options, model: Model) -> None:
    """Refuse swapping to NVMe that DeepSpeed stops with."""
    if options.zero < 3:
        why = f"with ZeRO {options.zero} DeepSpeed has no files and keeps it on the host, as with cpu"
        refuse(name, "nvme", f"{why}; allowed: cpu, or --zero 3")
    count, size = options.nvme_optimizer_buffer_count, options.nvme_buffer_size or _BUFFER
    if name == "offload_optimizer" and count is not None and count < _TENSORS:
        why = "the update of a sub-group has its weights, gradients and two moments in buffers at once"
        refuse("nvme_optimizer_buffer_count", count, f"{why}; allowed: {_TENSORS} or more")
    if name == "offload_params":
        itemsize = 4 if options.precision == "fp32" else 2
        largest = max(-(-numel(weight.shape)[0] // options.gpus) for weight in model.program.weights())
        if largest > size and largest * itemsize >= _LEAST:
            why = f"a rank's part of the largest weight has {largest} elements, and DeepSpeed takes it in one buffer"
            refuse("nvme_buffer_size", size, f"{why}; allowed: {largest} or more")


def _check_zero(name: str, options: Options) -> None:
    value, least = getattr(options, name), 3 if name == "offload_params" else 1
    if options.zero < least:
        stages = "3" if least == 3 else "1, 2, 3"
        refuse(name, value, f"with ZeRO {options.zero} DeepSpeed keeps all on the GPU; allowed: with --zero {stages}")


def _check_deepspeed(name: str, options: Options, model: Model) -> None:
    """Refuse what DeepSpeed's own optimizer of the host does not do, and what no test has compared."""
    value = getattr(options, name)
    if options.optimizer not in ("adamw", "adam"):
        why = f"with optimizer {options.optimizer} {NOT_YET}with --optimizer adamw, adam (DeepSpeedCPUAdam)"
        refuse(name, value, why)
    if options.optimizer_implementation not in (None, "fused"):
        why = "DeepSpeed runs its own DeepSpeedCPUAdam on the host (zero_force_ds_cpu_optimizer)"
        refuse("optimizer_implementation", options.optimizer_implementation, f"{why}; allowed: leave it out")
    if options.precision not in _PRECISIONS:
        refuse(name, value, f"with precision {options.precision} {NOT_YET}with --precision {', '.join(_PRECISIONS)}")
    for axis in _AXES:
        if getattr(options, axis) > 1:
            refuse(name, value, f"with --{axis} {getattr(options, axis)} {NOT_YET}with --{axis} 1")
    if options.recompute not in ("none", "full"):
        refuse(name, value, f"with recompute {options.recompute} {NOT_YET}with --recompute none, full")
    if options.base_dtype is not None:
        refuse(name, value, f"with --base-dtype {options.base_dtype} {NOT_YET}none")
    if model.program.source:
        refuse(name, value, f"for a {model.model_type}, which is traced, {NOT_YET}none")
