"""The all-reduce of signs of DeepSpeed's 1-bit optimizers: deepspeed/runtime/comm/nccl.py, NcclBackend.compressed_allreduce, of
DeepSpeed 0.19.6, the last release that has it.

A tensor is sent as its signs, eight a byte, and one scale; what that leaves out is added to the next step's (error feedback). In
the first phase each rank gets its chunk of everyone's signs (all-to-all), in the second one everyone's averaged chunk
(all-gather); each has an error of its own. Sizes are padded so that a chunk of every rank is a whole number of bytes. cupy packs
the bits: its arrays are counted here as tensors, though they are in a pool of its own.
"""

from __future__ import annotations

from math import gcd
from typing import Final, NamedTuple

from memcalc.core.dims import Dim, Shape
from memcalc.core.dtypes import DType, boolean, fp32, uint8
from memcalc.core.tensor import Memory, Tensor
from memcalc.optimizers.base import streams, temporary, then

SOURCE: Final = "deepspeed/runtime/comm/nccl.py: NcclBackend.compressed_allreduce (0.19.6)"


class Compressed(NamedTuple):
    """The sizes of a tensor that `ranks` ranks reduce, in elements."""

    elements: int
    ranks: int

    @property
    def padded(self) -> int:
        """Return the elements with the padding: a multiple of the ranks and of eight for each."""
        multiple = self.ranks * (self.ranks * 8 // gcd(self.ranks, 8))
        return -(-self.elements // multiple) * multiple

    @property
    def chunk(self) -> int:
        """Return the elements that one rank averages."""
        return self.padded // self.ranks

    @property
    def packed(self) -> int:
        """Return the bytes of all signs."""
        return self.padded // 8

    @property
    def is_padded(self) -> bool:
        return self.padded != self.elements


def of(name: str, elements: int) -> Shape:
    """Return the shape of so many elements."""
    return (Dim(name, elements),)


def compressed_allreduce(memory: Memory, sizes: Compressed) -> Tensor | None:
    """Reduce a tensor of fp32. Return the padded buffer that the result is a part of; None if the tensor itself is it."""
    whole, chunk, packed = (
        of("padded", sizes.padded),
        of("padded/dp", sizes.chunk),
        of("padded/8", sizes.packed),
    )
    buffer = empty = None
    if sizes.is_padded:
        empty = temporary(memory, of("padding", sizes.padded - sizes.elements), fp32, "empty_tensor")
        buffer = temporary(memory, whole, fp32, "padded buffer")
        streams(memory, "buffer_m.cat", (of("elements", sizes.elements), fp32), (whole, fp32))
    streams(memory, "buffer_m.add_", (whole, fp32), (whole, fp32), (whole, fp32))
    worker_scale = _scale(memory, whole)
    _new_error(memory, whole)
    signs = _packed(memory, whole, packed)
    received = temporary(memory, packed, uint8, "recvbuf_sign")
    scales = temporary(memory, of("ranks", sizes.ranks), fp32, "recvbuf_scale")
    temporary(memory, packed, uint8, "stacked signs")
    server = _averaged(memory, whole, chunk, sizes.ranks)
    streams(memory, "compensated_server_m.add_", (chunk, fp32), (chunk, fp32), (chunk, fp32))
    server_scale = _scale(memory, chunk)
    _new_error(memory, chunk)
    server_signs = _packed(memory, chunk, of("padded/dp/8", sizes.chunk // 8))
    del server
    of_server = temporary(memory, packed, uint8, "recvbuf_sign_server")
    server_scales = temporary(memory, of("ranks", sizes.ranks), fp32, "recvbuf_scale_server")
    of_server = temporary(memory, packed, uint8, "stacked recvbuf_sign_server")
    _unpacked(memory, whole)
    streams(memory, "buffer_m.copy_", (whole, fp32), (whole, fp32))
    del worker_scale, signs, received, scales, server_scale, server_signs, of_server, server_scales, empty
    return buffer


def _scale(memory: Memory, shape: Shape) -> Tensor:
    """Return the norm over the root of the number of elements."""
    streams(memory, "norm", (shape, fp32))
    return then(temporary(memory, (), fp32, "norm"), "scale")


def _new_error(memory: Memory, shape: Shape) -> None:
    """Compute the error: the tensor less its signs times the scale. Its storage becomes the state's (Tensor.set_)."""
    signs = temporary(memory, shape, fp32, "sign()")
    _streamed(memory, "error", shape, fp32, fp32, fp32, fp32)
    positive = then(signs, "bool()", boolean)
    del signs
    numbers = then(positive, "float()", fp32)
    del positive
    scaled = then(numbers, "signs · scale")
    del numbers
    _streamed(memory, "signs", shape, boolean, boolean, *[fp32] * 8)
    error = then(scaled, "error")
    del scaled
    _streamed(memory, "error.sub", shape, fp32, fp32, fp32)
    del error


def _packed(memory: Memory, shape: Shape, packed: Shape) -> Tensor:
    """Return the signs, eight a byte; the tensor itself becomes its signs."""
    positive = temporary(memory, shape, boolean, "bool()")
    numbers = then(positive, "to(uint8)", uint8)
    del positive
    _streamed(memory, "packbits", shape, fp32, fp32, fp32, fp32, fp32, boolean, boolean, uint8, uint8)
    out = temporary(memory, packed, uint8, "packed signs")
    del numbers
    return out


def _averaged(memory: Memory, whole: Shape, chunk: Shape, ranks: int) -> Tensor:
    """Return the average of the ranks' chunks."""
    numbers = _unpacked(memory, whole)
    scales = temporary(memory, of("ranks", ranks), fp32, "stacked scales")
    out = temporary(memory, chunk, fp32, "compensated_server_m")
    streams(memory, "sum", (whole, fp32), (chunk, fp32))
    del numbers, scales
    return out


def _unpacked(memory: Memory, shape: Shape) -> Tensor:
    bits = temporary(memory, shape, uint8, "unpackbits")
    numbers = then(bits, "float()", fp32)
    _streamed(memory, "unpackbits", shape, uint8, uint8, fp32, fp32, fp32, fp32, fp32, fp32, fp32)
    del bits
    return numbers


def _streamed(memory: Memory, name: str, shape: Shape, *dtypes: DType) -> None:
    """Note kernels over a shape that read or write it once in each of these dtypes."""
    streams(memory, name, *((shape, dtype) for dtype in dtypes))
