"""Convolutions and pooling: nn.Conv1d, Conv2d, ConvTranspose2d, MaxPool2d, AvgPool2d, AdaptiveAvgPool2d."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from memcalc.core.dims import ONE_DIM, Dim
from memcalc.core.ops.convolution import convolution
from memcalc.core.ops.pooling import adaptive_avg_pool2d, max_pool2d
from memcalc.core.ops.transposed_convolution import transposed_convolution
from memcalc.core.ops.window_pooling import adaptive_average, average
from memcalc.families.base.config import Bounds, Count
from memcalc.families.base.layers.layer import Layer, Parameter, dim, number, of_rank, shown

if TYPE_CHECKING:
    from memcalc.core.dims import Shape
    from memcalc.core.tensor import Tensor
    from memcalc.families.base.module import Module

Natural = Annotated[int, Bounds(ge=0, le=10**6)]
Size = Count | list[Count]
Amount = Natural | list[Natural]
_PLACES = ("height", "width")
_IMAGE = "channels × height × width"


def each(value: int | Sequence[int], dims: int, name: str) -> tuple[int, ...]:
    """Return a value for each dim. Raises ValueError for a list of another length."""
    if isinstance(value, int):
        return (value,) * dims
    if len(value) != dims:
        raise ValueError(f"{name} {list(value)}: allowed: a number, or a list of {dims}")
    return tuple(value)


def names_of(dims: int) -> tuple[str, ...]:
    return _PLACES if dims == 2 else ("length",)


@dataclass(frozen=True, kw_only=True)
class Conv(Layer):
    """The options that all convolutions have."""

    main: ClassVar[str] = "out"
    component: ClassVar[str] = "convolution"
    saves_input: ClassVar[bool] = True
    dims: ClassVar[int] = 2
    aliases: ClassVar[Mapping[str, str]] = {
        "in": "in_", "in_channels": "in_", "out_channels": "out", "filters": "out", "channels": "out", "kernel_size": "kernel",
    }  # fmt: skip
    fixed: ClassVar[Mapping[str, Sequence[Any]]] = {"padding_mode": ("zeros",), "device": (None,), "dtype": (None,)}

    in_: Count | None = None
    out: Count
    kernel: Size
    stride: Size = 1
    dilation: Size = 1
    groups: Count = 1
    bias: bool = True

    def check(self) -> None:
        for name in ("kernel", "stride", "dilation"):
            each(getattr(self, name), self.dims, name)
        if self.out % self.groups:
            raise ValueError(f"out {self.out} is not divisible by groups {self.groups}")

    def check_input(self, x: Shape) -> None:
        """Raise ValueError for an input that is no image, or has other channels."""
        of_rank(x, 1 + self.dims, what=_IMAGE if self.dims == 2 else "channels × length")
        if self.in_ is not None and self.in_ != x[0].size:
            raise ValueError(f"in {self.in_}: the input has {x[0].size} channels ({shown(x)})")
        if x[0].size % self.groups:
            raise ValueError(f"groups {self.groups}: the input's {x[0].size} channels are not divisible by it")

    def fields(self) -> tuple[Dim, ...]:
        """Return the dims of the kernel."""
        return tuple(
            dim(f"kernel {n}", k)
            for n, k in zip(names_of(self.dims), each(self.kernel, self.dims, "kernel"), strict=True)
        )

    def counted(self, x: Shape) -> str:
        fields = each(self.kernel, self.dims, "kernel")
        one = "·".join(map(str, (*fields, x[0].size // self.groups)))
        each_ = f"({one} + 1)" if self.bias else f"({one})"
        return number(f"{each_} · {self.out}", [p.shape for p in self.parameters(x)])


@dataclass(frozen=True, kw_only=True)
class Conv2d(Conv):
    """nn.Conv2d."""

    kind: ClassVar[str] = "conv2d"
    torch: ClassVar[str] = "Conv2d"
    positions: ClassVar[Sequence[str]] = (
        "in_", "out", "kernel", "stride", "padding", "dilation", "groups", "bias", "padding_mode",
    )  # fmt: skip

    padding: Amount | Literal["same", "valid"] = 0

    def check(self) -> None:
        super().check()
        if isinstance(self.padding, str):
            if self.padding == "same" and set(each(self.stride, self.dims, "stride")) != {1}:
                raise ValueError("padding 'same': needs stride 1")
            kernels, dilations = each(self.kernel, self.dims, "kernel"), each(self.dilation, self.dims, "dilation")
            if self.padding == "same" and any(d * (k - 1) % 2 for k, d in zip(kernels, dilations, strict=True)):
                raise ValueError(
                    "padding 'same': an even kernel is padded by a copy, which is not modelled; allowed: a number"
                )
        else:
            each(self.padding, self.dims, "padding")

    def padded(self) -> tuple[int, ...]:
        """Return the padding at each side of each dim."""
        if self.padding == "valid":
            return (0,) * self.dims
        if isinstance(self.padding, str):
            kernels, dilations = each(self.kernel, self.dims, "kernel"), each(self.dilation, self.dims, "dilation")
            return tuple(d * (k - 1) // 2 for k, d in zip(kernels, dilations, strict=True))
        return each(self.padding, self.dims, "padding")

    def windows(self) -> list[Window]:
        options = (self.kernel, self.stride, self.dilation)
        kernel, stride, dilation = (each(o, self.dims, "") for o in options)
        return [Window(*one) for one in zip(kernel, stride, self.padded(), dilation, strict=True)]

    def shape(self, x: Shape) -> Shape:
        self.check_input(x)
        return (dim("channels", self.out), *slid(x[1:], self.windows()))

    def placed(self, x: Shape) -> str:
        return slid_in_words(x[1:], self.windows())

    def parameters(self, x: Shape) -> Iterator[Parameter]:
        out = dim("filters", self.out)
        yield Parameter("weight", (out, dim("channels", x[0].size // self.groups), *self.fields()))
        if self.bias:
            yield Parameter("bias", (out,))

    def run(self, m: Module, x: Tensor, out: Shape) -> Tensor:
        return convolution(x, m.weight(), m.optional("bias"), *out[1:])


@dataclass(frozen=True, kw_only=True)
class Conv1d(Conv2d):
    """nn.Conv1d."""

    kind: ClassVar[str] = "conv1d"
    torch: ClassVar[str] = "Conv1d"
    dims: ClassVar[int] = 1


@dataclass(frozen=True, kw_only=True)
class ConvTranspose2d(Conv):
    """nn.ConvTranspose2d."""

    kind: ClassVar[str] = "convtranspose2d"
    torch: ClassVar[str] = "ConvTranspose2d"
    positions: ClassVar[Sequence[str]] = (
        "in_", "out", "kernel", "stride", "padding", "output_padding", "groups", "bias", "dilation", "padding_mode",
    )  # fmt: skip

    padding: Amount = 0
    output_padding: Amount = 0

    def check(self) -> None:
        super().check()
        for name in ("padding", "output_padding"):
            each(getattr(self, name), self.dims, name)
        strides, dilations = each(self.stride, 2, "stride"), each(self.dilation, 2, "dilation")
        for more, s, d in zip(each(self.output_padding, 2, "output_padding"), strides, dilations, strict=True):
            if more >= max(s, d):
                raise ValueError(f"output_padding {more}: allowed: less than the stride {s} or the dilation {d}")

    def _each(self) -> list[tuple[int, int, int, int, int]]:
        names = ("kernel", "stride", "padding", "dilation", "output_padding")
        return list(zip(*(each(getattr(self, name), 2, name) for name in names), strict=True))  # type: ignore[arg-type]

    def shape(self, x: Shape) -> Shape:
        self.check_input(x)
        places: list[Dim] = []
        for place, (k, s, p, d, more) in zip(x[1:], self._each(), strict=True):
            size = (place.size - 1) * s - 2 * p + d * (k - 1) + more + 1
            if size < 1:
                raise ValueError(f"kernel {k} with padding {p} leaves nothing of {shown(x)}")
            places.append(dim(place.name, size))
        return (dim("channels", self.out), *places)

    def placed(self, x: Shape) -> str:
        k, s, p, d, more = self._each()[0]
        n = x[1].size
        reach = f"{d}·({k} − 1)" if d > 1 else f"({k} − 1)"
        return f"({n} − 1)·{s} − 2·{p} + {reach} + {more} + 1 = {(n - 1) * s - 2 * p + d * (k - 1) + more + 1}"

    def parameters(self, x: Shape) -> Iterator[Parameter]:
        yield Parameter("weight", (x[0], dim("filters", self.out // self.groups), *self.fields()))
        if self.bias:
            yield Parameter("bias", (dim("filters", self.out),))

    def counted(self, x: Shape) -> str:
        one = "·".join(map(str, (*each(self.kernel, 2, "kernel"), x[0].size, self.out // self.groups)))
        return number(f"{one} + {self.out}" if self.bias else one, [p.shape for p in self.parameters(x)])

    def run(self, m: Module, x: Tensor, out: Shape) -> Tensor:
        return transposed_convolution(x, m.weight(), m.optional("bias"), *out)


# --- windows that slide


@dataclass(frozen=True, slots=True)
class Window:
    """A window along one dim."""

    kernel: int
    stride: int
    padding: int
    dilation: int = 1
    rounds_up: bool = False

    @property
    def reach(self) -> int:
        """Return the inputs from the window's first to its last."""
        return self.dilation * (self.kernel - 1) + 1

    def places(self, size: int) -> int:
        """Return the places that the window has along `size` inputs (pooling_output_shape in native/Pool.h)."""
        room = size + 2 * self.padding - self.reach
        if not self.rounds_up or room < 0:
            return room // self.stride + 1
        places = -(-room // self.stride) + 1
        return places - ((places - 1) * self.stride >= size + self.padding)  # the last window begins inside

    def words(self, size: int) -> str:
        left, right = ("⌈", "⌉") if self.rounds_up else ("⌊", "⌋")
        reach = f"({self.dilation}·({self.kernel} − 1) + 1)" if self.dilation > 1 else str(self.kernel)
        return f"{left}({size} + 2·{self.padding} − {reach})/{self.stride}{right} + 1 = {self.places(size)}"


def slid(x: Shape, windows: Sequence[Window]) -> tuple[Dim, ...]:
    """Return the places of windows over an image. Raises ValueError for a window that is larger than the image."""
    out: list[Dim] = []
    for place, window in zip(x, windows, strict=True):
        if place.poly[1]:
            raise ValueError("slides over a dim of --seq-len, whose size is not known; allowed: a number in `input`")
        if window.places(place.size) < 1:
            padded = f" with padding {window.padding}" if window.padding else ""
            raise ValueError(f"kernel {window.kernel}: reaches over {window.reach} of {place.size} inputs{padded}")
        out.append(dim(place.name, window.places(place.size)))
    return tuple(out)


def slid_in_words(x: Shape, windows: Sequence[Window]) -> str:
    """Return the derivation of a feature map's size, for each dim that differs."""
    return "; ".join(dict.fromkeys(w.words(d.size) for d, w in zip(x, windows, strict=True)))


@dataclass(frozen=True, kw_only=True)
class Pool(Layer):
    """A pooling of images over windows."""

    main: ClassVar[str] = "kernel"
    aliases: ClassVar[Mapping[str, str]] = {"kernel_size": "kernel"}
    saves_input: ClassVar[bool] = True

    kernel: Size
    stride: Size | None = None
    padding: Amount = 0
    ceil_mode: bool = False

    def check(self) -> None:
        for name in ("kernel", "stride", "padding"):
            if getattr(self, name) is not None:
                each(getattr(self, name), 2, name)
        for k, p in zip(each(self.kernel, 2, "kernel"), each(self.padding, 2, "padding"), strict=True):
            if 2 * p > k:
                raise ValueError(f"padding {p}: allowed: at most half of the kernel {k}")

    def windows(self, dilation: int | Sequence[int] = 1) -> list[Window]:
        given = (self.kernel, self.kernel if self.stride is None else self.stride, self.padding, dilation)
        kernel, stride, padding, dilations = (each(o, 2, "") for o in given)
        sizes = zip(kernel, stride, padding, dilations, strict=True)
        return [Window(k, s, p, d, self.ceil_mode) for k, s, p, d in sizes]

    def shape(self, x: Shape) -> Shape:
        of_rank(x, 3, what=_IMAGE)
        return (x[0], *slid(x[1:], self.windows()))

    def placed(self, x: Shape) -> str:
        return slid_in_words(x[1:], self.windows())


@dataclass(frozen=True, kw_only=True)
class MaxPool2d(Pool):
    """nn.MaxPool2d."""

    kind: ClassVar[str] = "maxpool2d"
    torch: ClassVar[str] = "MaxPool2d"
    positions: ClassVar[Sequence[str]] = ("kernel", "stride", "padding", "dilation", "return_indices", "ceil_mode")
    fixed: ClassVar[Mapping[str, Sequence[Any]]] = {"return_indices": (False,)}

    dilation: Size = 1

    def windows(self, dilation: int | Sequence[int] = 1) -> list[Window]:
        return super().windows(self.dilation)

    def run(self, m: Module, x: Tensor, out: Shape) -> Tensor:
        return max_pool2d(x, *out[1:])


@dataclass(frozen=True, kw_only=True)
class AvgPool2d(Pool):
    """nn.AvgPool2d."""

    kind: ClassVar[str] = "avgpool2d"
    torch: ClassVar[str] = "AvgPool2d"
    positions: ClassVar[Sequence[str]] = (
        "kernel",
        "stride",
        "padding",
        "ceil_mode",
        "count_include_pad",
        "divisor_override",
    )
    fixed: ClassVar[Mapping[str, Sequence[Any]]] = {"count_include_pad": (True, False), "divisor_override": (None,)}

    def run(self, m: Module, x: Tensor, out: Shape) -> Tensor:
        return average(x, *out[1:])


@dataclass(frozen=True, kw_only=True)
class AdaptiveAvgPool2d(Layer):
    """nn.AdaptiveAvgPool2d: the size of the output is given."""

    kind: ClassVar[str] = "adaptiveavgpool2d"
    torch: ClassVar[str] = "AdaptiveAvgPool2d"
    main: ClassVar[str] = "size"
    positions: ClassVar[Sequence[str]] = ("size",)
    aliases: ClassVar[Mapping[str, str]] = {"output_size": "size"}
    saves_input: ClassVar[bool] = True

    size: Size = 1

    def check(self) -> None:
        each(self.size, 2, "size")

    def shape(self, x: Shape) -> Shape:
        of_rank(x, 3, what=_IMAGE)
        height, width = (
            ONE_DIM if n == 1 else dim(name, n) for name, n in zip(_PLACES, each(self.size, 2, "size"), strict=True)
        )
        return x[0], height, width

    def run(self, m: Module, x: Tensor, out: Shape) -> Tensor:
        if each(self.size, 2, "size") == (1, 1):
            return adaptive_avg_pool2d(x)
        return adaptive_average(x, *out[1:])
