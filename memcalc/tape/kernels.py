"""The kernels of a run at its real depth: equal ones counted together, with sizes as polynomials in batch and seq."""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from memcalc.core.dims import formula, numel

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from memcalc.core.dims import Poly, Shape
    from memcalc.core.dtypes import DType
    from memcalc.core.rows import Basis
    from memcalc.core.tensor import Streamed, Work
    from memcalc.tape.runs import Trace

COUNTED: Final = "torch/utils/flop_counter.py"


class Product(NamedTuple):
    """A product of matrices."""

    name: str
    phase: str
    in_layer: bool
    kind: str
    dtype: str
    dims: str
    """The dims of `size`, as a product of names."""
    size: Poly
    """The multiplications."""
    sizes: tuple[Poly, ...]
    """The sizes of the result's dims and of the dims that are summed over, in the op's order."""
    groups: int
    is_causal: bool
    basis: Basis
    source: str


class Pass(NamedTuple):
    """Equal kernels that multiply no matrices."""

    name: str
    phase: str
    calls: int
    nbytes: Poly
    """The bytes that all of them read and write."""


def product_of(work: Work, run: Trace) -> Product:
    """Return the product of a run's note."""
    basis: Basis = "traced" if run.source else run.kernels.basis
    source = f"{COUNTED}; {run.source or run.kernels.source}"
    dims, size = formula(work.factors), numel(work.factors)[1]
    sizes = tuple(dim.poly for dim in work.factors)
    of = work.label, work.phase, work.layer is not None, work.kind, work.dtype.name
    return Product(*of, dims, size, sizes, work.groups, work.is_causal, basis, source)


def products_of(run: Trace) -> Counter[Product]:
    """Return the products of a run, each with its number."""
    calls: Counter[Product] = Counter()
    for work, number in _each(run.work):
        calls[product_of(work, run)] += number * _times(run, work.layer) * work.products
    return calls


def nbytes_of(kernel: Streamed) -> Poly:
    """Return the bytes that a kernel reads and writes."""
    return _nbytes(kernel.operands)


@lru_cache(maxsize=16384)
def _nbytes(operands: tuple[tuple[Shape, DType], ...]) -> Poly:
    sizes = [(numel(shape)[1], dtype.itemsize) for shape, dtype in operands]
    return tuple(sum(size[place] * itemsize for size, itemsize in sizes) for place in range(6))  # type: ignore[return-value]


def passes_of(run: Trace) -> list[Pass]:
    """Return the kernels of a run that multiply no matrices."""
    calls: Counter[tuple[str, str]] = Counter()
    nbytes: dict[tuple[str, str], list[int]] = {}
    for kernel, number in _each(run.streamed):
        times = number * _times(run, kernel.layer)
        key = f"{kernel.scope}: {kernel.name}" if kernel.scope else kernel.name, kernel.phase
        calls[key] += times
        total = nbytes.setdefault(key, [0] * 6)
        for place, coefficient in enumerate(nbytes_of(kernel)):
            total[place] += times * coefficient
    return [Pass(*key, calls[key], tuple(nbytes[key])) for key in calls]  # type: ignore[arg-type]


_Kernel = TypeVar("_Kernel")


def _each(kernels: Sequence[_Kernel]) -> Iterator[tuple[_Kernel, int]]:
    """Yield each kernel with its number in a run. Micro-batches that do the same have the same objects."""
    numbers = Counter(map(id, kernels))
    for key, kernel in {id(kernel): kernel for kernel in kernels}.items():
        yield kernel, numbers[key]


def _times(run: Trace, layer: int | None) -> int:
    """Return the number of layers of the real stack that a layer of a run stands for."""
    return 1 + run.middle.more if layer is not None and layer in run.middle.early else 1
