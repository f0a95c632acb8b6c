"""How fast a GPU is in a training step: the share of its data sheet that kernels reach, and what starting one costs.

A GPU takes the file that names it: its numbers were measured there, but for those whose source says that they are assumed.
Another GPU of the same architecture takes that file's shares too, as assumed ones. The rest take assumed.json. Rates are
shares of the data sheet's, so they carry over between GPUs of one architecture.
"""

from __future__ import annotations

from functools import cache
from math import log2
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from memcalc.inputs.files import read_bundled
from memcalc.inputs.gpu import GPU, Quantity, named_gpu
from memcalc.units import MICRO

if TYPE_CHECKING:
    from collections.abc import Mapping

FOLDERS: Final = [Path(__file__).with_name("speeds")]
"""The folders with the files of measured speeds."""
_ASSUMED: Final = "assumed"
_TERA: Final = 1e12
Basis = Literal["measured", "assumed", "given"]
GIVEN: Final = "as given"
"""The source of a number that an option has given."""


class Bus(NamedTuple):
    """The measured time of a collective inside a node: `latency` seconds a call, and the bytes on the wire over
    `bytes_per_second`."""

    latency: float
    bytes_per_second: float
    source: str


class Curve(NamedTuple):
    """The rate of fused attention by sequence length, for one width of its heads. Half of the square is counted."""

    kernels: str
    head_dim: int
    shares: tuple[tuple[int, float], ...]
    """Sequence lengths, each with its share of the GPU's dense rate in 16 bits."""
    source: str

    def share(self, keys: float) -> float:
        """Return the share of the dense rate for a number of keys, linear in its logarithm between the measured ones.

        Shorter sequences lose half of the rate each time that they are half as long; longer ones gain nothing.
        """
        (first, low), (last, high) = self.shares[0], self.shares[-1]
        if keys <= first:
            return low * keys / first
        if keys >= last:
            return high
        for (a, x), (b, y) in zip(self.shares, self.shares[1:], strict=False):
            if a <= keys <= b:
                return x + (y - x) * (log2(keys) - log2(a)) / (log2(b) - log2(a))
        raise AssertionError(keys)


class Speed(NamedTuple):
    """The numbers that a step's time is made from, besides those of the data sheet."""

    basis: Basis
    gemm_efficiency: Quantity
    gemm_latency: Quantity
    memory_efficiency: Quantity
    kernel_latency: Quantity
    launch: Quantity
    attention: tuple[Curve, ...]
    buses: Mapping[tuple[int, str], Bus]
    attention_efficiency: float | None = None
    """The share of the dense rate that fused attention reaches, as given; None: as the curves say."""

    def given(self, gemm: float | None, attention: float | None, memory: float | None) -> Speed:
        """Return the speed with the shares that are given in the place of its own."""
        speed = self._replace(attention_efficiency=attention)
        if gemm is not None:
            speed = speed._replace(gemm_efficiency=Quantity(gemm, self.gemm_efficiency.unit, GIVEN))
        if memory is not None:
            speed = speed._replace(memory_efficiency=Quantity(memory, self.memory_efficiency.unit, GIVEN))
        return speed

    def basis_of(self, share: Quantity) -> Basis:
        """Return the basis of a time that one of the speed's shares decides."""
        if share.source == GIVEN:
            return "given"
        return "assumed" if share.source.startswith(_ASSUMED) else self.basis

    def bus(self, ranks: int, kind: str) -> Bus | None:
        """Return the measured bus of a collective over ranks of one node; None if nobody has measured it. The next larger
        group that was measured stands for a group in between."""
        sizes = sorted(size for size, of in self.buses if of == kind and size >= ranks)
        return self.buses[sizes[0], kind] if sizes else None

    def curve(self, head_dim: int, kernels: str) -> Curve | None:
        """Return the curve of attention whose heads are nearest in width, of these kernels if they were measured."""
        own = [one for one in self.attention if one.kernels == kernels] or list(self.attention)
        return min(own, key=lambda one: (abs(one.head_dim - head_dim), -one.head_dim), default=None)


@cache
def speed_of(name: str) -> Speed:
    """Return the speed of a GPU of the list, by its name."""
    gpu, files = named_gpu(name), _files()
    for content in files.values():
        if name in content["gpus"]:
            return _speed(content, "measured")
    for content in files.values():
        if gpu.architecture and gpu.architecture == content["architecture"]:
            return _speed(content, "assumed")
    return _speed(files[_ASSUMED], "assumed")


@cache
def _files() -> dict[str, Any]:
    found = {path.stem: path for folder in FOLDERS for path in folder.glob("*.json")}
    return {name: read_bundled(found[name]) for name in sorted(found)}


def _speed(content: dict[str, Any], basis: Basis) -> Speed:
    own = named_gpu(content["gpus"][0]) if content["gpus"] else None
    numbers = ("gemm_efficiency", "gemm_latency", "memory_efficiency", "kernel_latency", "launch")
    return Speed(
        basis,
        *(Quantity(**content[name]) for name in numbers),
        attention=tuple(_curve(one, own) for one in content["attention"]),
        buses={} if basis == "assumed" else {_group(one): _bus(one) for one in content["buses"]},
    )


def _group(content: dict[str, Any]) -> tuple[int, str]:
    return content["ranks"], content["collective"]


def _bus(content: dict[str, Any]) -> Bus:
    return Bus(content["latency_us"] * MICRO, content["gb_per_second"] * 1e9, content["source"])


def _curve(content: dict[str, Any], gpu: GPU | None) -> Curve:
    assert gpu is not None
    rate = gpu.dense_flops_per_second["bf16"].value
    shares = tuple((int(keys), teraflops / rate) for keys, teraflops in content["teraflops"].items())
    return Curve(content["kernels"], content["head_dim"], shares, content["source"])
