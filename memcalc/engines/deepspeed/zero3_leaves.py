"""Modules that DeepSpeed's ZeRO-3 gathers whole, whatever is in them (deepspeed/utils/z3_leaf_module.py).

The default configuration names three classes of transformers (`zero_optimization: {leaf_module}`,
runtime/zero/leaf_module_config.py). Nothing in such a module has hooks. All its parameters are gathered and freed with
it, and their gradients are reduced one after the other when its backward is over.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memcalc.core.noted import Where
    from memcalc.inputs.model import Model


def leaf_modules(model: Model) -> frozenset[Where]:
    """Return a model's leaf modules, by path and layer. AutoEP replaces them with another block, which is no leaf."""
    if not model.support.zero3_leaf or model.program.expert_parallel > 1:
        return frozenset()
    experts = (w for w in model.program.weights() if w.component == "experts")
    return frozenset((w.name.rpartition(".experts.")[0], w.layer) for w in experts)
