"""The parts of a layer: options, an output's shape, weights, buffers and a forward."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from memcalc.core.dims import Dim

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from memcalc.core.dims import Shape
    from memcalc.core.dtypes import DType
    from memcalc.core.tensor import Tensor
    from memcalc.families.base.module import Module


class Parameter(NamedTuple):
    """A parameter of a layer, by its name in the module."""

    name: str
    shape: Shape


class State(NamedTuple):
    """A buffer of a layer. Without a dtype it follows the model's."""

    name: str
    shape: Shape
    dtype: DType | None = None


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One layer. Shapes have no batch; tensors have one, as their first dim."""

    kind: ClassVar[str]
    """The name in the notation."""
    torch: ClassVar[str]
    """The class of torch.nn."""
    main: ClassVar[str] = ""
    """The option that a value without a name is; "" if there is none."""
    positions: ClassVar[Sequence[str]] = ()
    """The options in the order of the arguments of torch's class."""
    aliases: ClassVar[Mapping[str, str]] = {}
    """torch's names of options, and other usual ones."""
    fixed: ClassVar[Mapping[str, Sequence[Any]]] = {}
    """Arguments of torch's class that are no options here, with the values that they may have."""
    component: ClassVar[str] = "layers"
    """The group of the parameters in tables."""
    saves_input: ClassVar[bool] = False
    """True if autograd keeps the input, which must then not change in place."""
    saves_output: ClassVar[bool] = False
    """True if autograd keeps the output."""
    is_view: ClassVar[bool] = False
    """True if the output has the input's storage."""
    integers: ClassVar[bool] = False
    """True if the input is ids, not numbers."""

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Raise ValueError if options contradict each other."""

    @property
    def is_in_place(self) -> bool:
        """Tell whether the layer overwrites its input."""
        return False

    def shape(self, x: Shape) -> Shape:
        """Return the shape of the output. Raises ValueError for an input that the layer does not take."""
        return x

    def parameters(self, x: Shape) -> Iterator[Parameter]:
        """Yield the parameters in the order in which torch's module has them."""
        yield from ()

    def states(self, x: Shape) -> Iterator[State]:
        """Yield the buffers."""
        yield from ()

    def run(self, m: Module, x: Tensor, out: Shape) -> Tensor:
        """Return the output of the module's forward; `out` is its shape without the batch."""
        raise NotImplementedError

    def counted(self, x: Shape) -> str:
        """Return the derivation of the number of parameters; "" without any."""
        return ""

    def placed(self, x: Shape) -> str:
        """Return the derivation of the output's shape; "" where it needs none."""
        return ""


def sizes(shape: Shape) -> tuple[int, ...]:
    """Return the sizes of a shape."""
    return tuple(dim.size for dim in shape)


def shown(shape: Shape) -> str:
    """Return a shape for people: "3 × 224 × 224"."""
    return " × ".join("seq" if dim.name == "seq" else str(dim.size) for dim in shape) or "a scalar"


def number(text: str, shapes: Sequence[Shape]) -> str:
    """Return a derivation with its result: "(3·3·3 + 1) · 64 = 1,792"."""
    return f"{text} = {sum(prod(sizes(shape)) for shape in shapes):,}"


def dim(name: str, size: int) -> Dim:
    return Dim(name, size)


def of_rank(x: Shape, *ranks: int, what: str) -> None:
    """Raise ValueError unless an input has one of these numbers of dims besides the batch."""
    if len(x) not in ranks:
        raise ValueError(f"takes an input of {what}, not {shown(x)}")
