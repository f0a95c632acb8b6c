"""The tensors that hold a quantised weight, as the libraries that read it lay them out.

Shapes are those of the checkpoint, which the modules have after loading. Kernels that repack the codes (Marlin, exllama) keep
their number.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from memcalc.core.dims import ONE_DIM, Dim
from memcalc.core.dtypes import bf16, fp8, fp16, fp32, int8, int32, int64, uint8
from memcalc.families.base.replacing import Stored

if TYPE_CHECKING:
    from memcalc.core.dims import Shape
    from memcalc.core.dtypes import DType

_WORD: Final = 32
"""The bits of an int32 that codes are packed into."""
_MX_BLOCK: Final = 32
"""The elements that share an exponent in MXFP4."""
_NV_BLOCK: Final = 16
"""The elements that share a scale in NVFP4."""


class Format(Protocol):
    """A way to store the weight of a linear layer, or the stacked weights of experts."""

    @property
    def source(self) -> str: ...

    def stored(self, out: Dim, fan_in: Dim) -> tuple[Stored, ...]:
        """Return the tensors of a weight (out, in). Raises ValueError if the format cannot hold one of these sizes."""
        ...

    def stacked(self, experts: Dim, out: Dim, fan_in: Dim, halves: int) -> tuple[Stored, ...]:
        """Return the tensors of the stacked weights of experts, (experts, out, in). `halves`: the projections that `out`
        has one after the other."""
        ...


def up(dim: Dim, divisor: int) -> Dim:
    """Return a dim divided by a number, rounded up."""
    if divisor == 1:
        return dim
    return Dim(
        f"{dim.name}/{divisor}" if not dim.size % divisor else f"⌈{dim.name}/{divisor}⌉", -(-dim.size // divisor)
    )


def groups(fan_in: Dim, size: int) -> Dim:
    """Return the groups of `size` inputs that share a scale; -1: one group. Raises ValueError if the inputs are no whole
    number of groups."""
    if size == -1:
        return Dim("groups", 1)
    if fan_in.size % size:
        raise ValueError(f"{fan_in.size} inputs are no whole number of groups of {size}")
    return Dim("groups", fan_in.size // size)


def _each(experts: Dim, of_one: tuple[Stored, ...]) -> tuple[Stored, ...]:
    return tuple(Stored(one.name, (experts, *one.shape), one.dtype) for one in of_one)


class BlockFP8(NamedTuple):
    """transformers' FineGrainedFP8: a byte a weight, and a scale for each block of (rows, columns), or for the tensor."""

    block: tuple[int, int] | None
    scale: DType = fp32
    """The dtype of the scales: fp32, or uint8 for exponents alone (`scale_fmt` ue8m0)."""
    has_input_scale: bool = False
    """True if inputs are scaled by a stored number (`activation_scheme` static)."""
    source: str = "transformers integrations/finegrained_fp8.py: FP8Linear, FP8Experts"

    def stored(self, out: Dim, fan_in: Dim) -> tuple[Stored, ...]:
        shape: Shape = () if self.block is None else (up(out, self.block[0]), up(fan_in, self.block[1]))
        made = Stored("", (out, fan_in), fp8), Stored("scale_inv", shape, self.scale if self.block else fp32)
        return (*made, Stored("activation_scale", (), fp32)) if self.has_input_scale else made

    def stacked(self, experts: Dim, out: Dim, fan_in: Dim, halves: int) -> tuple[Stored, ...]:
        rows, columns = (
            (ONE_DIM, ONE_DIM) if self.block is None else (up(out, self.block[0]), up(fan_in, self.block[1]))
        )
        if rows.size < halves:
            rows = Dim("halves", halves)
        made = (
            Stored("", (experts, out, fan_in), fp8),
            Stored("scale_inv", (experts, rows, columns), self.scale),
        )
        return (*made, Stored("activation_scale", (experts,), fp32)) if self.has_input_scale else made


