"""The options of products in fp8 with Megatron and Transformer Engine, resolved, and what does not go with them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from memcalc.inputs.options import NOT_YET, Options, refuse

if TYPE_CHECKING:
    from memcalc.inputs.model import Model

_PRECISIONS: Final = ("bf16-mixed",)
_MULTIPLIED: Final = {"mxfp8": 32}
_GATHERED: Final = {"delayed": 8, "tensorwise": 8, "blockwise": 128, "mxfp8": 32}
"""The tokens that a rank's have to be a multiple of."""
_OLDEST: Final = {"delayed": (8, 9), "tensorwise": (8, 9), "blockwise": (9, 0), "mxfp8": (10, 0)}
"""The compute capability from which on Transformer Engine has each recipe (transformer_engine/pytorch/quantization.py)."""


def fp8_options(
    options: Options, engine: str, precision: str, seq_len: int | None, model: Model | None
) -> dict[str, Any]:
    """Return the recipe, None without fp8, and whether weights are gathered in it. Raise InputError for what is not modelled
    with them."""
    recipe, gathers = options.fp8_recipe, options.fp8_param_gather
    if recipe is None:
        if gathers:
            refuse("fp8_param_gather", True, "gathers weights in fp8; allowed: with --fp8-recipe")
        return {"fp8_recipe": None, "fp8_param_gather": False}
    name = "fp8_recipe"
    if engine != "megatron":
        refuse(name, recipe, f"with engine {engine} {NOT_YET}with --engine megatron")
    if model is None:
        refuse(name, recipe, f"with --params, a number of parameters alone, {NOT_YET}with --model")
    if precision not in _PRECISIONS:
        refuse(name, recipe, f"with precision {precision} {NOT_YET}with --precision {', '.join(_PRECISIONS)}")
    if options.attention == "eager":
        refuse(
            name, recipe, "Megatron's own layers have none of Transformer Engine's products; allowed: --attention sdpa"
        )
    if options.lora_rank or options.freeze:
        tuned = "lora_rank" if options.lora_rank else "freeze"
        refuse(tuned, getattr(options, tuned), f"with --fp8-recipe {NOT_YET}leave one of them out")
    if options.optimizer == "muon":
        refuse("optimizer", "muon", f"with --fp8-recipe {NOT_YET}adamw, adam")
    if options.precision_aware_optimizer:
        refuse("precision_aware_optimizer", True, f"with --fp8-recipe {NOT_YET}leave one of them out")
    if options.offload_modules is not None:
        refuse("offload_modules", options.offload_modules, f"with --fp8-recipe {NOT_YET}leave one of them out")
    modules = (options.recompute_modules or "").split(",")
    if recipe == "delayed" and ("layernorm" in modules or "moe_act" in modules):
        why = "with --fp8-recipe delayed Megatron refuses layernorm and moe_act; allowed: tensorwise, blockwise, mxfp8"
        refuse("recompute_modules", options.recompute_modules, why)
    if gathers and (options.zero != 1 or recipe == "mxfp8"):
        refuse("fp8_param_gather", True, f"{NOT_YET}with --zero 1 and --fp8-recipe delayed, tensorwise, blockwise")
    _check_gpu(options, recipe)
    _check_tokens(options, recipe, seq_len or 0)
    return {"fp8_recipe": recipe, "fp8_param_gather": gathers}


def _check_tokens(options: Options, recipe: str, seq_len: int) -> None:
    """Raise InputError for tokens that the products do not take, or the gathers of their scales (assert_dim_for_fp8_exec and
    assert_dim_for_all_gather of transformer_engine/pytorch/utils.py)."""
    shared = options.tp > 1 and options.sequence_parallel is not False
    ranks = options.cp * (options.tp if shared else 1)
    unit = _GATHERED[recipe] if shared else _MULTIPLIED.get(recipe, 8)
    tokens = options.micro_batch_size * seq_len // ranks
    if tokens % unit:
        why = f"with --fp8-recipe {recipe} a rank's tokens, {tokens}, have to be a multiple of {unit}"
        refuse("seq_len", seq_len, f"{why}; allowed: {-(-seq_len // (unit * ranks)) * unit * ranks}")


def _check_gpu(options: Options, recipe: str) -> None:
    if options.gpu is None:
        return
    from memcalc.inputs.gpu import load_gpu

    found = load_gpu(options.gpu).compute_capability
    capability = tuple(map(int, found.split("."))) if found.replace(".", "").isdigit() else (0, 0)
    if capability < _OLDEST[recipe]:
        oldest = ".".join(map(str, _OLDEST[recipe]))
        refuse("fp8_recipe", recipe, f"Transformer Engine needs compute capability {oldest}, and {options.gpu} has {found}; "
               "allowed: a newer --gpu")  # fmt: skip
