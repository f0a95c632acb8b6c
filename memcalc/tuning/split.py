"""Adapters where ranks share the linear layers, as peft makes them over transformers' tensor-parallel plan.

Beside a layer that is split by columns the second matrix of an adapter is split by columns too, and the first one is whole on
every rank. Backward sums the gradient between the two over the ranks: it is as wide as the adapter's rank. Beside a layer that
is whole on every rank both matrices are whole. Source: peft/tuners/lora/model.py (get_tp_plan_and_mesh,
add_lora_tp_hooks_dtensor).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from memcalc.families.base.module import BASE
from memcalc.tuning.adapted import with_adapters
from memcalc.tuning.lora import UP, LoraAdapters

if TYPE_CHECKING:
    from memcalc.families.base.plans import Plan
    from memcalc.families.base.program import Program


def with_split_adapters(program: Program, adapters: Any) -> Program:
    """Return one rank's program (`memcalc.layout.tensor_parallel.split`) with its part of the whole model's adapters."""
    assert isinstance(adapters, LoraAdapters) and program.tensor_parallel is not None
    plan = program.tensor_parallel.plan
    shapes = {(weight.name, weight.layer): weight.shape for weight in program.weights()}
    calls = dict(adapters.calls)
    for (path, layer), call in calls.items():
        if plan.get(path) == "colwise":
            calls[path, layer] = call._replace(fan_out=shapes[f"{path}.weight", layer][0])
    own = with_adapters(program, replace(adapters, calls=calls))
    split = [path for path, _ in calls if plan.get(path) == "colwise"]
    of_parts: Plan = {f"{path}.{name}": "colwise" for path in split for name in (BASE, UP)}
    own.tensor_parallel = program.tensor_parallel._replace(plan=plan | of_parts)
    return own
