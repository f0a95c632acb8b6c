"""Tensors that have sizes but no data, and the memory that they live in.

A tensor refers to a storage; views share it. CPython frees an object when the last reference to it goes, as PyTorch
frees a storage. So a program that binds and rebinds its variables where the real code does has the same bytes alive at
the same moments. No lifetime is written down by hand.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from memcalc.core.dims import Shape
from memcalc.core.dtypes import DType

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from collections.abc import Set as AbstractSet

    from memcalc.core.autograd import Node
    from memcalc.core.hooks import Contexts, Offloader, Packer, Visitor

Strides = tuple[int, ...]


class StorageRow(NamedTuple):
    """The record of one allocation: enough to name, size and explain its bytes."""

    shape: Shape
    dtype: DType
    component: str
    scope: str
    name: str
    layer: int | None

    @property
    def label(self) -> str:
        """Return the name, with the module that allocated the storage."""
        if not self.scope or self.name.startswith(self.scope):
            return self.name
        return f"{self.scope}: {self.name}"


class Sent(NamedTuple):
    """One call of a collective. `shape` and `dtype` are those of the full tensor."""

    axis: str
    kind: str
    name: str
    phase: str
    layer: int | None
    shape: Shape
    dtype: DType


class Work(NamedTuple):
    """Equal products of matrices that one call of an op makes: `products` times 2 · (the product of `factors`) FLOPs."""

    kind: str
    """The op: "matmul", "grouped matmul", "attention" for a fused kernel, "convolution"."""
    scope: str
    name: str
    phase: str
    """"forward", "backward" or "recomputation"."""
    layer: int | None
    factors: Shape
    """The dims of the result and the dims that are summed over, each once."""
    dtype: DType
    """The dtype of the operands."""
    products: int
    groups: int = 1
    """The experts whose rows a grouped product multiplies; their matrices differ."""
    is_causal: bool = False
    """True for fused attention that leaves out the keys after each query."""

    @property
    def label(self) -> str:
        """Return the name, with the module that makes the products."""
        if not self.name:
            return self.scope
        return self.name if self.name.startswith(self.scope) else f"{self.scope}: {self.name}"


class Streamed(NamedTuple):
    """One kernel that multiplies no matrices. It reads or writes each of its operands once."""

    scope: str
    name: str
    """The op: "mul", "softmax"."""
    phase: str
    """"forward", "backward" or "recomputation"."""
    layer: int | None
    operands: tuple[tuple[Shape, DType], ...]


class Memory:
    """The memory counter of one run: a log of allocations and frees, in their order.

    `log` holds `i` where storage number `i` was allocated and `~i` where it was freed. `segments` holds the indices in
    the log at which another phase or layer begins. `renamed` holds the indices at which no bytes move: a storage goes
    on under the next number. `kernels` maps replaceable functions to the functions that the run calls instead.
    """

    __slots__ = (
        "autocast",
        "checkpoint",
        "contexts",
        "grad_enabled",
        "gradient_hooks",
        "kernels",
        "layer",
        "log",
        "offloading",
        "only",
        "pads_queries",
        "phase",
        "recomputing",
        "reentered",
        "renamed",
        "rows",
        "scope",
        "segments",
        "sent",
        "sequence",
        "streamed",
        "visitor",
        "work",
    )

    def __init__(self, kernels: Mapping[Callable[..., Any], Callable[..., Any]] | None = None) -> None:
        self.kernels: Mapping[Callable[..., Any], Callable[..., Any]] = kernels or {}
        self.log: list[int] = []
        self.rows: list[StorageRow] = []
        self.segments: list[tuple[int, str, int | None]] = []
        self.renamed: set[int] = set()
        self.sent: list[Sent] = []
        self.work: list[Work] = []
        self.streamed: list[Streamed] = []
        self.recomputing = False
        self.reentered: tuple[str, int | None] | None = None
        """The module whose reentrant checkpoint is being recomputed."""
        self.phase = ""
        self.layer: int | None = None
        self.scope = ""
        self.sequence = 0
        self.grad_enabled = True
        self.checkpoint: Packer | None = None
        self.contexts: Contexts | None = None
        self.offloading: Offloader | None = None
        """The hook that moves saved tensors to the host; None: they stay."""
        self.visitor: Visitor | None = None
        self.autocast: Autocast | None = None
        self.pads_queries = False
        """True after a kernel that pads queries has run: sizes depend on the remainder of the sequence length."""
        self.gradient_hooks: dict[Node, list[Callable[[], None]]] = {}
        """The functions that run when the gradient of a node's output is there, before the node does (Tensor.register_hook)."""
        self.only: AbstractSet[Node] | None = None
        """The nodes that run when backward runs a part of the graph; None: all nodes."""

    def enter(self, phase: str, layer: int | None) -> None:
        """Assign the allocations from here on to this phase and layer."""
        if phase != self.phase or layer != self.layer:
            self.phase, self.layer = phase, layer
            self.segments.append((len(self.log), phase, layer))

    def relabel(self, storage: Storage, shape: Shape, component: str, name: str, layer: int | None) -> None:
        """Give the bytes of a storage another name from here on. In the log one block is freed and another one
        allocated."""
        self.renamed.add(len(self.log))
        self.log.append(~storage.index)
        dtype = self.rows[storage.index].dtype
        storage.index = len(self.rows)
        self.rows.append(StorageRow(shape, dtype, component, "", name, layer))
        self.log.append(storage.index)


