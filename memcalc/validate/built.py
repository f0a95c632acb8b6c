# pyright: basic
"""The model of a setup that `reference.build` does not make: a base in 8 bits or in codes of shards, packed rows, noise."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from memcalc.validate import eight_bit, sharded_codes
from memcalc.validate.packed import FLASH
from memcalc.validate.quantized import four_bit_products_of_cuda
from memcalc.validate.reference import Job, build
from memcalc.validate.special import has_other_codes
from memcalc.validate.tuning import require_input_grads, tune

if TYPE_CHECKING:
    from torch.nn import Module

    from memcalc.inputs.model import Model
    from memcalc.setup.setup import Setup


def codes_of(setup: Setup) -> ModuleType | None:
    """Return the module that quantises a base: of 8 bits, or of shards; None if `reference.build` does it, or nothing is
    quantised."""
    if not has_other_codes(setup):
        return None
    return eight_bit if setup.quantize == "int8" else sharded_codes


def built(setup: Setup, of: Model, fields: dict[str, Any]) -> Module:
    """Return the model with the setup's precision, attention, recomputation, codes, noise and what trains."""
    codes = codes_of(setup)
    plain = setup._replace(attention="sdpa") if setup.attention == "flash" else setup
    if codes is None:
        model: Any = build(plain, of, fields)
    else:
        model = codes.quantize(build(_untuned(plain), of.whole, fields), setup)
        model = tune(model, setup, of.program)
        if setup.input_require_grads:
            require_input_grads(model, setup)
    if setup.attention == "flash":
        model.config._attn_implementation = FLASH
    if setup.neftune_alpha is not None:
        from transformers.integrations.neftune import activate_neftune

        activate_neftune(model, setup.neftune_alpha)
    return model


def _untuned(setup: Setup) -> Setup:
    """Return the setup of the base before it is quantised."""
    return setup._replace(
        quantize="none", prepare_kbit_training=False, lora_rank=0, freeze=None, input_require_grads=False
    )


@contextlib.contextmanager
def products(setup: Setup) -> Iterator[None]:
    """Let products with codes allocate what they do on CUDA within a block, and peft's dequantisation too."""
    codes = codes_of(setup)
    with contextlib.ExitStack() as stack:
        stack.enter_context((eight_bit.products_of_cuda if codes is eight_bit else four_bit_products_of_cuda)(setup))
        if codes is not None and setup.dora:
            import peft.tuners.lora.dora

            stack.enter_context(
                patch.object(peft.tuners.lora.dora, "dequantize_module_weight", codes.dequantized_on_cuda)
            )
        yield


class JobWithScales(Job):
    """A job whose layers keep scales beside codes."""

    def scales(self) -> list[Any]:
        return [t for module in self.modules for codes in (eight_bit, sharded_codes) for t in codes.scales(module)]

    def parameters(self) -> list[Any]:
        return [*(p for module in self.modules for p in module.parameters()), *self.scales()]
