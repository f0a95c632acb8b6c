"""Stand-ins for a module's own forward: adapters, packed weights, an engine's hooks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from memcalc.core.dims import Shape
    from memcalc.core.dtypes import DType
    from memcalc.core.tensor import Tensor
    from memcalc.families.base.module import Module


class Stored(NamedTuple):
    """A tensor of those that hold a quantised weight. The `name` follows the weight's; the codes have none."""

    name: str
    shape: Shape
    dtype: DType


class Packing(Protocol):
    """A way to keep the weight of a frozen linear layer in fewer bits (`memcalc.quantized`)."""

    source: str
    """The source of what is stored."""
    copies_result: bool
    """True if peft copies the layer's result before it adds an adapter's."""

    def stored(self, shape: Shape) -> tuple[Stored, ...]:
        """Return the tensors that hold a weight of this shape; the first one has its codes."""
        ...

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Run the linear layer: x (..., in), weight (out, in), bias (out) -> (..., out)."""
        ...

    def dequantized(self, weight: Tensor) -> Tensor:
        """Return a copy of the weight in the dtype that it had."""
        ...


class Adapters(Protocol):
    """Adapters around linear layers, and copies of modules that train in their place (`memcalc.tuning.lora`)."""

    def has(self, path: str, layer: int | None) -> bool:
        """Tell whether the linear layer at `path` has an adapter."""
        ...

    def saves(self, path: str, layer: int | None) -> bool:
        """Tell whether a copy takes the place of the module at `path`."""
        ...

    def around(self, m: Module, x: Tensor, base: Callable[[Tensor], Tensor]) -> Tensor:
        """Run the adapted module `m`, whose own layer is `base`."""
        ...


class Hooks(Protocol):
    """An engine's actions around a model and its layers while they run."""

    def before_forward(self) -> None: ...

    def layer(self, forward: Callable[..., Any], m: Module, *args: Any) -> Any:
        """Run a layer's forward, with the engine's actions before and after it."""
        ...

    def after_forward(self, loss: Tensor) -> Tensor: ...

    def after_backward(self) -> None:
        """Run backward's last callback, within backward."""
        ...

    def backward_is_over(self) -> None: ...
