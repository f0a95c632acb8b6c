"""DoRA as peft runs it: LoRA whose sum with the layer's weight is scaled, output by output, to a length that trains.

The length that the sum has by itself is computed in each forward, from the whole product of the two thin matrices and, over
a 16-bit base with fp32 adapters, from an fp32 copy of the layer's weight. Sources: peft/tuners/lora/dora.py
(DoraLinearLayer), peft/tuners/lora/variants.py (DoraLinearVariant).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from memcalc.core.dims import ONE_DIM
from memcalc.core.ops.elementwise import add, cast, mul, over, scale, sub
from memcalc.core.ops.matmul import linear
from memcalc.core.ops.norm import lengths
from memcalc.core.ops.shape import transpose, view
from memcalc.core.ops.work import streams
from memcalc.core.tensor import Tensor, new_tensor
from memcalc.families.base.module import BASE, Weight
from memcalc.tuning.lora import COMPONENT, DOWN, UP, LoraAdapters

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memcalc.core.dims import Dim
    from memcalc.core.dtypes import DType
    from memcalc.families.base.linear_modules import Place
    from memcalc.families.base.module import Module

MAGNITUDE: Final = "lora_magnitude_vector.default"


class DoraAdapters(LoraAdapters):
    """Adapters that have a magnitude for each output of their layer."""

    def weights(self, place: Place) -> Iterator[Weight]:
        yield from super().weights(place)
        path, layer = place
        yield Weight(f"{path}.{MAGNITUDE}.weight", (self.calls[place].fan_out,), COMPONENT, layer, self.dtype)

    @property
    def external(self) -> tuple[tuple[str, str], ...]:
        """Return what a magnitude's module reads without calling its owner: the layer's weight and bias, and the first
        thin matrix, whose shape it asks for."""
        read = [f"{DOWN}.weight", f"{BASE}.weight"]
        bias = [] if self.how.dropout else [f"{BASE}.bias"]
        paths = dict.fromkeys(path for path, _ in self.calls)
        own = tuple((f"{path}.{MAGNITUDE}", f"{path}.{name}") for path in paths for name in (*read, *bias))
        return (*super().external, *own)

    def added(self, m: Module, x: Tensor, result: Tensor) -> Tensor:
        """Run DoraLinearVariant.forward. Dropped inputs need a result of the layer of their own."""
        base_result = None if self.how.dropout else result
        x = self.dropped(m, x)
        return add(result, self._scaled(m, x, base_result))

    def added_to_packed(self, m: Module, x: Tensor, result: Tensor, *, casts: bool) -> Tensor:
        expected_dtype = result.dtype
        result = self.added(m, x, result)
        return cast(result, expected_dtype) if casts else result

    def _scaled(self, m: Module, x: Tensor, base_result: Tensor | None) -> Tensor:
        """Run DoraLinearLayer.forward: what comes on top of the layer's own output."""
        fan_out = self.calls[m.path, m.layer].fan_out
        with m / MAGNITUDE:
            lora_weight = _cast(_product(m), x.dtype, "cast of the product")
            magnitude = (m / MAGNITUDE).weight()
            weight = _cast(_dequantized(m), x.dtype, "copy of the weight")
            weight_norm = _norm(_outputs_first(weight, fan_out), lora_weight)
            mag_norm_scale = view(over(magnitude, weight_norm), ONE_DIM, fan_out)
            lora_result = (m / UP).linear((m / DOWN).linear(x))
            if base_result is None:
                base_result = linear(x, _outputs_first(weight, fan_out))
            else:
                bias = m.optional("bias")
                base_result = base_result if bias is None else sub(base_result, bias)
            return add(mul(scale(mag_norm_scale, "sub"), base_result), scale(mul(mag_norm_scale, lora_result), "mul"))


def _dequantized(m: Module) -> Tensor:
    """Return the layer's weight, of a quantised one a copy (dequantize_module_weight in peft/utils/integrations.py)."""
    weight = m.weight()
    packing = m.run.packing_of(weight)
    return weight if packing is None else packing.dequantized(weight)


def _outputs_first(weight: Tensor, fan_out: Dim) -> Tensor:
    """Return the weight as nn.Linear has it; a Conv1D has it the other way around (fan_in_fan_out)."""
    return weight if weight.shape[0].size == fan_out.size else transpose(weight, 0, 1)


def _cast(a: Tensor, dtype: DType, name: str) -> Tensor:
    out = cast(a, dtype, name)
    if out is not a:
        streams(name, a, out)
    return out


def _product(m: Module) -> Tensor:
    """Return the product of the thin matrices as the modules compute it, of the rows of an identity (get_lora_weight)."""
    down = (m / DOWN).weight()
    fan_in: Dim = down.shape[1]
    x_eye = new_tensor(m.memory, (fan_in, fan_in), down.dtype, "identity")
    streams("identity", x_eye)
    return transpose((m / UP).linear((m / DOWN).linear(x_eye)), 0, 1)


def _norm(weight: Tensor, lora_weight: Tensor) -> Tensor:
    """Return the length of each row of the sum, which requires no gradient (get_weight_norm)."""
    detached = Tensor(lora_weight.storage, lora_weight.shape, lora_weight.strides, lora_weight.dtype)
    scaled = scale(detached, "mul")
    streams("mul", detached, scaled)
    summed = add(weight, scaled)
    streams("add", weight, scaled, summed)
    del scaled
    out = lengths(summed)
    streams("lengths of rows", summed, out)
    return cast(out, summed.dtype)
