"""Programs whose linear layers have quantised weights."""

from __future__ import annotations

import copy
from functools import cache
from typing import TYPE_CHECKING, Any

from memcalc.families.base.linear_modules import linear_modules
from memcalc.families.base.program import Program
from memcalc.quantized.chosen import EightBits
from memcalc.quantized.eight_bit import EightBit
from memcalc.quantized.four_bit import FourBit
from memcalc.quantized.left_behind import kept_by_graph
from memcalc.quantized.targets import quantized_places

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from memcalc.core.tensor import Tensor
    from memcalc.families.base.linear_modules import Place
    from memcalc.families.base.module import Run, Weight
    from memcalc.quantized.chosen import Quantization


class _Quantized(Program):
    """The base of the classes that `_quantized_class` makes: what quantisation changes of a program."""

    packed: Mapping[Place, FourBit | EightBit]

    def weights(self) -> Iterator[Weight]:
        """Yield the base's weights; those of quantised layers say how they are kept. Their biases take a dtype in the first
        forward (bitsandbytes/nn/modules.py)."""
        for weight in super().weights():
            path, _, name = weight.name.rpartition(".")
            packing = self.packed.get((path, weight.layer))
            if packing is None:
                yield weight
            elif name == "weight":
                yield weight._replace(packing=packing)
            else:
                yield weight._replace(dtype=packing.bias_dtype or weight.dtype)


class _KeepsInputs(_Quantized):
    """A program whose layers of 8 bits keep their inputs as long as the loss is alive."""

    def left_behind(self, run: Run) -> list[Tensor]:
        """Return what the graph of the previous step keeps: the inputs of its layers too."""
        return [*super().left_behind(run), *kept_by_graph(self, run)]


@cache
def _quantized_class(of: type[Program], base: type[_Quantized]) -> type[Program]:
    return type(f"Quantized{of.__name__}", (base, of), {})


def quantized(program: Program, model_type: str, how: Quantization | EightBits) -> Program:
    """Return a copy of the program that keeps the weights of the layers that transformers quantises in fewer bits."""
    places = quantized_places(program, model_type)
    if not isinstance(how, EightBits):
        return _with(program, _Quantized, dict.fromkeys(places, FourBit(*how)))
    of_run = {place: EightBit(call.fan_out, None) for place, call in places.items()}
    own = _with(program, _KeepsInputs, of_run)
    if how.autocast is None or not any(call.has_bias for call in places.values()):
        return own
    return _with(program, _KeepsInputs, _with_biases(own, of_run, how))


def with_quantized_weights(program: Program, packing: FourBit, packed: Iterable[Place]) -> Program:
    """Return a copy of the program that keeps the weights of these layers in 4 bits."""
    return _with(program, _Quantized, dict.fromkeys(packed, packing))


def _with_biases(
    program: Program, packed: Mapping[Place, EightBit], how: EightBits
) -> Mapping[Place, FourBit | EightBit]:
    """Return the packings with the dtypes of the layers' inputs under autocast, which need not be its own."""
    calls = linear_modules(program, how.weights, how.autocast)
    return {place: one._replace(bias_dtype=calls[place].dtype) for place, one in packed.items()}


def _with(program: Program, base: type[_Quantized], packed: Mapping[Place, FourBit | EightBit]) -> Program:
    own: Any = copy.copy(program)
    own.__class__ = _quantized_class(type(program), base)
    own.packed = packed
    return own
