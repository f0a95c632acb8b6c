"""Refusals of tasks: what TRL does with the options beside `--task` and is not modelled, each by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from memcalc.inputs.options import NOT_YET, Options, refuse
from memcalc.quantized.chosen import base_dtype_name
from memcalc.tasks import OF_TRL, ONLINE, PREFERENCE

if TYPE_CHECKING:
    from memcalc.inputs.model import Model

_MODELLED: Final = ("pretrain", *OF_TRL)
_ENGINES: Final = ("none", "ddp", "deepspeed")
ENGINES_OF_PPO: Final = ("none", "ddp", "deepspeed")
_HEAD: Final = "chunked"
_ALONE: Final[Mapping[str, object]] = {
    "offload_optimizer": "none", "offload_params": "none", "dora": False,
}  # fmt: skip
"""The options that a task is not checked with, and the values that switch them off."""


def check_task(options: Options, engine: str, model: Model | None) -> None:
    """Raise InputError for a task that is not modelled, or not beside the other options."""
    task = options.task
    if options.precompute_reference is not None and task not in PREFERENCE:
        why = f"is an option of tasks with a reference model; allowed: with --task {' or '.join(PREFERENCE)}"
        refuse("precompute_reference", options.precompute_reference, why)
    if task not in _MODELLED:
        refuse("task", task, f"{NOT_YET}{', '.join(_MODELLED)}")
    if task not in OF_TRL:
        return
    if model is None:
        refuse("task", task, "needs a model, whose step TRL's trainer changes; allowed: pretrain, or --model")
    engines = ENGINES_OF_PPO if task == "ppo" else _ENGINES
    if engine not in engines:
        refuse("task", task, f"with engine {engine} {NOT_YET}pretrain, or --engine {', '.join(engines)}")
    if options.zero == 3:
        shards = "the head and the reference" if task in PREFERENCE else "the head"
        refuse("task", task, f"with --zero 3, which shards {shards} too, {NOT_YET}--zero 0, 1, 2")
    for axis in ("tp", "pp", "cp", "ep"):
        if getattr(options, axis) > 1:
            refuse("task", task, f"with --{axis} {getattr(options, axis)} {NOT_YET}--{axis} 1")
    if task == "ppo":
        from memcalc.setup.ppo_checks import check_ppo

        check_ppo(options, engine, model)
    else:
        _check_head(options, model)
    if task in PREFERENCE:
        _check_dropout(options, model)
    if task in ONLINE:
        from memcalc.setup.generation_checks import check_generation

        check_generation(options, model)
    for name, only in _ALONE.items() if task in PREFERENCE else ():
        if getattr(options, name) != only:
            refuse(name, getattr(options, name), f"with --task {task} {NOT_YET}leave it out")
    if options.liger is not None:
        refuse("liger", options.liger, f"with --task {task} {NOT_YET}leave it out")
    if options.kernels not in (None, "hf"):
        refuse("kernels", options.kernels, f"with --task {task} {NOT_YET}hf")
    why = f"with --task {task}"
    if task in PREFERENCE:
        why = f"TRL's trainer switches checkpointing of all layers off and on again; {why}"
    if options.recompute not in ("none", "full"):
        refuse("recompute", options.recompute, f"{why} {NOT_YET}none, full")
    if options.recompute_layers is not None:
        refuse("recompute_layers", options.recompute_layers, f"{why} {NOT_YET}leave it out")
    if task == "kto" and options.micro_batch_size == 1:
        why = "with --micro-batch-size 1 there are no other sequences to estimate the distance from the reference with"
        refuse("task", task, f"{why}; allowed: --micro-batch-size 2 or more")
    if options.seq_len == 1:
        refuse("seq_len", options.seq_len, f"--task {task} needs a token after the first one; allowed: 2 or more")
    if options.lora_targets is not None and model.program.adapters is not None:
        _check_targets(options, model)


def _check_head(options: Options, model: Model) -> None:
    """Raise InputError for a model whose last hidden states TRL's head is not checked with."""
    from memcalc.tasks.program import takes_head  # a task is rare

    whole = model.whole
    if not takes_head(whole.program) or whole.model_type in _DIFFER:
        refuse("task", options.task, f"for a {model.model_type} {NOT_YET}pretrain, or a decoder without routed experts")
    if options.cross_entropy not in (None, _HEAD):
        refuse("cross_entropy", options.cross_entropy, f"TRL's trainer has a head of its own; allowed: {_HEAD}")


_DIFFER: Final = ("ctrl", "gpt_neox_japanese")
"""Types whose run differs from TRL's."""
_DROPOUTS: Final = (
    "attn_pdrop", "dropout", "embd_pdrop", "embed_dropout", "embedding_dropout", "hidden_dropout", "resid_dropout",
    "resid_pdrop", "residual_dropout",
)  # fmt: skip
_DROPOUT_IS_CHECKED: Final = (
    "falcon",
    "gpt2",
    "gpt_neox",
    "openai-gpt",
    "opt",
    "phi",
    "phi3",
    "stablelm",
    "starcoder2",
)
"""Types for which it is checked which of their dropouts TRL switches off."""


def _check_dropout(options: Options, model: Model) -> None:
    """Raise InputError for a dropout that may be a module, which TRL switches off, or a function, which it does not."""
    if model.model_type in _DROPOUT_IS_CHECKED:
        return
    for name in _DROPOUTS:
        if getattr(model.whole.program.config, name, 0.0):
            refuse("task", options.task, f"for a {model.model_type} whose {name} is not 0 {NOT_YET}pretrain")


def _check_targets(options: Options, model: Model) -> None:
    """Raise InputError for an adapter of the head, whose weight TRL's head takes without the adapter."""
    adapters = model.program.adapters
    assert adapters is not None
    for name in (model.program.head_name, model.program.unembedding):
        if adapters.has(name, None):
            refuse("lora_targets", options.lora_targets, f"{name} with --task {options.task} {NOT_YET}the other layers")


def with_adapters_of_trl(options: Options) -> Options:
    """Return the options with adapters in bf16 where TRL's trainers cast them: over a quantised base
    (trl/trainer/sft_trainer.py, dpo_trainer.py, kto_trainer.py).

    Raise InputError for other adapters there, and for a base of another dtype.
    """
    task = options.task
    if task not in ("sft", *PREFERENCE) or options.quantize == "none" or not options.lora_rank:
        return options
    kind, base = options.quantize, base_dtype_name(options)
    if base != "bf16":
        why = f"with --task {task}, whose trainer casts adapters to bf16, over a base of {base}"
        refuse("quantize", kind, f"{why} {NOT_YET}with --precision bf16 or bf16-mixed, or --base-dtype bf16")
    if options.adapter_dtype not in (None, "bf16"):
        why = f"with --task {task} over a quantised base, where the trainer casts adapters to bf16"
        refuse("adapter_dtype", options.adapter_dtype, f"{why}; allowed: bf16")
    if options.dora:
        refuse("dora", options.dora, f"with --task {task} over a quantised base {NOT_YET}off")
    if options.prepare_kbit_training:
        refuse("prepare_kbit_training", True, f"TRL does not call it; allowed with --task {task}: off")
    return options._replace(adapter_dtype="bf16")


def precompute_reference_of(options: Options) -> bool | None:
    """Return whether the reference's log-probabilities are there before training; None without a reference."""
    return bool(options.precompute_reference) if options.task in PREFERENCE else None
