"""Refusals of FSDP1: what `FullyShardedDataParallel` does not do, and what is not modelled of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcalc.inputs.options import NOT_YET, Options, refuse
from memcalc.optimizers import OPTIMIZERS

if TYPE_CHECKING:
    from memcalc.inputs.model import Model


def check_fsdp1(options: Options, model: Model | None, dp: int) -> None:
    """Raise InputError for stages, groups, models and optimizers that FSDP1 is not modelled for."""
    _check_sharding(options, dp)
    if model is not None:
        _check_model(model)
    if options.lora_rank or options.freeze is not None:
        name, value = ("lora_rank", options.lora_rank) if options.lora_rank else ("freeze", options.freeze)
        refuse(name, value, f"with engine fsdp1 {NOT_YET}with --engine none, ddp, deepspeed, fsdp2")
    if str(options.precision).endswith("-autocast"):
        refuse("precision", options.precision, f"with engine fsdp1 {NOT_YET}fp32, bf16, fp16, bf16-mixed, fp16-mixed")
    if not OPTIMIZERS[options.optimizer].elementwise:
        allowed = ", ".join(name for name, optimizer in OPTIMIZERS.items() if optimizer.elementwise)
        refuse("optimizer", options.optimizer, f"over fsdp1's flat shards {NOT_YET}{allowed}")


def _check_sharding(options: Options, dp: int) -> None:
    if options.zero < 2:
        shown = ("zero", 1) if options.zero else ("engine", "fsdp1")
        why = "fsdp1 shards weights, gradients and states (NO_SHARD is deprecated)"
        refuse(*shown, f"{why}; allowed: with --zero 3 (FULL_SHARD) or 2 (SHARD_GRAD_OP), or --engine ddp")
    if options.gpus == 1:
        refuse("engine", "fsdp1", "switches to NO_SHARD on 1 GPU; allowed: none, fsdp2, or more --gpus")
    if options.shard_group == 1 and dp > 1:
        why = "over groups of one GPU FSDP1 switches to NO_SHARD and reduces nothing over the replicas"
        refuse("shard_group", 1, f"{why}; allowed: 2 or more, or --engine ddp")


def _check_model(model: Model) -> None:
    if model.program.source:
        refuse("engine", "fsdp1", f"for a {model.model_type}, which is traced, {NOT_YET}deepspeed")
    if not model.program.one_stack:
        stacks = "which has more than one stack of layers"
        refuse("engine", "fsdp1", f"for a {model.model_type}, {stacks}, {NOT_YET}deepspeed")
    if model.program.layers_share:
        refuse("engine", "fsdp1", f"for a {model.model_type}, whose layers share weights, {NOT_YET}deepspeed")
    if model.program.untrained:
        why = f"with weights that get no gradient, as this {model.model_type} has,"
        refuse("engine", "fsdp1", f"{why} {NOT_YET}deepspeed")
