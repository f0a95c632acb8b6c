"""The time of a prefill and of a decode step: every kernel by a roofline, from the run's products, caches and collectives.

    seconds = latency + max(FLOPs / (e · rate), bytes / (b · bandwidth))

with the latencies and shares of `memcalc.hardware.speed`. A prefill is bound by FLOPs; a decode step reads all weights (of the
experts those that some token is sent to) and the cache once. transformers starts kernels one by one, which takes the CPU longer
than most of them run; vLLM and SGLang replay CUDA graphs, merge products of one input, and fuse what is between two products.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import dropwhile
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from memcalc.core.dims import evaluate, numel
from memcalc.estimation.compute import Computed
from memcalc.hardware.cost import NETWORK, SOURCE, Link, group_of, link_inside, seconds_of
from memcalc.hardware.cost import Unknown as NoLink
from memcalc.inference.heights import KV, STATE, On, alive
from memcalc.layout.collectives import wire_bytes
from memcalc.timing.kernels import ITEMSIZES, Rates, Unknown, products
from memcalc.units import MICRO

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from memcalc.core.tensor import Sent, StorageRow, Work
    from memcalc.timing.items import Bound

_TERA: Final = 1e12
_ROWS: Final = 16
"""The rows of a tile that tensor cores multiply, which each expert's rows fill."""
_NODE: Final = 8
"""The GPUs of a node."""
_LATENT_OUT: Final = "kv_b_proj"
Part = Literal["prefill", "decode"]


class Item(NamedTuple):
    """Equal kernels of one step."""

    part: Part
    name: str
    seconds: float
    bound: Bound
    calls: int
    formula: str
    basis: str
    source: str


class Engine(NamedTuple):
    """How an engine runs the kernels."""

    merges: bool
    """True if products of one input are one, and what is between two products is one kernel."""
    starts: bool
    """True if the CPU starts every kernel."""


TRANSFORMERS: Final = Engine(merges=False, starts=True)
SERVED: Final = Engine(merges=True, starts=False)


class Stored(NamedTuple):
    """A quantised weight as a product reads it."""

    share: float
    """The stored bytes over those of the model's dtype."""
    dtype: str | None = None
    """The dtype that it is multiplied in, if that is not the model's."""
    copied: bool = False
    """True if a product of several rows makes a copy in the model's dtype first."""


class Run(NamedTuple):
    """The numbers that the time of a step is made from, besides the step."""

    rates: Rates
    engine: Engine
    batch: int
    size: Callable[[StorageRow], int]
    """Returns the bytes of a block."""
    stored: Mapping[str, Stored]
    """Quantised weights by their modules' paths."""
    chosen: float
    """The share of the experts that a token is sent to."""
    tp: int


class _Gemm(NamedTuple):
    name: str
    path: str
    dtype: str
    batch: int
    """The number of products at once, each with operands of its own."""
    rows: int
    fan_in: int
    fan_out: int
    groups: int
    between: int = 0
    """The kernels of fused attention before it: products on both sides of one have different inputs."""


def step_items(part: Part, on: On, run: Run) -> list[Item] | Unknown:
    """Return the time of a step's kernels on one stage; Unknown if a rate or a link is not known."""
    works = [work for work in on.step.work if _runs(work.layer, on)]
    fused = [work for work in works if work.kind == "attention"]
    gemms = [_gemm(work, between, run) for between, work in _between_attention(works)]
    if part == "decode" and run.engine.merges:
        gemms = [_absorbed(one, run) for one in gemms]
    if run.engine.merges:
        gemms = _merged(gemms)
    made: list[Item] = []
    for one, calls in _counted([one._replace(between=0) for one in gemms]).items():
        item = _of_product(part, one, calls, run)
        if isinstance(item, Unknown):
            return item
        made.append(item)
    attention = _read(part, on, run) if part == "decode" and fused else _attention(part, fused, run)
    if isinstance(attention, Unknown):
        return attention
    made += attention
    others = _others(part, on, gemms, run)
    if isinstance(others, Unknown):
        return others
    made += others
    sent = _sent(part, [one for one in on.step.sent if _runs(one.layer, on)], run)
    if isinstance(sent, Unknown):
        return sent
    made += sent
    if run.engine.starts:
        made += _started(part, made, run)
    return made


def seconds_in(items: Sequence[Item]) -> float:
    """Return the seconds of all items."""
    return sum(item.seconds for item in items)


def _runs(layer: int | None, on: On) -> bool:
    """Tell whether a stage runs a layer. What is outside the layers counts on the last stage."""
    return layer in on.stage.layers if layer is not None else on.stage.last


# --- products of matrices


def _between_attention(works: Sequence[Work]) -> Iterator[tuple[int, Work]]:
    """Yield the products that are no fused attention, each with the number of such kernels before it."""
    before = 0
    for work in works:
        if work.kind == "attention":
            before += 1
        else:
            yield before, work