class FP8(NamedTuple):
    """compressed-tensors' float-quantized: a byte a weight, and a scale in the model's dtype for the tensor, for each output
    (channel) or for each block."""

    strategy: str
    scale: DType
    block: tuple[int, int] = (128, 128)
    has_input_scale: bool = False
    source: str = "compressed-tensors quantization/lifecycle/initialize.py: initialize_qparams"
    code: DType = fp8

    def stored(self, out: Dim, fan_in: Dim) -> tuple[Stored, ...]:
        shapes: dict[str, Shape] = {
            "tensor": (ONE_DIM,),
            "channel": (out, ONE_DIM),
            "block": (up(out, self.block[0]), up(fan_in, self.block[1])),
        }
        made = Stored("", (out, fan_in), self.code), Stored("scale", shapes[self.strategy], self.scale)
        return (*made, Stored("input_scale", (ONE_DIM,), self.scale)) if self.has_input_scale else made

    def stacked(self, experts: Dim, out: Dim, fan_in: Dim, halves: int) -> tuple[Stored, ...]:
        part = Dim(f"{out.name}/{halves}", out.size // halves)
        one = self.stored(part, fan_in)  # every projection of every expert has scales of its own
        return _each(Dim(experts.name, experts.size * halves), one)


class FourBit(NamedTuple):
    """bitsandbytes' Linear4bit: two codes a byte, with the scales of `memcalc.quantized`."""

    nested: bool
    source: str = "bitsandbytes/functional.py: quantize_4bit (0.50)"

    def stored(self, out: Dim, fan_in: Dim) -> tuple[Stored, ...]:
        from memcalc.quantized.four_bit import FourBit as Kept

        made = Kept(self.nested, bf16, bf16).stored((out, fan_in))
        return tuple(one._replace(name=f".{one.name}" if one.name else "") for one in made)

    def stacked(self, experts: Dim, out: Dim, fan_in: Dim, halves: int) -> tuple[Stored, ...]:
        raise ValueError("bitsandbytes does not quantise stacked experts")


class Int8(NamedTuple):
    """bitsandbytes' Linear8bitLt: a byte a weight, and an fp32 scale for each output."""

    source: str = "bitsandbytes/nn/modules.py: Int8Params (0.50)"

    def stored(self, out: Dim, fan_in: Dim) -> tuple[Stored, ...]:
        return Stored("", (out, fan_in), int8), Stored("SCB", (out,), fp32)

    def stacked(self, experts: Dim, out: Dim, fan_in: Dim, halves: int) -> tuple[Stored, ...]:
        raise ValueError("bitsandbytes does not quantise stacked experts")


class Packed(NamedTuple):
    """compressed-tensors' pack-quantized: codes packed along the inputs into int32, scales in the model's dtype for each group
    of inputs, and the shape as int64; zero points, packed along the outputs, only if they are not symmetric."""

    bits: int
    group: int
    scale: DType = bf16
    symmetric: bool = True
    source: str = "compressed-tensors compressors/pack_quantized/base.py"

    def stored(self, out: Dim, fan_in: Dim) -> tuple[Stored, ...]:
        of = groups(fan_in, self.group)
        made = (
            Stored("packed", (out, _words(fan_in, self.bits)), int32),
            Stored("scale", (out, of), self.scale),
            Stored("shape", (Dim("2", 2),), int64),
        )
        return made if self.symmetric else (*made, Stored("zero_point", (_words(out, self.bits), of), int32))

    def stacked(self, experts: Dim, out: Dim, fan_in: Dim, halves: int) -> tuple[Stored, ...]:
        part = Dim(f"{out.name}/{halves}", out.size // halves)
        return _each(Dim(experts.name, experts.size * halves), self.stored(part, fan_in))


MARLIN_GROUPS: Final = (-1, 32, 64, 128)
"""The group sizes of vLLM's Marlin (MARLIN_SUPPORTED_GROUP_SIZES in vllm 0.33,
vllm/model_executor/layers/quantization/utils/marlin_utils.py)."""


class GPTQ(NamedTuple):
    """GPTQ: codes packed along the inputs, zero points along the outputs, fp16 scales, and the group of each input."""

    bits: int
    group: int
    source: str = "auto-gptq 0.7.1 nn_modules/qlinear; gptqmodel 7.7 nn_modules/qlinear: _register_gptq_buffers"

    def stored(self, out: Dim, fan_in: Dim) -> tuple[Stored, ...]:
        for dim in (fan_in, out):
            if dim.size % _WORD:
                raise ValueError(f"{dim.size} is no multiple of {_WORD}")
        of = groups(fan_in, self.group)
        return (
            Stored("qweight", (_words(fan_in, self.bits), out), int32),
            Stored("qzeros", (of, _words(out, self.bits)), int32),
            Stored("scales", (of, out), fp16),
            Stored("g_idx", (fan_in,), int32),
        )

    def stacked(self, experts: Dim, out: Dim, fan_in: Dim, halves: int) -> tuple[Stored, ...]:
        part = Dim(f"{out.name}/{halves}", out.size // halves)
        return _each(Dim(experts.name, experts.size * halves), self.stored(part, fan_in))


class AWQ(NamedTuple):
    """AWQ's GEMM version: codes and zero points packed along the outputs, and fp16 scales."""

    bits: int
    group: int
    source: str = "autoawq 0.2.9 modules/linear/gemm.py: WQLinear_GEMM"

    def stored(self, out: Dim, fan_in: Dim) -> tuple[Stored, ...]:
        if out.size % (_WORD // self.bits):
            raise ValueError(f"{out.size} outputs are no multiple of {_WORD // self.bits}")
        of, words = groups(fan_in, self.group), _words(out, self.bits)
        return (
            Stored("qweight", (fan_in, words), int32),
            Stored("qzeros", (of, words), int32),
            Stored("scales", (of, out), fp16),
        )

    def stacked(self, experts: Dim, out: Dim, fan_in: Dim, halves: int) -> tuple[Stored, ...]:
        part = Dim(f"{out.name}/{halves}", out.size // halves)
        return _each(Dim(experts.name, experts.size * halves), self.stored(part, fan_in))


class MXFP4(NamedTuple):
    """MXFP4 of gpt-oss's experts: two codes a byte, and an exponent of a byte for each 32 elements."""

    source: str = "transformers integrations/mxfp4.py: Mxfp4GptOssExperts, and the checkpoint's blocks and scales"

    def stored(self, out: Dim, fan_in: Dim) -> tuple[Stored, ...]:
        if fan_in.size % _MX_BLOCK:
            raise ValueError(f"{fan_in.size} inputs are no multiple of {_MX_BLOCK}")
        return Stored("blocks", (out, up(fan_in, 2)), uint8), Stored("scales", (out, up(fan_in, _MX_BLOCK)), uint8)

    def stacked(self, experts: Dim, out: Dim, fan_in: Dim, halves: int) -> tuple[Stored, ...]:
        return _each(experts, self.stored(out, fan_in))


class NVFP4(NamedTuple):
    """compressed-tensors' nvfp4-pack-quantized: two codes a byte, an fp8 scale for each 16 elements, an fp32 one for all."""

    has_input_scale: bool = True
    source: str = "compressed-tensors compressors/nvfp4/base.py"

    def stored(self, out: Dim, fan_in: Dim) -> tuple[Stored, ...]:
        if fan_in.size % _NV_BLOCK:
            raise ValueError(f"{fan_in.size} inputs are no multiple of {_NV_BLOCK}")
        made = (
            Stored("packed", (out, up(fan_in, 2)), uint8),
            Stored("scale", (out, up(fan_in, _NV_BLOCK)), fp8),
            Stored("global_scale", (ONE_DIM,), fp32),
        )
        return (*made, Stored("input_global_scale", (ONE_DIM,), fp32)) if self.has_input_scale else made

    def stacked(self, experts: Dim, out: Dim, fan_in: Dim, halves: int) -> tuple[Stored, ...]:
        part = Dim(f"{out.name}/{halves}", out.size // halves)
        return _each(Dim(experts.name, experts.size * halves), self.stored(part, fan_in))


def _words(dim: Dim, bits: int) -> Dim:
    """Return the int32 words that hold a dim's codes."""
    if _WORD % bits == 0:
        return up(dim, _WORD // bits)
    return Dim(f"⌈{dim.name}·{bits}/{_WORD}⌉", -(-dim.size * bits // _WORD))
