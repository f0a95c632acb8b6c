"""The FLOPs of an optimizer step on one rank: the products noted in its runs, multiplied to all layers and micro-batches."""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import dropwhile, takewhile
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from memcalc.core.dims import evaluate
from memcalc.core.tensor import Streamed, Work
from memcalc.tape.kernels import nbytes_of, product_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from memcalc.core.rows import Basis
    from memcalc.inputs.gpu import GPU
    from memcalc.setup.setup import Setup
    from memcalc.tape.kernels import Product
    from memcalc.tape.profile import Profile
    from memcalc.tape.runs import Trace

PHASES: Final = ("forward", "backward", "recomputation")
_TERA: Final = 10**12


class Place(NamedTuple):
    """A part of a run."""

    phase: str
    """Forward or backward."""
    layer: int | None
    """The layer of the run; None outside the layers."""


class Computed(NamedTuple):
    """Equal matrix products of one optimizer step."""

    name: str
    phase: str
    layer: str | None
    """The stack of layers that the products are in ("model.layers.*"); None outside the layers."""
    kind: str
    dtype: str
    calls: int
    """The number of products."""
    flops: int
    formula: str
    basis: Basis
    source: str
    sizes: tuple[int, ...] = ()
    """The sizes of the result's dims and of the dims that are summed over, in the op's order."""
    groups: int = 1
    """The experts whose rows one grouped product multiplies."""
    is_causal: bool = False
    """True for fused attention that leaves out the keys after each query."""


class Moved(NamedTuple):
    """Equal kernels of one optimizer step that multiply no matrices."""

    name: str
    phase: str
    calls: int
    nbytes: int
    """The bytes that all of them read and write."""


def computed(profiles: Iterable[Profile], setup: Setup, on_paper: int) -> list[Computed]:
    """Return the matrix products of an optimizer step, sorted by phase. `on_paper`: how many equal micro-batches each profile's
    run has."""
    calls: Counter[Product] = Counter()
    for profile in profiles:
        for product, number in profile.products.items():
            whole = number * setup.micro_batches
            assert not whole % on_paper
            calls[product] += whole // on_paper
    made = [_computed(product, n, setup) for product, n in calls.items()]
    return sorted(made, key=lambda item: PHASES.index(item.phase))


def _computed(of: Product, calls: int, setup: Setup) -> Computed:
    batch, seq = setup.micro_batch_size, setup.tokens_per_part
    sizes, each = tuple(evaluate(poly, batch, seq) for poly in of.sizes), evaluate(of.size, batch, seq)
    words = f"{calls}·2·{of.dims} = {calls}·{2 * each} FLOP"
    layer = _stack(of.name) if of.in_layer else None
    return Computed(
        of.name,
        of.phase,
        layer,
        of.kind,
        of.dtype,
        calls,
        2 * calls * each,
        words,
        of.basis,
        of.source,
        sizes,
        of.groups,
        of.is_causal,
    )


def moved(profiles: Iterable[Profile], setup: Setup, on_paper: int) -> list[Moved]:
    """Return the kernels of an optimizer step that multiply no matrices. `on_paper` is as in `computed`."""
    calls: Counter[tuple[str, str]] = Counter()
    nbytes: Counter[tuple[str, str]] = Counter()
    of = setup.micro_batch_size, setup.tokens_per_part
    for profile in profiles:
        for one in profile.passes:
            key = one.name, one.phase
            calls[key] += one.calls * setup.micro_batches
            nbytes[key] += evaluate(one.nbytes, *of) * setup.micro_batches
    return [Moved(*key, round(calls[key] / on_paper), round(nbytes[key] / on_paper)) for key in calls]


def _stack(name: str) -> str:
    """Return the name of the stack that a module is in, from the module's path: "model.layers.*"."""
    return name.split("*")[0] + "*"


def per_phase(items: Iterable[Computed]) -> dict[str, int]:
    """Return the FLOPs of each phase, and their sum as "total"."""
    sums: dict[str, int] = dict.fromkeys(PHASES, 0)
    for item in items:
        sums[item.phase] += item.flops
    return {**sums, "total": sum(sums.values())}


def seconds_at_peak(items: Iterable[Computed], gpu: GPU | None) -> float | None:
    """Return the seconds that the products take at the dense rates of a GPU's data sheet, which no step reaches.

    Return None without a GPU, or if the rate of a dtype is not known. fp32 counts without TF32, torch's default
    (torch.backends.cuda.matmul.allow_tf32).
    """
    if gpu is None:
        return None
    seconds = 0.0
    for item in items:
        rate = gpu.dense_flops_per_second.get(item.dtype)
        if rate is None:
            return None
        assert rate.unit == "TFLOP/s"
        seconds += item.flops / (rate.value * _TERA)
    return seconds


def by_place(run: Trace, setup: Setup) -> dict[Place, tuple[list[Computed], list[Moved]]]:
    """Return the kernels of a run by phase and layer of the run: those that multiply no matrices as one row. Recomputation is
    part of backward."""
    products: dict[Place, Counter[Product]] = defaultdict(Counter)
    moved: dict[Place, list[Streamed]] = defaultdict(list)
    for work in run.work:
        products[_place(work.phase, work.layer)][product_of(work, run)] += work.products
    for kernel in run.streamed:
        moved[_place(kernel.phase, kernel.layer)].append(kernel)
    return {
        place: (
            [_computed(one, n, setup) for one, n in products[place].items()],
            _all_moved(moved[place], place.phase, setup),
        )
        for place in {**products, **moved}
    }


def _all_moved(kernels: Sequence[Streamed], phase: str, setup: Setup) -> list[Moved]:
    """Return kernels of one place as one row; none without any."""
    if not kernels:
        return []
    sizes = (sum(sizes) for sizes in zip(*map(nbytes_of, kernels), strict=True))
    nbytes = evaluate(tuple(sizes), setup.micro_batch_size, setup.tokens_per_part)  # type: ignore[arg-type]
    return [Moved("kernels", phase, len(kernels), nbytes)]


def after_layers(run: Trace, setup: Setup) -> tuple[list[Computed], list[Moved]]:
    """Return the kernels that a run's forward has after its layers, and those of their backward, once each. A kernel that
    multiplies no matrices is noted in backward, its forward too."""
    forward = [work for work in run.work if work.phase == "forward"]
    backward = [work for work in run.work if work.phase != "forward"]
    works = [*_before_layers(forward[::-1]), *_before_layers(backward)]
    streamed = list(dropwhile(lambda kernel: kernel.layer is not None, run.streamed))  # what forward itself has noted
    return (
        [_computed(product_of(work, run), work.products, setup) for work in works],
        [_moved(kernel, setup) for kernel in _before_layers(streamed)],
    )


_Noted = TypeVar("_Noted", Work, Streamed)


def _before_layers(notes: Sequence[_Noted]) -> Iterator[_Noted]:
    """Yield the notes before the first one of a layer; none without layers."""
    if any(one.layer is not None for one in notes):
        yield from takewhile(lambda one: one.layer is None, notes)


def _moved(kernel: Streamed, setup: Setup) -> Moved:
    nbytes = evaluate(nbytes_of(kernel), setup.micro_batch_size, setup.tokens_per_part)
    return Moved(kernel.name, kernel.phase, 1, nbytes)


def _place(phase: str, layer: int | None) -> Place:
    return Place("forward" if phase == "forward" else "backward", layer)
