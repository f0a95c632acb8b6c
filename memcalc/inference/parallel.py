"""A rank's part of a model for inference: heads and widths cut by tensor parallelism, layers by a pipeline, experts by ranks.

Tensor parallelism cuts as transformers' plan does (`memcalc.layout.tensor_parallel`), and attention through latents by its
heads, as vLLM and SGLang do. Keys and values of fewer heads than ranks are repeated, one head on each rank. A latent is whole on
every rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from memcalc.errors import InputError

if TYPE_CHECKING:
    from memcalc.families.base.plans import Plan
    from memcalc.families.base.program import Program
    from memcalc.inference.options import Asked
    from memcalc.inputs.model import Model


class Stage(NamedTuple):
    """The layers of one pipeline stage, and whether it has the embeddings and the head."""

    layers: range
    first: bool
    last: bool


def rank_program(model: Model, asked: Asked) -> Program:
    """Return the program of one tensor-parallel rank. Raises InputError if the model cannot be cut like that."""
    check_experts(model, asked.ep)
    if asked.tp == 1:
        return model.program
    from memcalc.layout.tensor_parallel import split, split_dims

    plan = plan_of(model, asked.tp)
    program: Any = model.program
    for name in split_dims(program, plan):
        size, tp = getattr(program, name).size, asked.tp
        repeated = name == "kv_heads" and tp % size == 0
        if name != "vocab" and size % tp and not repeated:
            raise InputError(f"--tp {tp}: does not divide the {size} {_WORDS[name]} of {model.name}")
    if "moe_tp_experts" in plan.values() and getattr(program, "experts", None) is not None:
        width = program.experts.ffn.size
        if width % asked.tp:
            raise InputError(f"--tp {asked.tp}: does not divide the experts' width {width} of {model.name}")
    return split(program, plan, asked.tp)


_WORDS = {
    "heads": "attention heads", "kv_heads": "key/value heads", "ffn": "columns of the MLP",
    "shared_ffn": "columns of the shared experts",
}  # fmt: skip


def plan_of(model: Model, tp: int) -> Plan:
    """Return the plan of a model. Raises InputError for a type whose plan is not modelled."""
    plan = model.support.tensor_parallel
    if not plan or model.support.tensor_parallel_fails is not None:
        raise InputError(f"--tp {tp}: tensor parallelism of a {model.model_type} is not modelled; allowed: 1")
    if not any(path.endswith("o_proj") or path.endswith("dense") for path in plan) and model.program.caches_latents:
        from memcalc.families.base.plans import SPLIT_LATENT

        return {**plan, **SPLIT_LATENT}
    if not any("self_attn" in path for path in plan):
        raise InputError(f"--tp {tp}: transformers' plan for a {model.model_type} leaves attention whole; allowed: 1")
    return plan


def check_experts(model: Model, ep: int) -> None:
    """Raise InputError if `ep` ranks cannot share the experts evenly."""
    experts = model.program.routed[1]
    if ep > 1 and experts == 1:
        raise InputError(f"--ep {ep}: {model.name} has no routed experts; allowed: 1")
    if experts % ep:
        raise InputError(f"--ep {ep}: does not divide the {experts} experts of {model.name}")


def stages_of(model: Model, pp: int) -> list[Stage]:
    """Return the stages of a pipeline, each with as many layers. Raises InputError if the layers do not divide."""
    layers = model.layers
    if pp == 1:
        return [Stage(range(layers), True, True)]
    if not model.program.one_stack:
        raise InputError(f"--pp {pp}: a {model.model_type} has two stacks of layers, whose stages are not modelled; allowed: 1")
    if model.program.layers_share:
        raise InputError(f"--pp {pp}: layers of a {model.model_type} share weights; allowed: 1")
    if layers % pp:
        raise InputError(f"--pp {pp}: does not divide the {layers} layers of {model.name}")
    size = layers // pp
    return [Stage(range(i * size, (i + 1) * size), i == 0, i == pp - 1) for i in range(pp)]
