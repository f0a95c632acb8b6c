"""The options of Megatron's precision-aware optimizer, resolved, and what does not go with it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from memcalc.inputs.options import NOT_YET, Options, refuse

if TYPE_CHECKING:
    from memcalc.inputs.model import Model

_DTYPES: Final = ("main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
_ADAM: Final = ("adamw", "adam")
_PRECISIONS: Final = ("bf16-mixed", "fp16-mixed")


def precision_aware_options(options: Options, engine: str, precision: str, model: Model | None) -> dict[str, Any]:
    """Return the dtypes of its states, None without it. Raise InputError for what Megatron refuses with it, and for what is not
    modelled (megatron/core/optimizer/optimizer_config.py, __post_init__)."""
    given = {name: getattr(options, name) for name in _DTYPES}
    if not options.precision_aware_optimizer:
        for name, value in given.items():
            if value is not None:
                refuse(
                    name, value, "is of Megatron's precision-aware optimizer; allowed: with --precision-aware-optimizer"
                )
        return {"precision_aware_optimizer": False, **given}
    name, on = "precision_aware_optimizer", True
    if engine != "megatron":
        refuse(name, on, "is an option of Megatron; allowed: with --engine megatron --zero 1")
    if options.optimizer not in _ADAM:
        refuse(
            name,
            on,
            f"with optimizer {options.optimizer} Megatron refuses it; allowed: with --optimizer {', '.join(_ADAM)}",
        )
    if options.zero != 1:
        refuse(name, on, "Megatron takes it with its distributed optimizer alone; allowed: with --zero 1")
    if model is None:
        refuse(name, on, f"with --params, a number of parameters alone, {NOT_YET}with --model")
    if precision not in _PRECISIONS:
        refuse(name, on, f"with precision {precision} {NOT_YET}with --precision {', '.join(_PRECISIONS)}")
    return {name: on, **{dtype: value or "fp32" for dtype, value in given.items()}}