def _gemm(work: Work, between: int, run: Run) -> _Gemm:
    *batch, rows, fan_in, fan_out = (evaluate(dim.poly, run.batch, 1) for dim in work.factors)
    many = work.products
    for size in batch:
        many *= size
    return _Gemm(work.label, work.label, work.dtype.name, many, rows, fan_in, fan_out, work.groups, between)


def _absorbed(one: _Gemm, run: Run) -> _Gemm:
    """Return the product behind a latent as serving engines make it: of the new token alone, before and after attention over
    latents (vllm model_executor/layers/attention/mla_attention.py), instead of the keys and values of all tokens."""
    return one._replace(rows=run.batch) if one.path.endswith(_LATENT_OUT) else one


def _merged(gemms: Sequence[_Gemm]) -> list[_Gemm]:
    """Return the products with those of one module and one input made one: q, k and v; gate and up."""
    out: list[_Gemm] = []
    for one in gemms:
        last = out[-1] if out else None
        module = one.path.rpartition(".")[0]
        same = last is not None and last.path.rpartition(".")[0] == module and last[2:6] == one[2:6]
        same = same and last is not None and last.between == one.between
        if last is not None and same and one.groups == last.groups == 1 and one.path != last.path:
            name = f"{last.name}, {one.name.rpartition('.')[2]}"
            out[-1] = last._replace(name=name, path=one.path, fan_out=last.fan_out + one.fan_out)
        else:
            out.append(one)
    return out


def _counted(gemms: Sequence[_Gemm]) -> dict[_Gemm, int]:
    counts: dict[_Gemm, int] = defaultdict(int)
    for one in gemms:
        counts[one] += 1
    return counts


def _of_product(part: Part, one: _Gemm, calls: int, run: Run) -> Item | Unknown:
    stored = run.stored.get(one.path, Stored(1.0))
    dtype = stored.dtype or one.dtype
    rate, bandwidth = run.rates.flops(dtype), run.rates.bytes_per_second
    if rate is None or bandwidth is None:
        return Unknown(f"{run.rates.gpu.name} has no known {f'rate for {dtype}' if rate is None else 'bandwidth'}")
    e, latency = run.rates.speed.gemm_efficiency, run.rates.speed.gemm_latency
    itemsize, active = ITEMSIZES[one.dtype], _active(one, run)
    rows = one.rows if one.groups == 1 else max(one.rows, active * _ROWS)
    flops = 2.0 * one.batch * rows * one.fan_in * one.fan_out
    weight = one.batch * active * one.fan_in * one.fan_out * itemsize
    read = weight * stored.share + (2 * weight if stored.copied and one.rows > 1 else 0)
    nbytes = read + one.batch * one.rows * (one.fan_in + one.fan_out) * itemsize
    computing, moving = flops / (e.value * rate), nbytes / bandwidth
    bound: Bound = "flops" if computing >= moving else "bandwidth"
    longer = (
        f"{flops:.4g} FLOP / ({e.value:g}·{rate / _TERA:g} TFLOP/s)"
        if computing >= moving
        else f"{nbytes:.4g} B / {bandwidth / 1e9:.0f} GB/s"
    )
    seconds = calls * (latency.value * MICRO + max(computing, moving))
    formula = f"{calls}·({latency.value:g} µs + {longer})"
    return Item(part, one.name, seconds, bound, calls, formula, run.rates.speed.basis_of(e), e.source)


def _active(one: _Gemm, run: Run) -> float:
    """Return the experts that some token is sent to, if tokens choose alike: E · (1 − (1 − k/E)^tokens)."""
    if one.groups == 1 or not 0 < run.chosen < 1:
        return float(one.groups)
    tokens = one.rows / (run.chosen * one.groups)
    return one.groups * (1 - (1 - run.chosen) ** tokens)


# --- attention and caches


def _attention(part: Part, fused: Sequence[Work], run: Run) -> list[Item] | Unknown:
    counts: dict[Work, int] = defaultdict(int)
    for work in fused:
        counts[work._replace(layer=None)] += 1
    computed: list[Computed] = []
    for work, calls in counts.items():
        sizes = tuple(evaluate(dim.poly, run.batch, 1) for dim in work.factors)
        flops = 2 * work.products * calls * evaluate(numel(work.factors)[1], run.batch, 1)
        of = work.label, "forward", None, "attention", work.dtype.name, calls, flops, "", "exact", "", sizes
        computed.append(Computed(*of, is_causal=work.is_causal))  # type: ignore[arg-type]
    timed = products(computed, run.rates)
    if isinstance(timed, Unknown):
        return timed
    return [
        Item(
            part, f"{one.name}: attention", one.seconds, one.bound, round(one.calls), one.formula, one.basis, one.source
        )
        for one in timed
    ]


