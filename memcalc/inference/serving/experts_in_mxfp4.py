"""gpt-oss's experts in vLLM: MXFP4 whose matrices are padded to the tiles of the kernel that a GPU gets (vllm 0.33).

The kernels by priority are FlashInfer's TRTLLM on a B200, Triton's on Hopper, and Marlin elsewhere
(vllm/model_executor/layers/fused_moe/oracle/mxfp4.py, `_get_priority_backends_for_gpt_oss`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from memcalc.core.dims import Dim
from memcalc.core.dtypes import fp32, uint8
from memcalc.families.base.replacing import Stored
from memcalc.inference.quantised_formats import MXFP4, up

if TYPE_CHECKING:
    from memcalc.inference.quantised_formats import Format
    from memcalc.inference.weights import Method
    from memcalc.inputs.gpu import GPU

_HOPPER: Final = "9"
_DATA_CENTER_BLACKWELL: Final = "10"
_BLOCK: Final = 32
"""The elements that share an exponent."""
_ROUNDED: Final = (
    "vllm 0.33 vllm/model_executor/layers/fused_moe/oracle/mxfp4.py: mxfp4_round_up_hidden_size_and_intermediate_size"
)
_LAID_OUT: Final = (
    "vllm 0.33 vllm/third_party/triton_kernels/tensor_details/layout_details/hopper_value.py and "
    "vllm/third_party/triton_kernels/tensor_details/layout_details/hopper_scale.py: swizzle_data"
)


class Rounded(NamedTuple):
    """MXFP4 of experts whose hidden and intermediate sizes are rounded up."""

    hidden: int
    intermediate: int
    source: str = _ROUNDED

    def stored(self, out: Dim, fan_in: Dim) -> tuple[Stored, ...]:
        """Return the tensors of one matrix. Raises ValueError for inputs that are no whole blocks."""
        return MXFP4().stored(self._rounded(out), self._rounded(fan_in))

    def stacked(self, experts: Dim, out: Dim, fan_in: Dim, halves: int) -> tuple[Stored, ...]:
        """Return the tensors of stacked experts. Gate and up are rounded each for itself."""
        return MXFP4().stacked(experts, self._rounded(out, halves), self._rounded(fan_in), halves)

    def _rounded(self, dim: Dim, halves: int = 1) -> Dim:
        step = self.hidden if dim.name == "hidden" else self.intermediate
        size = halves * step * -(-dim.size // (halves * step))
        return dim if size == dim.size else Dim(f"⌈{dim.name}⌉", size)


class OnHopper(NamedTuple):
    """MXFP4 of experts in Triton's layout: codes padded to 16 outputs and 32 bytes of inputs, exponents to 256 and 4."""

    source: str = _LAID_OUT

    def stored(self, out: Dim, fan_in: Dim) -> tuple[Stored, ...]:
        """Return the tensors of one matrix. Raises ValueError for inputs that are no whole blocks."""
        MXFP4().stored(out, fan_in)
        codes = _padded(out, 16), _padded(up(fan_in, 2), 32)
        scales = _padded(out, 256), _padded(up(fan_in, _BLOCK), 4)
        return Stored("blocks", codes, uint8), Stored("scales", scales, uint8)

    def stacked(self, experts: Dim, out: Dim, fan_in: Dim, halves: int) -> tuple[Stored, ...]:
        """Return the tensors of stacked experts."""
        return tuple(Stored(one.name, (experts, *one.shape), one.dtype) for one in self.stored(out, fan_in))


def on(gpu: GPU, method: Method) -> Method:
    """Return the method as vLLM stores it on a GPU: padded, with biases in fp32, and in the model's dtype for Marlin.

    Sources: vllm/model_executor/layers/fused_moe/oracle/mxfp4.py, convert_gpt_oss_weight_to_mxfp4_moe_kernel_format;
    vllm/model_executor/layers/quantization/utils/marlin_utils_fp4.py, permute_bias.
    """
    major = gpu.compute_capability.partition(".")[0]
    made: Format = Rounded(256, 128)
    if gpu.vendor == "amd":
        made = Rounded(256, 256)
    elif major == _HOPPER:
        made = OnHopper()
    in_fp32 = gpu.vendor == "amd" or major in (_HOPPER, _DATA_CENTER_BLACKWELL)
    return method._replace(format=made, rule=method.rule._replace(expert_bias=fp32 if in_fp32 else None))


def _padded(dim: Dim, step: int) -> Dim:
    size = -(-dim.size // step) * step
    return dim if size == dim.size else Dim(f"⌈{dim.name}⌉", size)
