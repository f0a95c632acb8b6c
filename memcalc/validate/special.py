"""Setups that the plain reference step of the fake backend has not, and what of them is not run at all."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from memcalc.inputs.options import NOT_YET, PLUS_PLUS, refuse
from memcalc.pipelining.schedules import flushes, placement_of
from memcalc.registry import OF_DEEPSPEED

if TYPE_CHECKING:
    from memcalc.estimation.report import Report
    from memcalc.setup.setup import Setup

OF_MODELS: Final = {"adam-mini": "adam_mini", "lomo": "lomo_optim", "adalomo": "lomo_optim"}
"""The optimizers that want a model and not its parameters alone, and their packages."""


def has_other_codes(setup: Setup) -> bool:
    """Tell whether a base is in other codes than 4 bits in uint8 that each rank has as a whole."""
    shards = setup.engine == "fsdp2" or (setup.engine == "deepspeed" and setup.zero == 3)
    return setup.quantize != "none" and (
        setup.quantize == "int8" or shards or setup.quantize_storage not in (None, "uint8")
    )


def comes_behind_the_split(setup: Setup) -> bool:
    """Tell whether a setup trains a part of a model whose layers or stages FSDP2's ranks share."""
    tuned = setup.lora_rank > 0 or setup.freeze is not None
    return tuned and setup.engine == "fsdp2" and max(setup.tp, setup.pp) > 1


def is_special(setup: Setup) -> bool:
    """Tell whether a setup has one of: 8 bits, codes in shards, packed rows, noise, GRPO, activations on the host, an
    optimizer of models, weights on the host, files, and what trains behind the split of layers or stages."""
    return (
        has_other_codes(setup)
        or setup.packing
        or setup.neftune_alpha is not None
        or setup.task == "grpo"
        or setup.offload_activations != "none"
        or setup.optimizer in OF_MODELS
        or setup.offload_params != "none"
        or setup.offload_optimizer == "nvme"
        or comes_behind_the_split(setup)
    )


def has_two_stacks_in_stages(report: Report) -> bool:
    """Tell whether a pipeline's stages are those of an encoder and of a decoder."""
    return report.setup.pp > 1 and not report.model.program.one_stack


def looks_at_tensors(setup: Setup) -> bool:
    """Tell whether a special setup's code looks at pointers or values, which torch's fake tensors have not."""
    return (
        setup.quantize != "none"
        or setup.packing
        or setup.offload_activations != "none"
        or setup.offloads
        or setup.optimizer in ("lomo", "adalomo")
        or setup.task != "pretrain"
    )


def check_special(report: Report, backend: str) -> None:
    """Raise InputError for what is estimated, and neither run as a plain step nor as a special one."""
    setup = report.setup
    if setup.seq_len is None:
        return  # a number of parameters, which has no code
    if setup.comm_hook is not None:
        refuse("comm_hook", setup.comm_hook, "is not run by validate; allowed: without it, or memcalc estimate")
    if setup.optimizer in OF_DEEPSPEED:
        refuse("optimizer", setup.optimizer, "is not run by validate; allowed: without it, or memcalc estimate")
    if backend == "cuda" and is_special(setup):
        name, value = _what_is_special(setup)
        refuse(name, value, f"on a GPU {NOT_YET}--backend fake, or without it")
    if backend == "cuda" and has_two_stacks_in_stages(report):
        refuse("pp", setup.pp, f"for a {report.model.model_type} on a GPU {NOT_YET}--backend fake, or 1")
    for name, off in PLUS_PLUS.items():
        if getattr(setup, name) != off:
            shown = "off" if off is False else off
            why = "DeepSpeed's quantiser has no version for the CPU, and its second partition is not asked for,"
            refuse(name, getattr(setup, name), f"{why} in a run {NOT_YET}{shown}; memcalc estimate takes it")
    if placement_of(setup.schedule) == "both ways" or not flushes(setup.schedule):
        why = "torch's pipelines have neither two copies of the model nor an update within a step;"
        allowed = "gpipe, 1f1b, interleaved, zero-bubble, zbv, dualpipev, naive, dapple, dapple-b"
        refuse("schedule", setup.schedule, f"is not run by validate: {why} allowed: {allowed}, or memcalc estimate")
    if setup.reward_model is not None:
        why = "a run has the training step alone, whose rewards are given"
        refuse("reward_model", setup.reward_model, f"{why}; allowed: leave it out, or memcalc estimate")


def _what_is_special(setup: Setup) -> tuple[str, object]:
    """Return the option that makes a setup special, and its value."""
    values: dict[str, tuple[object, bool]] = {
        "quantize": (setup.quantize, has_other_codes(setup)),
        "packing": (True, setup.packing),
        "neftune_alpha": (setup.neftune_alpha, setup.neftune_alpha is not None),
        "task": (setup.task, setup.task == "grpo"),
        "offload_activations": (setup.offload_activations, setup.offload_activations != "none"),
        "optimizer": (setup.optimizer, setup.optimizer in OF_MODELS),
        "offload_params": (setup.offload_params, setup.offload_params != "none"),
        "offload_optimizer": (setup.offload_optimizer, setup.offload_optimizer == "nvme"),
        "lora_rank": (setup.lora_rank, setup.lora_rank > 0),
        "freeze": (setup.freeze, setup.freeze is not None),
    }
    return next((name, value) for name, (value, there) in values.items() if there)
