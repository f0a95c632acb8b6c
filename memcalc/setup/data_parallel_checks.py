"""Refusals of torch.nn.DataParallel: what it does not do, and what is not modelled of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from memcalc.inputs.options import NOT_YET, Options, refuse

if TYPE_CHECKING:
    from memcalc.inputs.model import Model

_WITH: Final = "with engine data-parallel"


def check_data_parallel(options: Options, model: Model | None) -> None:
    """Raise InputError for GPUs, stages, models and methods that DataParallel is not modelled for."""
    if options.gpus == 1:
        refuse("engine", "data-parallel", "runs the module alone on 1 GPU; allowed: none, or more --gpus")
    if options.gpus > options.gpus_per_node:
        why = f"one process has the GPUs of one node, {options.gpus_per_node} (--gpus-per-node)"
        refuse("gpus", options.gpus, f"{why}; allowed: up to {options.gpus_per_node}, or --engine ddp")
    batch = options.gpus * options.micro_batch_size
    if options.global_batch_size not in (None, batch):
        refuse("global_batch_size", options.global_batch_size, f"{_WITH} more than one micro-batch {NOT_YET}{batch}")
    if options.cross_entropy not in (None, "eager"):
        refuse("cross_entropy", options.cross_entropy, f"{_WITH}, which gathers the logits, {NOT_YET}eager")
    if options.kernels not in (None, "hf"):
        refuse("kernels", options.kernels, f"{_WITH} {NOT_YET}hf")
    if options.padded:
        refuse("padded", "on", f"{_WITH} {NOT_YET}off")
    if str(options.precision).endswith("-autocast"):
        refuse("precision", options.precision, f"{_WITH} {NOT_YET}fp32, bf16, fp16, bf16-mixed, fp16-mixed")
    if options.lora_rank or options.freeze is not None:
        name, value = ("lora_rank", options.lora_rank) if options.lora_rank else ("freeze", options.freeze)
        refuse(name, value, f"{_WITH} {NOT_YET}with --engine none, ddp, deepspeed, fsdp2")
    if model is not None:
        _check_model(model)


def _check_model(model: Model) -> None:
    program = model.program
    why = ""
    if program.source:
        why = "which is traced,"
    elif not program.one_stack or model.support.decodes_encoded or model.support.batch != "tokens":
        why = "whose outputs are more than a loss and logits,"
    elif program.untrained:
        why = "which has weights that get no gradient,"
    if why:
        refuse("engine", "data-parallel", f"for a {model.model_type}, {why} {NOT_YET}ddp")
