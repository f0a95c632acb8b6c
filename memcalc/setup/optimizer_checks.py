"""Optimizers that an engine does not run, or is not modelled with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from memcalc.core.dims import numel
from memcalc.inputs.options import NOT_YET, Options, refuse
from memcalc.optimizers import EVERY_OPTIMIZER

if TYPE_CHECKING:
    from memcalc.inputs.model import Model


def check_optimizer_of_layers(options: Options, model: Model) -> None:
    """Raise InputError for an optimizer that finds none of its layers (transformers' trainer_optimizer.py,
    _setup_low_rank_optimizer)."""
    optimizer = EVERY_OPTIMIZER[options.optimizer]
    check_weights_of_optimizer(options, model)
    if optimizer.takes_linear_layers_alone and model.support.conv1d:
        why = f"takes nn.Linear alone, and the layers of a {model.model_type} are Conv1D"
        refuse("optimizer", optimizer.name, f"{why}; allowed: another --optimizer, such as adamw")


def check_adam_mini(options: Options, engine: str, model: Model | None) -> None:
    """Raise InputError for what Adam-mini's step fails with, and for ranks that it would reduce over."""
    from memcalc.optimizers.adam_mini import block_of

    if engine != "none":
        refuse("optimizer", "adam-mini", f"with engine {engine} {NOT_YET}with --engine none")
    if model is None:
        refuse("optimizer", "adam-mini", f"with --params, a number of parameters alone, {NOT_YET}with --model")
    head = head_elements(model)
    for weight in model.program.weights():
        kind = block_of(weight.name)
        if kind == "row" and len(weight.shape) != 2:
            why = f"takes {weight.name} for a matrix by its name, and fails"
            refuse(
                "optimizer", "adam-mini", f"{why}; allowed: another --optimizer for a {model.model_type}, such as adamw"
            )
        if kind == "head" and (not head or numel(weight.shape)[0] % head):
            why = f"does not find whole heads of hidden²/heads elements in {weight.name}"
            refuse(
                "optimizer", "adam-mini", f"{why}; allowed: another --optimizer for a {model.model_type}, such as adamw"
            )


def check_fused_backward(options: Options, engine: str, precision: str, model: Model | None) -> None:
    """Raise InputError for what an optimizer that updates within backward does not do, and for what is not modelled with it."""
    name = options.optimizer
    if engine != "none":
        refuse("optimizer", name, f"with engine {engine} {NOT_YET}with --engine none (one GPU)")
    if model is None:
        refuse("optimizer", name, f"with --params, a number of parameters alone, {NOT_YET}with --model")
    if precision not in _WITHOUT_MASTERS:
        why = "updates the weights themselves and keeps no fp32 copy of them"
        if "fp16" in precision:
            why = "runs backward twice with a dynamic loss scale, which is not modelled"
        refuse(
            "optimizer", name, f"{why} (precision {precision}); allowed: with --precision {', '.join(_WITHOUT_MASTERS)}"
        )
    if (options.global_batch_size or options.micro_batch_size) != options.micro_batch_size:
        why = "updates in the backward of every micro-batch"
        refuse("global_batch_size", options.global_batch_size, f"{name} {why}; allowed: {options.micro_batch_size}")
    others = {"task": "pretrain", "freeze": None, "lora_rank": 0, "quantize": "none", "offload_activations": "none"}
    for other, plain in others.items():
        value = getattr(options, other)
        if value != plain:
            refuse("optimizer", name, f"with --{other.replace('_', '-')} {value} {NOT_YET}without it")
    if model.program.source or model.program.untrained:
        refuse("optimizer", name, f"for a {model.model_type} {NOT_YET}another --optimizer, such as adamw")
    if model.support.conv1d:
        why = "with Conv1D, where the order of the gradients of bias and weight matters,"
        refuse("optimizer", name, f"for a {model.model_type}, {why} {NOT_YET}another --optimizer, such as adamw")
    odd = next((w.name for w in model.program.weights() if name == "adalomo" and len(w.shape) not in (1, 2)), None)
    if odd is not None:
        why = f"has moments of matrices and vectors alone, and fails for {odd}"
        refuse("optimizer", name, f"{why}; allowed: another --optimizer, such as adamw")


_WITHOUT_MASTERS: Final = ("bf16", "fp32", "bf16-autocast")


def head_elements(model: Model) -> int:
    """Return the elements of a head as Adam-mini counts them: hidden²/heads; 0 where the configuration has not both numbers."""
    config = model.program.config
    hidden, heads = getattr(config, "hidden_size", None), getattr(config, "num_attention_heads", None)
    return hidden * hidden // heads if isinstance(hidden, int) and isinstance(heads, int) and heads else 0


def check_engine_of_optimizer(options: Options, engine: str, *, states_only: bool) -> None:
    """Raise InputError for one of DeepSpeed's own optimizers with another engine or with ZeRO, or beside what is not modelled
    with it."""
    optimizer = EVERY_OPTIMIZER[options.optimizer]
    if optimizer.only_engine is None:
        return
    if engine != optimizer.only_engine:
        why = f"is DeepSpeed's own; allowed: with --engine {optimizer.only_engine} --zero 0"
        refuse("optimizer", optimizer.name, why)
    if options.zero and optimizer.compresses:
        refuse(
            "optimizer", optimizer.name, f"DeepSpeed refuses it with ZeRO (zero {options.zero}); allowed: with --zero 0"
        )
    if options.zero:
        why = f"with ZeRO (zero {options.zero}), where its norms are of partitions and not of weights,"
        refuse("optimizer", optimizer.name, f"{why} {NOT_YET}with --zero 0")
    for name in ("tp", "pp", "cp", "ep"):
        if getattr(options, name) > 1:
            refuse(name, getattr(options, name), f"with --optimizer {optimizer.name} {NOT_YET}1")
    if optimizer.name == "lamb" and options.precision == "bf16-mixed" and not states_only:
        why = "FusedLamb's kernel takes gradients of fp32, or of fp16 for fp32 weights; allowed with --optimizer lamb"
        refuse("precision", options.precision, f"{why}: fp32, fp16-mixed")


def check_weights_of_optimizer(options: Options, model: Model) -> None:
    """Raise InputError for one of DeepSpeed's own optimizers and weights that get no gradient."""
    optimizer = EVERY_OPTIMIZER[options.optimizer]
    if optimizer.only_engine is not None and model.program.untrained:
        why = f"with weights that get no gradient, as this {model.model_type} has, {NOT_YET}another --optimizer, such as adamw"
        refuse("optimizer", optimizer.name, why)


def check_optimizer_of_deepspeed(options: Options, *, states_only: bool) -> None:
    """Raise InputError for an optimizer that needs whole matrices, and for one that stage 0 is not modelled with."""
    optimizer = EVERY_OPTIMIZER[options.optimizer]
    if not optimizer.takes_flat:
        allowed = ", ".join(name for name, one in EVERY_OPTIMIZER.items() if one.takes_flat and one.only_engine is None)
        why = f"needs whole matrices, and DeepSpeed's partitions are flat; allowed: {allowed}"
        refuse("optimizer", optimizer.name, why)
    if options.zero == 0 and not states_only and not optimizer.takes_stage_0:
        allowed = ", ".join(name for name, one in EVERY_OPTIMIZER.items() if one.takes_flat and one.takes_stage_0)
        why = f"with DeepSpeed's stage 0 {NOT_YET}{allowed}, or --zero 1 to 3"
        refuse("optimizer", optimizer.name, why)
