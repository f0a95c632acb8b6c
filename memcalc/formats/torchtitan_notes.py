"""Notes on torchtitan's TOML: each key that memcalc does not model, with what is assumed instead."""

from __future__ import annotations

from typing import Final

from memcalc.formats.torchtitan_config import TitanConfig
from memcalc.formats.torchtitan_degrees import Degrees

_FLOAT8_SWITCHES: Final = (
    "float8.enable_float8_linear",
    "training.enable_float8_linear",
    "training.enable_fp8_linear",
)
_RMS_NORMS: Final = ("rmsnorm", "fused_rmsnorm", "compiled_rmsnorm")


def notes_of(config: TitanConfig, degrees: Degrees) -> list[str]:
    """Return a sentence for each of the keys."""
    return [*_compiled(config), *_low_precision(config), *_of_modules(config), *_others(config, degrees)]


def _compiled(config: TitanConfig) -> list[str]:
    on = config.flag("compile.enable", "training.compile")
    if not on.value:
        return []
    return [
        config.note(on, "torch.compile is not modelled, and eager code is assumed, which needs more memory and time")
    ]


def _low_precision(config: TitanConfig) -> list[str]:
    """Return notes on float8 and MX, which converters switch on since February 2025. A section alone does nothing."""
    estimate = "bf16 products are estimated: about the same memory, more time"
    model = config.section("model")
    notes = [
        config.note(model.value("converters", name), f"low precision is not modelled; {estimate}")
        for name in model.words("converters") or ()
    ]
    for path in _FLOAT8_SWITCHES:
        on = config.flag(path)
        if on.value:
            notes.append(config.note(on, f"float8 is not modelled; {estimate}"))
    section = config.section("training")
    kind = section.raw("fp8_linear")  # a word until July 2024, then a switch
    if kind not in (None, "", False):
        notes.append(config.note(section.value("fp8_linear", kind), f"float8 is not modelled; {estimate}"))
    return notes


def _of_modules(config: TitanConfig) -> list[str]:
    notes: list[str] = []
    model = config.section("model")
    norm = model.text("norm_type")
    if norm is not None and norm.lower() not in _RMS_NORMS:
        notes.append(config.note(model.value("norm_type", norm), "the RMSNorm of transformers' model is estimated"))
    flex = config.flag("model.use_flex_attn")
    if flex.value:
        notes.append(config.note(flex, "FlexAttention is estimated as sdpa"))
    recomputing = config.section("activation_checkpoint")
    names = recomputing.words("per_op_sac_force_recompute_mm_shapes_by_fqns") or ()
    if any(name != "moe.router.gate" for name in names):
        value = recomputing.value("per_op_sac_force_recompute_mm_shapes_by_fqns", ", ".join(names))
        notes.append(config.note(value, "is not modelled: every second product is kept, whatever its shape"))
    return notes


def _others(config: TitanConfig, degrees: Degrees) -> list[str]:
    notes: list[str] = []
    replicated = config.flag("fault_tolerance.enable")
    if replicated.value:
        notes.append(config.note(replicated, "TorchFT's groups are not modelled; one replica group is estimated"))
    deterministic = config.flag("debug.deterministic", "training.deterministic")
    if deterministic.value:
        notes.append(config.note(deterministic, "the kernels that torch runs by default are assumed"))
    balanced = config.flag("debug.moe_force_load_balance", "training.debug_moe_force_load_balance")
    if balanced.value and degrees.ep.value > 1:
        notes.append(config.note(balanced, "tokens are spread evenly, unless --expert-imbalance says otherwise"))
    early = config.flag("training.enable_selective_ac")
    if early.value:
        notes.append(config.note(early, "is a policy of early 2024: that of activation_checkpoint.mode is assumed"))
    return notes
