"""Megatron-LM's arguments of products in fp8 (`--fp8-format`, `--fp8-recipe`, `--fp8-param-gather`).

Source: megatron/training/arguments.py (validate_args) and core/transformer/transformer_config.py,
NVIDIA/Megatron-LM at d98e8a64.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from memcalc.megatron.fp8 import RECIPES

if TYPE_CHECKING:
    from memcalc.formats.found import Value
    from memcalc.formats.megatron_section import Arguments

_FORMATS: Final = ("--fp8-format", "--fp8-hybrid", "--fp8-e4m3")
_OTHERS: Final = (
    "--fp8-dot-product-attention", "--fp8-multi-head-attention", "--fp8-output-proj", "--use-megatron-fsdp", "--use-torch-fsdp2",
    "--optimizer-cpu-offload", "--use-precision-aware-optimizer", "--fine-grained-activation-offloading", "--freeze-all-layers",
)  # fmt: skip
"""Options that change what is kept in fp8, or that are not modelled with it."""
_UNCOUNTED: Final = {
    "--moe-router-padding-for-fp8": "rows of experts are counted as copied to be padded",
    "--moe-router-padding-for-quantization": "rows of experts are counted as copied to be padded",
    "--tp-comm-overlap": "its products are counted as those of layers that gather with NCCL",
}


def format_of(a: Arguments) -> str | None:
    """Return the option that turns fp8 on; None without it."""
    return next((key for key in _FORMATS if a.given(key)), None)


def fp8_of(a: Arguments, notes: list[str]) -> dict[str, Value] | None:
    """Return the options of products in fp8 beside --bf16; None if fp8 is on in a way that is not modelled."""
    key = format_of(a)
    recipe = a.choice("--fp8-recipe", (*RECIPES, "custom")) or "delayed"
    gathers = a.on("--fp8-param-gather")
    whole = a.on("--use-distributed-optimizer") and recipe != "mxfp8"
    others = [option for option in _OTHERS if a.given(option)]
    others += ["--optimizer"] if a.given("--optimizer", ("adam", "sgd", "lion")) else []
    others += ["--transformer-impl"] if a.given("--transformer-impl", ("transformer_engine",)) else []
    if key is None or not a.on("--bf16") or recipe not in RECIPES or others or (gathers and not whole):
        return None
    out = {"fp8_recipe": a.value("--fp8-recipe" if "--fp8-recipe" in a else key, recipe)}
    if gathers:
        out["fp8_param_gather"] = a.value("--fp8-param-gather", True)
    notes += [f"{option}: {text}" for option, text in _UNCOUNTED.items() if a.given(option)]
    return out
