"""The time of a kernel: a latency, and the longer of computing its FLOPs and moving its bytes (the roofline model).

    seconds = calls · (latency + max(FLOPs / (e · rate), bytes / (b · bandwidth)))

`e` and `b` are shares of the data sheet's numbers (memcalc/hardware/speed.py). Fused attention has a curve instead.
"""

from __future__ import annotations

from math import ceil, prod
from typing import TYPE_CHECKING, Final, NamedTuple

from memcalc.hardware.speed import GIVEN
from memcalc.timing.items import Bound, Part, Timed
from memcalc.units import MICRO

if TYPE_CHECKING:
    from collections.abc import Iterable

    from memcalc.estimation.compute import Computed, Moved
    from memcalc.hardware.speed import Speed
    from memcalc.inputs.gpu import GPU

_TERA: Final = 1e12
_TILE: Final = 128
_WIDTH: Final = 128
"""The width of heads, where a traced kernel does not tell it."""
_OF_CURVES: Final = ("bf16", "fp16")
"""The dtypes whose attention was measured; flash-attn takes no fp32."""
_HALVES: Final = 2  # a causal kernel computes half of the square, and the curves count half of it
ITEMSIZES: Final = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "tf32": 4}


class Unknown(NamedTuple):
    """The reason why a time is not known."""

    missing: str


class Rates(NamedTuple):
    """The FLOPs and the bytes that a GPU does in a second, as reached."""

    gpu: GPU
    speed: Speed
    kernels: str
    """The kernels of fused attention, by their name in the GPU's curves."""
    seq_len: int = 0
    """The tokens that a query sees, for attention whose sizes are not known."""

    def flops(self, dtype: str) -> float | None:
        """Return the FLOPs a second of the data sheet; None if they are not known."""
        found = self.gpu.dense_flops_per_second.get(dtype)
        return None if found is None else found.value * _TERA

    @property
    def bytes_per_second(self) -> float | None:
        """Return the bytes a second that a kernel moves; None if the GPU's bandwidth is not known."""
        bandwidth = self.gpu.memory_bandwidth
        return None if bandwidth is None else bandwidth.nbytes * self.speed.memory_efficiency.value


def products(computed: Iterable[Computed], rates: Rates) -> list[Timed] | Unknown:
    """Return the time of a step's matrix products; Unknown if a rate is not known."""
    made: list[Timed] = []
    for one in computed:
        timed = _attention(one, rates) if one.kind == "attention" else _product(one, rates)
        if isinstance(timed, Unknown):
            return timed
        made.append(timed)
    return made


def _product(one: Computed, rates: Rates) -> Timed | Unknown:
    rate, bandwidth = rates.flops(one.dtype), rates.bytes_per_second
    if rate is None or bandwidth is None:
        return Unknown(f"{rates.gpu.name} has no known {f'rate for {one.dtype}' if rate is None else 'bandwidth'}")
    speed, calls = rates.speed, one.calls
    e, latency = speed.gemm_efficiency, speed.gemm_latency
    flops, nbytes = one.flops / calls * _padding(one), _operands(one)
    computing, moving = flops / (e.value * rate), nbytes / bandwidth
    bound: Bound = "flops" if computing >= moving else "bandwidth"
    longer = (
        f"{flops:.4g} FLOP / ({e.value:g}·{rate / _TERA:g} TFLOP/s)"
        if computing >= moving
        else f"{nbytes:.4g} B / {bandwidth / 1e9:.0f} GB/s"
    )
    seconds = calls * (latency.value * MICRO + max(computing, moving))
    formula = f"{calls}·({latency.value:g} µs + {longer})"
    return Timed(one.name, _part(one.phase), seconds, 0.0, bound, calls, formula, speed.basis_of(e), e.source)


def _operands(one: Computed) -> int:
    """Return the bytes of a product's two operands and its result: (…, m, k) and (…, k, n) give (…, m, n)."""
    if len(one.sizes) < 3:
        return 0
    if one.kind == "convolution":
        return _moved_by_convolution(one.sizes) * ITEMSIZES[one.dtype]
    *batch, m, k, n = one.sizes
    return prod(batch) * (m * k + one.groups * k * n + m * n) * ITEMSIZES[one.dtype]


def _moved_by_convolution(sizes: tuple[int, ...]) -> int:
    """Return the elements of a convolution's input, weight and result. `sizes`: batch, channels of the result, its places,
    channels that each of them reads, and the kernel's sides. The input is taken to have as many places as the result."""
    batch, out, dims = sizes[0], sizes[1], (len(sizes) - 3) // 2
    places, read, kernel = prod(sizes[2 : 2 + dims]), sizes[2 + dims], prod(sizes[3 + dims :])
    channels = out if read == 1 else read  # one channel each: a kernel per channel
    return batch * places * (channels + out) + out * read * kernel


def _padding(one: Computed) -> float:
    """Return how many times the rows a grouped product computes: each expert's rows fill tiles of 128."""
    if one.groups == 1:
        return 1.0
    rows = max(1.0, one.sizes[0] / one.groups)
    return ceil(rows / _TILE) * _TILE / rows


def _attention(one: Computed, rates: Rates) -> Timed | Unknown:
    rate, speed = rates.flops(one.dtype), rates.speed
    keys, width = one.sizes[-2:] if len(one.sizes) > 1 else (rates.seq_len, _WIDTH)
    curve = speed.curve(width, rates.kernels) if one.dtype in _OF_CURVES else None
    given = speed.attention_efficiency
    if rate is None or (curve is None and given is None):
        return _product(one, rates)
    share = given or (curve.share(keys) if curve else 0.0)
    flops = one.flops / _HALVES if one.is_causal else one.flops
    seconds = flops / (share * rate)
    formula = f"{flops:.4g} FLOP / ({share:.3f}·{rate / _TERA:g} TFLOP/s)"
    return Timed(
        one.name,
        _part(one.phase),
        seconds,
        0.0,
        "flops",
        one.calls,
        formula,
        "given" if given else speed.basis,
        GIVEN if given or curve is None else curve.source,
    )


def _part(phase: str) -> Part:
    return phase  # type: ignore[return-value]


def streams(moved: Iterable[Moved], rates: Rates) -> list[Timed] | Unknown:
    """Return the time of a step's other kernels; Unknown if the GPU's bandwidth is not known."""
    bandwidth, speed = rates.bytes_per_second, rates.speed
    if bandwidth is None:
        return Unknown(f"{rates.gpu.name} has no known bandwidth")
    wait, b = speed.kernel_latency, speed.memory_efficiency
    basis = speed.basis_of(b)
    made: list[Timed] = []
    for one in moved:
        waiting, moving = one.calls * wait.value * MICRO, one.nbytes / bandwidth
        formula = f"{one.calls}·{wait.value:g} µs + {one.nbytes} B / {bandwidth / 1e9:.0f} GB/s"
        bound: Bound = "bandwidth" if moving >= waiting else "latency"
        made.append(
            Timed(one.name, _part(one.phase), waiting + moving, 0.0, bound, one.calls, formula, basis, b.source)
        )
    return made
