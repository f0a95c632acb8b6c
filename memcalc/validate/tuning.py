# pyright: basic
"""The choice of what trains, made on the real module."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memcalc.tuning.parts import full_name

if TYPE_CHECKING:
    from torch.nn import Module

    from memcalc.families.base.program import Program
    from memcalc.setup.setup import Setup


def freeze(module: Module, program: Program) -> None:
    """Freeze the weights of a module that want no gradient in the program."""
    if not program.held:
        return
    wants = {full_name(weight): program.wants_gradient(weight) for weight in program.weights()}
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(wants[name])


def require_input_grads(module: Any, setup: Setup) -> None:
    """Let the output of the embeddings want a gradient, or not. transformers' switch of checkpointing has let it."""
    if setup.input_require_grads:
        module.enable_input_require_grads()
    elif setup.recompute != "none":
        module.disable_input_require_grads()
