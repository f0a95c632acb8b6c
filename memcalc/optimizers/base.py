"""The parts of every optimizer: the tensors that it keeps, and one step on paper.

A step is written with the variables of the real one, bound and rebound at the same places, because that decides which
temporaries are alive together. For example, a name bound in a loop holds the tensor of one parameter while the next
parameter's is made. Ops that work in place do not appear. Bytes that a CUDA kernel borrows while it runs (the partial
sums of a large reduction, a cuBLAS workspace) are no tensors and are not counted here.

The step also notes its kernels (`streams`, `multiplies`), those that work in place too: its time is read from them. A step over
one parameter of a class notes what each parameter of the class takes.

`parameters` are classes of equal tensors, in the order of the model. Neighbours with the same count are one stack of
layers. The real optimizer meets their parameters as a b a b …, not as a a b b.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby
from typing import ClassVar

from memcalc.core.dims import Dim, Shape, numel
from memcalc.core.dtypes import DType
from memcalc.core.tensor import Memory, Storage, Streamed, Tensor, Work, contiguous_strides
from memcalc.errors import InputError, one_line

Operand = tuple[Shape, DType]


@dataclass(frozen=True, slots=True)
class Parameter:
    """`count` equal parameters: one, or one per layer. `is_matrix` marks a 2-D weight inside the layers."""

    name: str
    shape: Shape
    count: int
    is_matrix: bool
    stack: int = 0
    """Distinguishes stacks of equal depth that are no neighbours in the model, after the parameters between them were
    left out."""
    dtype: DType | None = None
    """The parameter's dtype if it is not that of all others."""
    head: int = 0
    """The elements of a head of attention, hidden²/heads; 0 where the model's configuration has no such numbers."""


@dataclass(frozen=True, slots=True)
class State:
    """A tensor on the GPU that the optimizer keeps for each of the `count` tensors of a parameter."""

    name: str
    parameter: Parameter
    shape: Shape
    dtype: DType
    count: int
    source: str
    life: str = "always"


@dataclass(frozen=True, slots=True)
class Optimizer(ABC):
    """One optimizer and the implementations of its step. The first one is the default for CUDA tensors."""

    elementwise: ClassVar[bool] = False
    """True if a step over the shards of a parameter equals the step over the parameter: every element is updated by
    itself."""

    needs_shapes: ClassVar[bool] = False
    """True if the states depend on the shapes of the parameters, not only on their numbers of elements."""

    takes_flat: ClassVar[bool] = True
    """False if the step needs whole matrices, not flat partitions of the weights."""

    takes_linear_layers_alone: ClassVar[bool] = False
    """True if transformers' Trainer gives it the weights of nn.Linear, and fails where a model's layers have none."""

    takes_stage_0: ClassVar[bool] = True
    """False if DeepSpeed's stage 0 is not modelled with this optimizer: its FP16_UnfusedOptimizer is another program."""

    only_engine: ClassVar[str | None] = None
    """The engine whose own it is; None if it runs in every engine."""

    compresses: ClassVar[bool] = False
    """True if it reduces gradients or moments itself, compressed after a warm-up: DeepSpeed's 1-bit optimizers."""

    makes_states_in_turn: ClassVar[bool] = False
    """True if the first step makes a parameter's states when it comes to that parameter, not those of all before."""

    fuses_backward: ClassVar[bool] = False
    """True if it updates weights within backward, which frees each gradient: it has `update`, and its step does nothing."""

    shared: ClassVar[frozenset[str]] = frozenset()
    """The names of the states that all parameters share."""

    name: str
    implementations: tuple[str, ...]

    def among(self, ranks: int, phase: str | None) -> Optimizer:
        """Return the optimizer in a run whose gradients `ranks` ranks average, in a phase of it."""
        return self

    def check(self, implementation: str) -> None:
        """Raise InputError for an implementation that this optimizer does not have."""
        if implementation not in self.implementations:
            allowed = ", ".join(self.implementations)
            raise InputError(f"--optimizer-implementation {one_line(implementation)}: {self.name} has {allowed}")

    @abstractmethod
    def states(self, parameters: Sequence[Parameter], dtype: DType, implementation: str) -> list[State]:
        """Return the tensors that the optimizer keeps on the GPU between steps. `dtype` is that of the tensors it
        updates."""

    @abstractmethod
    def step(
        self, memory: Memory, parameters: Sequence[Parameter], dtype: DType, grad_dtype: DType, implementation: str
    ) -> None:
        """Play one step with existing states: allocate and free temporaries as the real step does, and note its
        kernels."""


