"""Programs whose linear layers have quantised weights."""

from __future__ import annotations

import copy
from functools import cache
from typing import TYPE_CHECKING, Any

from memcalc.families.base.program import Program

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memcalc.families.base.linear_modules import Place
    from memcalc.families.base.module import Weight
    from memcalc.quantized.four_bit import FourBit


class _Quantized(Program):
    """The base of the classes that `_quantized_class` makes: what quantisation changes of a program."""

    packing: FourBit
    packed: frozenset[Place]

    def weights(self) -> Iterator[Weight]:
        """Yield the base's weights; those of quantised layers say how they are kept. Their biases take the dtype of the
        computation in the first forward (bitsandbytes/nn/modules.py, Linear4bit.forward)."""
        for weight in super().weights():
            path, _, name = weight.name.rpartition(".")
            if (path, weight.layer) not in self.packed:
                yield weight
            elif name == "weight":
                yield weight._replace(packing=self.packing)
            else:
                yield weight._replace(dtype=self.packing.computes)


@cache
def _quantized_class(of: type[Program]) -> type[Program]:
    return type(f"Quantized{of.__name__}", (_Quantized, of), {})


def with_quantized_weights(program: Program, packing: FourBit, packed: frozenset[Place]) -> Program:
    """Return a copy of the program that keeps the weights of these layers in fewer bits."""
    own: Any = copy.copy(program)
    own.__class__ = _quantized_class(type(program))
    own.packing, own.packed = packing, packed
    return own
