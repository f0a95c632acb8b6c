"""LoRA as peft runs it: two thin matrices beside a frozen linear layer (peft/tuners/lora/layer.py, Linear).

The input is cast to the adapter's dtype, so with fp32 adapters over a 16-bit base every adapted layer keeps an fp32 copy of
its input. The layer's own output is cast back behind the sum.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from memcalc.core.dims import Dim
from memcalc.core.dtypes import fp32
from memcalc.core.ops.elementwise import add, cast, dropout, scale
from memcalc.core.ops.shape import clone
from memcalc.families.base.dropouts import passed
from memcalc.families.base.module import BASE, Weight

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from memcalc.core.dtypes import DType
    from memcalc.core.tensor import Tensor
    from memcalc.families.base.linear_modules import Place
    from memcalc.families.base.module import LinearCall, Module
    from memcalc.tuning.chosen import Lora
    from memcalc.tuning.experts import FusedAdapter

COMPONENT: Final = "adapters"
COPIES: Final = "modules to save"
ORIGINALS: Final = "originals of modules to save"
DOWN: Final = "lora_A.default"
UP: Final = "lora_B.default"
DROPOUT: Final = "lora_dropout.default"


@dataclass(frozen=True)
class LoraAdapters:
    """The adapters of a model."""

    how: Lora
    calls: Mapping[Place, LinearCall]
    """The adapted linear layers."""
    saved: frozenset[Place] = frozenset()
    """The modules that train as copies of themselves."""
    parameters: Mapping[Place, tuple[FusedAdapter, ...]] = field(
        default_factory=dict["Place", "tuple[FusedAdapter, ...]"]
    )
    """The adapters of single parameters, by their module (`memcalc.tuning.experts`)."""

    @property
    def of_experts(self) -> bool:
        """Tell whether experts that are one parameter have an adapter; a router alone is a matrix."""
        return any(len(adapter.shape) > 2 for own in self.parameters.values() for adapter in own)

    def has(self, path: str, layer: int | None) -> bool:
        return (path, layer) in self.calls

    def saves(self, path: str, layer: int | None) -> bool:
        return (path, layer) in self.saved

    def of_layers(self, numbers: Mapping[int | None, int | None]) -> LoraAdapters:
        """Return the adapters of some layers only, which get other numbers: {number: its new one}."""
        calls = {(path, numbers[layer]): call for (path, layer), call in self.calls.items() if layer in numbers}
        saved = frozenset((path, numbers[layer]) for path, layer in self.saved if layer in numbers)
        own = {(path, numbers[layer]): one for (path, layer), one in self.parameters.items() if layer in numbers}
        return replace(self, calls=calls, saved=saved, parameters=own)

    def within(self, m: Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Run lora.ParamWrapper.forward."""
        own = self.parameters.get((m.path, m.layer))
        if own is None:
            return forward
        from memcalc.tuning.experts import merged

        def call(of: Any, m: Module, *args: Any, **kwargs: Any) -> Any:
            with merged(m, own):
                return forward(of, m, *args, **kwargs)

        return call

    def around(self, m: Module, x: Tensor, base: Callable[[Tensor], Tensor]) -> Tensor:
        """Run lora.Linear.forward, or that of a quantised layer."""
        if m.run.packing_of(m.weight()) is not None:
            return self._around_packed(m, x, base)
        with m:
            result = base(x)
            torch_result_dtype = result.dtype
            x = cast(x, (m / DOWN).weight().dtype, "input cast for the adapter")
            result = self.added(m, x, result)
            return cast(result, torch_result_dtype)

    def _around_packed(self, m: Module, x: Tensor, base: Callable[[Tensor], Tensor]) -> Tensor:
        """Run the forward of lora.Linear4bit or Linear8bitLt (peft/tuners/lora/bnb.py). The first copies the base's result, and
        under autocast both cast nothing themselves."""
        with m:
            result = self._of_packed(m, x, base)
            casts = m.memory.autocast is None
            x = cast(x, (m / DOWN).weight().dtype, "input cast for the adapter") if casts else x
            return self.added_to_packed(m, x, result, casts=casts)

    def _of_packed(self, m: Module, x: Tensor, base: Callable[[Tensor], Tensor]) -> Tensor:
        packing = m.run.packing_of(m.weight())
        assert packing is not None
        return clone(base(x)) if packing.copies_result else base(x)

    def added(self, m: Module, x: Tensor, result: Tensor) -> Tensor:
        """Return the layer's result with what the adapter of `m` makes of its input."""
        return add(result, scale((m / UP).linear((m / DOWN).linear(self.dropped(m, x))), "mul"))

    def added_to_packed(self, m: Module, x: Tensor, result: Tensor, *, casts: bool) -> Tensor:
        """Return the 4-bit layer's result with what the adapter of `m` makes of its input."""
        output = scale((m / UP).linear((m / DOWN).linear(self.dropped(m, x))), "mul")
        output = cast(output, result.dtype) if casts else output
        return add(result, output)

    @property
    def external(self) -> tuple[tuple[str, str], ...]:
        """Return the adapters' modules that use weights of other modules, with these weights: an adapted layer asks for the
        dtype of its first thin matrix, which it casts its input to."""
        return tuple((path, f"{path}.{DOWN}.weight") for path in dict.fromkeys(path for path, _ in self.calls))

    def dropped(self, m: Module, x: Tensor) -> Tensor:
        with m / DROPOUT:
            out = dropout(x, self.how.dropout)
            return out if x.memory.visitor is None else passed(out, x)

    def weights(self, place: Place) -> Iterator[Weight]:
        """Yield the matrices of an adapter."""
        path, layer = place
        call, rank, dtype = self.calls[place], Dim("rank", self.how.rank), self.dtype
        yield Weight(f"{path}.{DOWN}.weight", (rank, call.fan_in), COMPONENT, layer, dtype)
        yield Weight(f"{path}.{UP}.weight", (call.fan_out, rank), COMPONENT, layer, dtype)

    def weights_of_parameters(self, place: Place) -> Iterator[Weight]:
        """Yield the matrices of the adapters of a module's own parameters, the innermost wrapper's first."""
        (path, layer), own = place, self.parameters[place]
        for i, adapter in enumerate(own):
            yield from adapter.weights(path + f".{BASE}" * (len(own) - 1 - i), layer, COMPONENT, self.dtype)

    @property
    def dtype(self) -> DType | None:
        """Return the dtype of the matrices if it is not the base's."""
        return fp32 if self.how.dtype == "fp32" else None

    def trains(self, weight: Weight) -> bool:
        """Tell whether a weight of the adapted model trains."""
        if weight.component in (COMPONENT, COPIES):
            return True
        if weight.component == ORIGINALS:
            return False
        if not weight.name.endswith(".bias"):
            return False
        return self.how.bias == "all" or (self.how.bias == "lora_only" and weight.name.endswith(f".{BASE}.bias"))
