"""Stand-ins for a module's own forward: adapters, packed weights, an engine's hooks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from memcalc.core.dims import Dim, Shape
    from memcalc.core.dtypes import DType
    from memcalc.core.tensor import Tensor
    from memcalc.families.base.module import Module, Run
    from memcalc.families.base.program import Program


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

    def of_layers(self, numbers: Mapping[int | None, int | None]) -> Adapters:
        """Return the adapters of some layers only, which get other numbers: {number: its new one}."""
        ...

    def around(self, m: Module, x: Tensor, base: Callable[[Tensor], Tensor]) -> Tensor:
        """Run the adapted module `m`, whose own layer is `base`."""
        ...

    def within(self, m: Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return the forward of the module `m` that has its adapted parameters in the place of its own."""
        ...


class Cache(Protocol):
    """The tensors that layers keep of the tokens that they have seen (`memcalc.inference`)."""

    seen: int
    """The tokens of each sequence that the cache has seen."""
    is_compileable: bool
    """True if all sizes stay as they are: masks are then made for single tokens too."""

    def update(self, m: Module, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        """Keep the keys and values of new tokens in the layer of `m`. Returns those that the layer attends to."""
        ...

    def encoded(self, m: Module) -> tuple[Tensor, Tensor] | None:
        """Return the keys and values of the encoder's tokens in the decoder's layer of `m`; None before they are there."""
        ...

    def encode(self, m: Module, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        """Keep the keys and values of the encoder's tokens."""
        ...

    def state(self, m: Module, name: str) -> Tensor | None:
        """Return a state that the layer of `m` keeps; None before its first update."""
        ...

    def update_conv_state(self, m: Module, x: Tensor, kernel: Dim) -> Tensor:
        """Keep the last inputs of a convolution, x (batch, channels, seq). Returns them, padded to the kernel's width."""
        ...

    def update_state(self, m: Module, name: str, new: Tensor) -> None:
        """Copy a new state into the one that the layer of `m` keeps."""
        ...

    def keep_state(self, m: Module, name: str, new: Tensor) -> None:
        """Keep a new state itself in the place of the old one."""
        ...

    def fill_states(self, run: Run, program: Program, prompt: int) -> None:
        """Allocate the states of all layers, as they are after the tokens so far, `prompt` of which came at once."""
        ...

    def keys_in_mask(self, queries: Dim, *, windowed: bool) -> Dim:
        """Return the keys that a mask of full or of windowed layers covers (`get_mask_sizes`)."""
        ...

    def length_and(self, run: Run, tokens: Dim) -> Tensor | None:
        """Run `get_seq_length() + tokens`: a tensor if the length is one, None if both are numbers."""
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