def _read(part: Part, on: On, run: Run) -> list[Item] | Unknown:
    """Return the reading of the caches in a decode step: keys and values once; states are written too."""
    bandwidth = run.rates.bytes_per_second
    if bandwidth is None:
        return Unknown(f"{run.rates.gpu.name} has no known bandwidth")
    b, wait = run.rates.speed.memory_efficiency, run.rates.speed.kernel_latency
    found: dict[str, int] = defaultdict(int)
    for row in alive(on):
        found[row.component] += run.size(row)
    out: list[Item] = []
    for component, times, name in ((KV, 1, "keys and values"), (STATE, 2, "recurrent states")):
        nbytes, calls = times * found[component], len(on.stage.layers)
        if nbytes:
            seconds = calls * wait.value * MICRO + nbytes / bandwidth
            formula = f"{calls}·{wait.value:g} µs + {nbytes} B / {bandwidth / 1e9:.0f} GB/s"
            out.append(Item(part, name, seconds, "bandwidth", calls, formula, run.rates.speed.basis_of(b), b.source))
    return out


# --- everything else


def _others(part: Part, on: On, gemms: Sequence[_Gemm], run: Run) -> list[Item] | Unknown:
    """Return the other kernels. Fused ones are one for each product, which reads what the last product wrote and writes what it
    reads. Otherwise each block that is no product's result is written by a kernel of its own, and every block is read once."""
    bandwidth, speed = run.rates.bytes_per_second, run.rates.speed
    if bandwidth is None:
        return Unknown(f"{run.rates.gpu.name} has no known bandwidth")
    itemsize = [one.batch * one.rows * ITEMSIZES[one.dtype] for one in gemms]
    results = sum(size * one.fan_out for size, one in zip(itemsize, gemms, strict=True))
    if run.engine.merges:
        calls = len(gemms)
        nbytes = results + sum(size * one.fan_in for size, one in zip(itemsize, gemms, strict=True))
    else:
        blocks = [run.size(row) for row in _made(on)]
        calls, nbytes = max(0, len(blocks) - len(gemms)), max(0, 2 * sum(blocks) - results)
    waiting, moving = calls * speed.kernel_latency.value * MICRO, nbytes / bandwidth
    bound: Bound = "bandwidth" if moving >= waiting else "latency"
    formula = f"{calls}·{speed.kernel_latency.value:g} µs + {nbytes} B / {bandwidth / 1e9:.0f} GB/s"
    b = speed.memory_efficiency
    return [Item(part, "other kernels", waiting + moving, bound, calls, formula, speed.basis_of(b), b.source)]


def _made(on: On) -> Iterator[StorageRow]:
    """Yield the blocks that a step allocates while it runs."""
    step = on.step
    start = next(iter(dropwhile(lambda one: one[1] == "", step.segments)), (0, "", None))[0]
    moments = on.moments()
    for place in range(start, len(step.log)):
        if step.log[place] >= 0 and moments[place]:
            yield step.rows[step.log[place]]


def _started(part: Part, items: Sequence[Item], run: Run) -> list[Item]:
    """Return the time that the GPU waits for the CPU."""
    launch = run.rates.speed.launch
    calls = sum(item.calls for item in items)
    seconds = calls * launch.value * MICRO - seconds_in(items)
    if seconds <= 0:
        return []
    formula = f"{calls}·{launch.value:g} µs less the time that the kernels run"
    return [Item(part, "the CPU starts kernels", seconds, "latency", 0, formula, "assumed", launch.source)]


def _sent(part: Part, sent: Sequence[Sent], run: Run) -> list[Item] | Unknown:
    if run.tp == 1 or not sent:
        return []
    gpu = run.rates.gpu
    group = group_of(run.tp, 1, max(run.tp, _NODE), _NODE)
    out: list[Item] = []
    for kind in sorted({one.kind for one in sent}):
        inside = link_inside(gpu, group, 1, kind)
        if isinstance(inside, NoLink):
            return Unknown(inside.missing)
        between = _network(run) if group.nodes > 1 else None
        if isinstance(between, Unknown):
            return between
        of = [one for one in sent if one.kind == kind]
        payload = sum(evaluate(numel(one.shape)[1], run.batch, 1) * one.dtype.itemsize for one in of)
        wire = wire_bytes(kind, run.tp, payload)
        seconds = seconds_of(kind, len(of), wire, group, inside, between)
        basis = "assumed" if inside.measured is None or between is not None else "measured"
        source = SOURCE if inside.measured is None else inside.measured.source
        rate = (between or inside).bytes_per_second
        formula = f"{len(of)} calls, {wire} B / {rate / 1e9:g} GB/s and their latencies"
        out.append(Item(part, f"{kind} over {run.tp} GPUs", seconds, "link", len(of), formula, basis, source))
    return out


def _network(run: Run) -> Link | Unknown:
    network = run.rates.gpu.network
    if network is None:
        return Unknown(f"no network is known for {run.tp} GPUs of {run.rates.gpu.full_name}")
    return Link("network", NETWORK * network.value * 1e9 / 8)