def like_parameter(name: str, parameter: Parameter, dtype: DType, source: str) -> State:
    """Return the state that `zeros_like(parameter)` makes."""
    return State(name, parameter, parameter.shape, dtype, parameter.count, source)


def one_by_one(memory: Memory, parameters: Sequence[Parameter]) -> Iterator[Parameter]:
    """Yield the parameters as a for-loop meets them, each stack of layers at most twice.

    The loop's variables hold the same after every later pass over a stack as after the first. So the second pass is
    like all later ones, and two passes show every moment that many have.
    """
    outer = memory.scope
    try:
        for (count, _), neighbours in groupby(parameters, lambda parameter: (parameter.count, parameter.stack)):
            stack = list(neighbours)
            for _ in range(min(count, 2)):
                for parameter in stack:
                    memory.scope = parameter.name
                    yield parameter
    finally:
        memory.scope = outer


def matrices_and_others(parameters: Sequence[Parameter]) -> tuple[list[Parameter], list[Parameter]]:
    """Return the 2-D weights inside the layers, and all other parameters."""
    matrices: list[Parameter] = []
    others: list[Parameter] = []
    stacks = groupby(parameters, lambda parameter: parameter.count)
    for parameter in (replace(p, stack=i) for i, (_, stack) in enumerate(stacks) for p in stack):
        (matrices if parameter.is_matrix and len(parameter.shape) == 2 else others).append(parameter)
    return matrices, others


def temporary(memory: Memory, shape: Shape, dtype: DType, name: str) -> Tensor:
    """Allocate a tensor that the step frees again."""
    return Tensor(Storage(memory, shape, dtype, "temporaries", name), shape, contiguous_strides(shape), dtype)


def then(tensor: Tensor, name: str, dtype: DType | None = None) -> Tensor:
    """Allocate the result of an elementwise op over `tensor`. In `then(temporary(…), …)` both are alive, as in a.sqrt()
    / b."""
    return temporary(tensor.memory, tensor.shape, dtype or tensor.dtype, name)


def wider(left: DType, right: DType) -> DType:
    """Return the dtype of an op over a state and a gradient: the wider one."""
    return left if left.itemsize >= right.itemsize else right


def temporaries(
    memory: Memory,
    parameters: Sequence[Parameter],
    dtype: DType,
    name: str,
    shape: Callable[[Shape], Shape] | None = None,
) -> list[Tensor]:
    """Return a temporary for every parameter, in its own dtype if it has one. A class of equal parameters is one tensor
    with a leading dim for its count.

    `shape` maps a parameter's shape to its temporary's, if they differ.
    """
    outer = memory.scope
    out: list[Tensor] = []
    for parameter in parameters:
        memory.scope = parameter.name
        stacked = parameter.shape if parameter.count == 1 else (_layers(parameter.count), *parameter.shape)
        out.append(temporary(memory, shape(stacked) if shape else stacked, parameter.dtype or dtype, name))
    memory.scope = outer
    return out


@lru_cache(maxsize=1024)
def _layers(count: int) -> Dim:
    return Dim("layers", count)


# --- kernels


def streams(memory: Memory, name: str, *operands: Operand) -> None:
    """Note a kernel that multiplies no matrices: it reads or writes each operand once, so what it updates in place is
    given twice. Within a loop over parameters it is a kernel of the parameter, else one of all parameters together.

    Single numbers are left out: they are read with the kernel's arguments.
    """
    several = tuple(one for one in operands if numel(one[0])[0] > 1)
    if several:
        memory.streamed.append(Streamed(memory.scope, name, "optimizer", None, several))


@contextmanager
def within(memory: Memory, parameter: Parameter) -> Generator[None]:
    """Name what is allocated and noted inside after the parameter."""
    outer, memory.scope = memory.scope, parameter.name
    try:
        yield
    finally:
        memory.scope = outer


def multiplies(memory: Memory, name: str, rows: Dim, columns: Dim, inner: Dim, dtype: DType) -> None:
    """Note a product (rows, inner) @ (inner, columns)."""
    memory.work.append(Work("matmul", memory.scope, name, "optimizer", None, (rows, columns, inner), dtype, 1))
