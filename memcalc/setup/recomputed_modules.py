"""The modules that Megatron's selective recomputation runs again (core/transformer/transformer_config.py, recompute_modules)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcalc.inputs.options import refuse
from memcalc.megatron.layout import MODULES

if TYPE_CHECKING:
    from memcalc.inputs.model import Model
    from memcalc.inputs.options import Options

_FIELD = "recompute_modules"


def with_modules(options: Options, engine: str, model: Model | None) -> Options:
    """Return options whose modules are each named once, in one order; None for core attention alone. Raises InputError for
    names that Megatron does not have, and for modules that the model does not have."""
    given = str(options.recompute_modules)
    if engine != "megatron":
        refuse(_FIELD, given, "needs --engine megatron; allowed: leave it out")
    if options.recompute != "selective":
        refuse(_FIELD, given, "needs --recompute selective; allowed: leave it out")
    names = {name.strip() for name in given.split(",")}
    if not names <= {*MODULES}:
        refuse(_FIELD, given, f"allowed: names with commas, of {', '.join(MODULES)}")
    if model is not None:
        _check_model(names, given, model)
    written = ",".join(name for name in MODULES if name in names)
    return options._replace(recompute_modules=None if written == "core_attn" else written)


def _check_model(names: set[str], given: str, model: Model) -> None:
    from memcalc.families.base.architecture import architecture_of

    if model.support.architecture is None:
        return
    a = architecture_of(model.model_type, model.program.config)
    of_experts = sorted(names & {"moe", "moe_act", "shared_experts"})
    if of_experts and a.experts is None:
        refuse(
            _FIELD,
            given,
            f"this {model.model_type} has no experts to recompute; allowed: without {', '.join(of_experts)}",
        )
    if "mla_up_proj" in names and a.latent is None:
        refuse(_FIELD, given, f"this {model.model_type} has no latent attention; allowed: without mla_up_proj")
