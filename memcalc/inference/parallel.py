"""A rank's part of a model for inference: heads and widths cut by tensor parallelism, layers by a pipeline, experts by ranks.

Tensor parallelism cuts as transformers' plan does (`memcalc.layout.tensor_parallel`), and attention through latents by its
heads, as vLLM and SGLang do. Keys and values of fewer heads than ranks are repeated, one head on each rank. A latent is whole on
every rank.
"""

from __future__ import annotations

from dataclasses import replace
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
    check_experts(model, asked)
    if asked.tp == 1:
        return model.program
    from memcalc.layout.tensor_parallel import part, split, split_dims

    plan = plan_of(model, asked.tp)
    program: Any = model.program
    width = expert_width_ranks(asked)
    if asked.ep > 1:
        plan = without_experts(program, plan)
    for name in split_dims(program, plan):
        size, tp = getattr(program, name).size, asked.tp
        repeated = name == "kv_heads" and tp % size == 0
        if name != "vocab" and size % tp and not repeated:
            raise InputError(
                f"--tp {tp}: does not divide the {size} {_WORDS[name]} of {model.name}; allowed: a divisor of {size}"
            )
    if "moe_tp_experts" in plan.values() and getattr(program, "experts", None) is not None:
        check_width(model, width)
    own: Any = split(program, plan, asked.tp)
    if asked.ep > 1 and width > 1:
        from memcalc.layout.split_experts import SplitExperts

        check_width(model, width)
        own.experts = SplitExperts(program.experts, replace(program.experts, ffn=part(program.experts.ffn, width)))
    return own


def expert_width_ranks(asked: Asked) -> int:
    """Return the ranks that share one expert's width. Ranks that share experts are the tensor-parallel ones, and more of them
    replicas of the attention, as in vLLM and SGLang."""
    return max(1, asked.tp // asked.ep)


def without_experts(program: Program, plan: Plan) -> Plan:
    """Return a plan that leaves the routed experts whole."""
    from memcalc.layout.expert_parallel import expert_path

    path = expert_path(program)
    return {name: style for name, style in plan.items() if not f"{name}.".startswith(f"{path}.")}


def check_width(model: Model, ranks: int) -> None:
    """Raise InputError if `ranks` ranks cannot share the width of an expert."""
    program: Any = model.program
    width = program.experts.ffn.size
    if width % ranks:
        raise InputError(f"--tp {ranks}: does not divide the experts' width {width} of {model.name}")


_WORDS = {
    "heads": "attention heads", "kv_heads": "key/value heads", "ffn": "columns of the MLP",
    "shared_ffn": "columns of the shared experts",
}  # fmt: skip


def plan_of(model: Model, tp: int) -> Plan:
    """Return the plan of a model. Raises InputError for a type whose plan is not modelled."""
    plan = model.support.tensor_parallel
    if not plan or model.support.tensor_parallel_fails is not None:
        raise InputError(f"--tp {tp}: tensor parallelism of a {model.model_type} is not modelled; allowed: 1")
    if not any(path.endswith(("o_proj", "dense")) for path in plan) and model.program.caches_latents:
        from memcalc.families.base.plans import SPLIT_LATENT

        return {**plan, **SPLIT_LATENT}
    if not any("self_attn" in path for path in plan):
        raise InputError(f"--tp {tp}: transformers' plan for a {model.model_type} leaves attention whole; allowed: 1")
    return plan


def check_experts(model: Model, asked: Asked) -> None:
    """Raise InputError if the ranks cannot share the experts evenly."""
    experts, ep, tp = model.program.routed[1], asked.ep, asked.tp
    if ep > 1 and experts == 1:
        raise InputError(f"--ep {ep}: {model.name} has no routed experts; allowed: 1")
    if experts % ep:
        raise InputError(
            f"--ep {ep}: does not divide the {experts} experts of {model.name}; allowed: a divisor of {experts}"
        )
    if max(ep, tp) % min(ep, tp):
        raise InputError(
            f"--ep {ep}: the ranks are those of --tp {tp} or replicas of them; allowed: a divisor or a multiple of {tp}"
        )


def stages_of(model: Model, pp: int) -> list[Stage]:
    """Return the stages of a pipeline, each with as many layers. Raises InputError if the layers do not divide."""
    layers = model.layers
    if pp == 1:
        return [Stage(range(layers), True, True)]
    if not model.program.one_stack:
        raise InputError(
            f"--pp {pp}: a {model.model_type} has two stacks of layers, whose stages are not modelled; allowed: 1"
        )
    if model.program.layers_share:
        raise InputError(f"--pp {pp}: layers of a {model.model_type} share weights; allowed: 1")
    if layers % pp:
        raise InputError(
            f"--pp {pp}: does not divide the {layers} layers of {model.name}; allowed: a divisor of {layers}"
        )
    size = layers // pp
    return [Stage(range(i * size, (i + 1) * size), i == 0, i == pp - 1) for i in range(pp)]