class Autocast:
    """`with torch.autocast(dtype)` around a part of a run. A dtype of None means `enabled=False`.

    `copies` are the weights cast so far, by their gradient accumulators. They are freed when the context is left, or
    later if autograd has saved them.
    """

    __slots__ = ("copies", "dtype", "memory", "outer")

    def __init__(self, memory: Memory, dtype: DType | None) -> None:
        self.memory, self.dtype = memory, dtype
        self.copies: dict[Node, Tensor] = {}

    def __enter__(self) -> None:
        self.outer = self.memory.autocast
        self.memory.autocast = None if self.dtype is None else self

    def __exit__(self, *_: object) -> None:
        self.memory.autocast = self.outer
        self.copies.clear()


_NO_BLOCK: Final = -1
"""The index of a released storage."""


class Storage:
    """A block of memory. It is freed when the last tensor that refers to it is gone."""

    __slots__ = ("index", "memory")

    def __init__(self, memory: Memory, shape: Shape, dtype: DType, component: str, name: str) -> None:
        self.memory = memory
        self.index = len(memory.rows)
        memory.rows.append(StorageRow(shape, dtype, component, memory.scope, name, memory.layer))
        memory.log.append(self.index)

    def release(self) -> None:
        """Free the block while tensors still refer to the storage (`untyped_storage().resize_(0)`)."""
        if not self.is_released:
            self.memory.log.append(~self.index)
            self.index = _NO_BLOCK

    @property
    def is_released(self) -> bool:
        """Tell whether the storage has no block."""
        return self.index == _NO_BLOCK

    def restore(self, shape: Shape, dtype: DType, name: str) -> None:
        """Give a released storage a block again."""
        memory = self.memory
        self.index = len(memory.rows)
        memory.rows.append(StorageRow(shape, dtype, "activation", memory.scope, name, memory.layer))
        memory.log.append(self.index)

    def __del__(self) -> None:
        if self.index != _NO_BLOCK:
            self.memory.log.append(~self.index)


class Tensor:
    """A strided view of a storage. `node` is its grad_fn, or the accumulator of a leaf that requires a gradient. `is_view` is
    False for the tensor that came with the storage: every other one is a view, and a view holds its base."""

    __slots__ = ("dtype", "is_view", "name", "node", "output", "shape", "storage", "strides")

    def __init__(
        self,
        storage: Storage,
        shape: Shape,
        strides: Strides,
        dtype: DType,
        node: Node | None = None,
        output: int = 0,
        name: str = "",
    ) -> None:
        self.storage = storage
        self.shape = shape
        self.strides = strides
        self.dtype = dtype
        self.node = node
        self.output = output
        self.name = name
        self.is_view = True

    @property
    def memory(self) -> Memory:
        return self.storage.memory

    def unpack(self) -> Tensor:
        return self

    def __repr__(self) -> str:
        return f"Tensor({self.shape}, {self.dtype}, {self.name!r})"

    # The operators that a `forward()` is written with.
    def __add__(self, other: Tensor | float) -> Tensor:
        from memcalc.core.ops.elementwise import add

        return add(self, other)

    def __mul__(self, other: Tensor | float) -> Tensor:
        from memcalc.core.ops.elementwise import mul

        return mul(self, other)

    def __radd__(self, other: float) -> Tensor:
        return self + other

    def __rmul__(self, other: float) -> Tensor:
        return self * other

    def __truediv__(self, other: float) -> Tensor:
        from memcalc.core.ops.elementwise import scale

        return scale(self, "div")

    def __neg__(self) -> Tensor:
        from memcalc.core.ops.elementwise import neg

        return neg(self)


@lru_cache(maxsize=16384)
def contiguous_strides(shape: Shape) -> Strides:
    """Return row-major strides, in elements."""
    strides = [1] * len(shape)
    for i in range(len(shape) - 2, -1, -1):
        strides[i] = strides[i + 1] * max(shape[i + 1].size, 1)
    return tuple(strides)


def is_contiguous(tensor: Tensor) -> bool:
    """Tell whether a tensor is contiguous by torch's rule: the strides of dims of size 1 do not matter."""
    return is_row_major(tensor.shape, tensor.strides)


def is_row_major(shape: Shape, strides: Strides) -> bool:
    """Tell whether a tensor of these strides is contiguous."""
    expected = 1
    for dim, stride in zip(reversed(shape), reversed(strides), strict=True):
        if dim.size != 1:
            if stride != expected:
                return False
            expected *= dim.size
    return True


def is_dense(shape: Shape, strides: Strides) -> bool:
    """Tell whether a layout is dense and non-overlapping: some order of the dims is row-major."""
    expected = 1
    for stride, size in sorted((stride, dim.size) for dim, stride in zip(shape, strides, strict=True) if dim.size != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def new_tensor(
    memory: Memory,
    shape: Shape,
    dtype: DType,
    name: str,
    strides: Strides | None = None,
    component: str = "activation",
) -> Tensor:
    """Allocate a dense tensor."""
    storage = Storage(memory, shape, dtype, component, name)
    out = Tensor(storage, shape, contiguous_strides(shape) if strides is None else strides, dtype)
    out.is_view = False
    return out


def same_sizes(left: Shape, right: Shape) -> bool:
    """Tell whether two shapes have equal sizes, whatever their dims are called."""
    if left is right:
        return True
    if len(left) != len(right):
        return False
    for a, b in zip(left, right, strict=True):  # noqa: SIM110  (a loop: this is the hottest line of a run)
        if a is not b and a.size != b.size:
            return False
    return True
