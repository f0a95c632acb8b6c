"""Layers without parameters: activations, dropout, and layers that only change the shape."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from memcalc.core.dims import merge
from memcalc.core.ops.elementwise import activation, dropout, sigmoid, softmax, tanh
from memcalc.core.ops.in_place import dropout_, relu_
from memcalc.core.ops.shape import reshape, select, transpose
from memcalc.families.base.config import Probability
from memcalc.families.base.layers.layer import Layer, of_rank, shown

if TYPE_CHECKING:
    from memcalc.core.dims import Shape
    from memcalc.core.tensor import Tensor
    from memcalc.families.base.module import Module


@dataclass(frozen=True, kw_only=True)
class ReLU(Layer):
    """nn.ReLU. It keeps its output."""

    kind: ClassVar[str] = "relu"
    torch: ClassVar[str] = "ReLU"
    main: ClassVar[str] = "inplace"
    positions: ClassVar[Sequence[str]] = ("inplace",)
    saves_output: ClassVar[bool] = True

    inplace: bool = False

    @property
    def is_in_place(self) -> bool:
        return self.inplace

    def run(self, m: Module, x: Tensor, out: Shape) -> Tensor:
        return relu_(x) if self.inplace else activation(x, "relu")


@dataclass(frozen=True, kw_only=True)
class Sigmoid(Layer):
    """nn.Sigmoid. It keeps its output."""

    kind: ClassVar[str] = "sigmoid"
    torch: ClassVar[str] = "Sigmoid"
    saves_output: ClassVar[bool] = True

    def run(self, m: Module, x: Tensor, out: Shape) -> Tensor:
        return sigmoid(x)


@dataclass(frozen=True, kw_only=True)
class Tanh(Layer):
    """nn.Tanh. It keeps its output."""

    kind: ClassVar[str] = "tanh"
    torch: ClassVar[str] = "Tanh"
    saves_output: ClassVar[bool] = True

    def run(self, m: Module, x: Tensor, out: Shape) -> Tensor:
        return tanh(x)


@dataclass(frozen=True, kw_only=True)
class GELU(Layer):
    """nn.GELU. It keeps its input."""

    kind: ClassVar[str] = "gelu"
    torch: ClassVar[str] = "GELU"
    main: ClassVar[str] = "approximate"
    positions: ClassVar[Sequence[str]] = ()
    saves_input: ClassVar[bool] = True

    approximate: Literal["none", "tanh"] = "none"

    def run(self, m: Module, x: Tensor, out: Shape) -> Tensor:
        return activation(x, "gelu")


@dataclass(frozen=True, kw_only=True)
class SiLU(Layer):
    """nn.SiLU. It keeps its input."""

    kind: ClassVar[str] = "silu"
    torch: ClassVar[str] = "SiLU"
    saves_input: ClassVar[bool] = True

    def run(self, m: Module, x: Tensor, out: Shape) -> Tensor:
        return activation(x, "silu")


@dataclass(frozen=True, kw_only=True)
class LeakyReLU(Layer):
    """nn.LeakyReLU. It keeps its input."""

    kind: ClassVar[str] = "leakyrelu"
    torch: ClassVar[str] = "LeakyReLU"
    main: ClassVar[str] = "negative_slope"
    positions: ClassVar[Sequence[str]] = ("negative_slope", "inplace")
    aliases: ClassVar[Mapping[str, str]] = {"slope": "negative_slope"}
    fixed: ClassVar[Mapping[str, Sequence[Any]]] = {"inplace": (False,)}
    saves_input: ClassVar[bool] = True

    negative_slope: float = 0.01

    def run(self, m: Module, x: Tensor, out: Shape) -> Tensor:
        return activation(x, "leaky relu")


@dataclass(frozen=True, kw_only=True)
class Softmax(Layer):
    """nn.Softmax over the last dim. It keeps its output."""

    kind: ClassVar[str] = "softmax"
    torch: ClassVar[str] = "Softmax"
    main: ClassVar[str] = "dim"
    positions: ClassVar[Sequence[str]] = ("dim",)
    saves_output: ClassVar[bool] = True

    dim: int = -1

    def shape(self, x: Shape) -> Shape:
        if self.dim not in (-1, len(x)):
            raise ValueError(f"dim {self.dim}: allowed: -1 or {len(x)}, the last one")
        return x

    def run(self, m: Module, x: Tensor, out: Shape) -> Tensor:
        return softmax(x)


@dataclass(frozen=True, kw_only=True)
class Dropout(Layer):
    """nn.Dropout. It keeps a mask of one byte for each element."""

    kind: ClassVar[str] = "dropout"
    torch: ClassVar[str] = "Dropout"
    main: ClassVar[str] = "p"
    positions: ClassVar[Sequence[str]] = ("p", "inplace")

    p: Probability = 0.5
    inplace: bool = False

    @property
    def is_in_place(self) -> bool:
        return self.inplace and self.p > 0

    def run(self, m: Module, x: Tensor, out: Shape) -> Tensor:
        return dropout_(x, self.p) if self.inplace else dropout(x, self.p)


@dataclass(frozen=True, kw_only=True)
class Flatten(Layer):
    """nn.Flatten of all dims but the batch: a view."""

    kind: ClassVar[str] = "flatten"
    torch: ClassVar[str] = "Flatten"
    main: ClassVar[str] = "start_dim"
    positions: ClassVar[Sequence[str]] = ("start_dim", "end_dim")
    aliases: ClassVar[Mapping[str, str]] = {"start": "start_dim", "end": "end_dim"}
    fixed: ClassVar[Mapping[str, Sequence[Any]]] = {"end_dim": (-1,)}
    is_view: ClassVar[bool] = True

    start_dim: int = 1

    def shape(self, x: Shape) -> Shape:
        if not 1 <= self.start_dim <= len(x):
            raise ValueError(f"start_dim {self.start_dim}: allowed: 1 to {len(x)} for {shown(x)}")
        lead, rest = x[: self.start_dim - 1], x[self.start_dim - 1 :]
        return (*lead, merge(*rest))

    def placed(self, x: Shape) -> str:
        rest = x[self.start_dim - 1 :]
        return f"{'·'.join(str(d.size) for d in rest)} = {merge(*rest).size}" if len(rest) > 1 else ""

    def run(self, m: Module, x: Tensor, out: Shape) -> Tensor:
        return x if len(x.shape) == len(out) + 1 else reshape(x, x.shape[0], *out)


@dataclass(frozen=True, kw_only=True)
class Identity(Layer):
    """nn.Identity."""

    kind: ClassVar[str] = "identity"
    torch: ClassVar[str] = "Identity"
    is_view: ClassVar[bool] = True

    def run(self, m: Module, x: Tensor, out: Shape) -> Tensor:
        return x


@dataclass(frozen=True, kw_only=True)
class Transpose(Layer):
    """Swap two dims, the batch being dim 0: a view, as `x.transpose(1, 2)`."""

    kind: ClassVar[str] = "transpose"
    torch: ClassVar[str] = "Transpose"
    main: ClassVar[str] = "dims"
    is_view: ClassVar[bool] = True

    dims: list[int]

    def shape(self, x: Shape) -> Shape:
        if len(self.dims) != 2 or not all(1 <= d <= len(x) for d in self.dims):
            raise ValueError(f"dims {self.dims}: allowed: two of 1 to {len(x)} for {shown(x)}")
        out = list(x)
        i, j = (d - 1 for d in self.dims)
        out[i], out[j] = out[j], out[i]
        return tuple(out)

    def run(self, m: Module, x: Tensor, out: Shape) -> Tensor:
        return transpose(x, *self.dims)


@dataclass(frozen=True, kw_only=True)
class Last(Layer):
    """The last step of a sequence, as `x[:, -1]`: a view."""

    kind: ClassVar[str] = "last"
    torch: ClassVar[str] = "Last"
    is_view: ClassVar[bool] = True

    def shape(self, x: Shape) -> Shape:
        of_rank(x, 2, 3, what="steps × features")
        return x[1:]

    def run(self, m: Module, x: Tensor, out: Shape) -> Tensor:
        return select(x, 1)
