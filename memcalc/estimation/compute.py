"""The FLOPs of an optimizer step on one rank: the products noted in its runs, multiplied to all layers and micro-batches."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Final, NamedTuple

from memcalc.core.dims import evaluate, formula, numel

if TYPE_CHECKING:
    from collections.abc import Iterable

    from memcalc.core.dims import Poly
    from memcalc.core.rows import Basis
    from memcalc.core.tensor import Streamed, Work
    from memcalc.inputs.gpu import GPU
    from memcalc.setup.setup import Setup
    from memcalc.tape.profile import Profile
    from memcalc.tape.runs import Trace

PHASES: Final = ("forward", "backward", "recomputation")
COUNTED: Final = "torch/utils/flop_counter.py"
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


class _Alike(NamedTuple):
    """The key of a `Computed`: products with equal keys are one item."""

    name: str
    phase: str
    in_layer: bool
    kind: str
    dtype: str
    dims: str
    size: Poly
    sizes: tuple[Poly, ...]
    groups: int
    is_causal: bool
    basis: Basis
    source: str


def computed(profiles: Iterable[Profile], setup: Setup, on_paper: int) -> list[Computed]:
    """Return the matrix products of an optimizer step, sorted by phase. `on_paper`: how many equal micro-batches each profile's
    run has."""
    calls: Counter[_Alike] = Counter()
    for profile in profiles:
        for alike, products in _of_run(profile.run).items():
            whole = products * setup.micro_batches
            assert not whole % on_paper
            calls[alike] += whole // on_paper
    made = [_computed(alike, n, setup) for alike, n in calls.items()]
    return sorted(made, key=lambda item: PHASES.index(item.phase))


def _of_run(run: Trace) -> Counter[_Alike]:
    """Count the products of a run at the real depth. Equal products are counted together."""
    calls: Counter[_Alike] = Counter()
    for work in run.work:
        calls[_alike(work, run)] += _times(run, work.layer) * work.products
    return calls


def _alike(work: Work, run: Trace) -> _Alike:
    basis: Basis = "traced" if run.source else run.kernels.basis
    source = f"{COUNTED}; {run.source or run.kernels.source}"
    dims, size = formula(work.factors), numel(work.factors)[1]
    sizes = tuple(dim.poly for dim in work.factors)
    of = work.label, work.phase, work.layer is not None, work.kind, work.dtype.name
    return _Alike(*of, dims, size, sizes, work.groups, work.is_causal, basis, source)


def _computed(of: _Alike, calls: int, setup: Setup) -> Computed:
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
    for profile in profiles:
        run = profile.run
        for kernel in run.streamed:
            times = _times(run, kernel.layer) * setup.micro_batches
            key = f"{kernel.scope}: {kernel.name}" if kernel.scope else kernel.name, kernel.phase
            calls[key] += times
            nbytes[key] += times * _nbytes(kernel, setup)
    return [Moved(*key, round(calls[key] / on_paper), round(nbytes[key] / on_paper)) for key in calls]


def _nbytes(kernel: Streamed, setup: Setup) -> int:
    """Return the bytes that a kernel reads and writes."""
    of = setup.micro_batch_size, setup.tokens_per_part
    return sum(evaluate(numel(shape)[1], *of) * dtype.itemsize for shape, dtype in kernel.operands)


def _times(run: Trace, layer: int | None) -> int:
    """Return the number of layers of the real stack that a layer of a run stands for."""
    return 1 + run.middle.more if layer is not None and layer in run.middle.early else 1


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
    """Return the kernels of a run, once each, by phase and layer of the run. Recomputation is part of backward."""
    out: dict[Place, tuple[list[Computed], list[Moved]]] = defaultdict(lambda: ([], []))
    for work in run.work:
        out[_place(work.phase, work.layer)][0].append(_computed(_alike(work, run), work.products, setup))
    for kernel in run.streamed:
        one = Moved(kernel.name, kernel.phase, 1, _nbytes(kernel, setup))
        out[_place(kernel.phase, kernel.layer)][1].append(one)
    return dict(out)


def _place(phase: str, layer: int | None) -> Place:
    return Place("forward" if phase == "forward" else "backward", layer)
