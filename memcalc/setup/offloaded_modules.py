"""The modules whose saved tensors Megatron moves to the host (core/transformer/transformer_config.py, offload_modules)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcalc.inputs.options import NOT_YET, refuse
from memcalc.megatron.layout import OF_EXPERTS, OFFLOADED

if TYPE_CHECKING:
    from memcalc.inputs.model import Model
    from memcalc.inputs.options import Options

_FIELD = "offload_modules"


def with_offloaded(options: Options, engine: str, model: Model | None) -> Options:
    """Return options whose modules are each named once, in one order. Raises InputError for names that Megatron does not have,
    for modules that the model does not have, and for what it refuses or is not modelled."""
    given = str(options.offload_modules)
    if engine != "megatron":
        refuse(_FIELD, given, "needs --engine megatron; allowed: leave it out")
    names = {name.strip() for name in given.split(",")}
    if not names <= {*OFFLOADED}:
        refuse(_FIELD, given, f"allowed: names with commas, of {', '.join(OFFLOADED)}")
    if "attn_proj" in names and "core_attn" not in names:
        refuse(
            _FIELD,
            given,
            "the input of attn_proj is the output of core_attn, which that saves too; allowed: with core_attn",
        )
    _check_recomputation(options, names, given)
    if model is not None:
        _check_model(names, given, model)
    return options._replace(offload_modules=",".join(name for name in OFFLOADED if name in names))


def _check_recomputation(options: Options, names: set[str], given: str) -> None:
    if options.recompute == "full":
        refuse("recompute", "full", f"with --offload-modules {given} {NOT_YET}none, selective")
    if options.recompute != "selective":
        return
    again = {*(options.recompute_modules or "core_attn").split(",")}
    if "core_attn" in names & again:
        refuse(
            _FIELD,
            given,
            "with core_attn recomputed " + NOT_YET + "without core_attn, or --recompute-modules without it",
        )
    if "moe" in again and names & {*OF_EXPERTS}:
        refuse(_FIELD, given, f"with moe recomputed {NOT_YET}without {', '.join(OF_EXPERTS)}")
    if "mla_up_proj" in again and "qkv_linear" in names and not names & {"attn_norm", "core_attn"}:
        why = "Megatron-Core fails: what mla_up_proj needs is asked for before a group has said whose it is"
        refuse(_FIELD, given, f"{why}; allowed: with core_attn")


def _check_model(names: set[str], given: str, model: Model) -> None:
    from memcalc.families.base.architecture import architecture_of

    if model.support.architecture is None:
        return
    a = architecture_of(model.model_type, model.program.config)
    of_experts = sorted(names & {*OF_EXPERTS})
    if of_experts and a.experts is None:
        refuse(_FIELD, given, f"this {model.model_type} has no experts; allowed: without {', '.join(of_experts)}")
    own = sorted(names & {"attn_norm", "qkv_linear"})
    if own and a.latent is None:
        why = "the norm before attention is a part of its projection then, what they save"
        refuse(
            _FIELD, given, f"this {model.model_type} has no latent attention: {why} {NOT_YET}without {', '.join(own)}"
        )
