"""The choice of a kernel by torch's scaled_dot_product_attention on a known GPU.

Flash attention takes 16 bits on Ampere and later, grouped heads too, and no mask. The memory-efficient kernel takes
fp32 and masks, but in torch 2.13 no grouped heads, and no bf16 before Ampere. The math kernel takes all other operands.
It makes the scores of all heads and keeps them for backward: for Llama 3 or Mistral in fp32 on any NVIDIA GPU, and in
16 bits on a V100 or T4.

Source: aten/src/ATen/native/transformers/cuda/sdp_utils.cpp (can_use_flash_attention, can_use_mem_efficient_attention,
minimum_gemm_alignment, check_prefer_cudnn_attention, check_cudnn_tensor_shapes) and sdp_utils_cpp.h
(check_batch_size_and_num_heads_dense). On Hopper and on data center Blackwell torch prefers cuDNN's kernel, with and without
a mask. It saves what flash attention saves, and 16 bytes of its dropout's state.
"""

from __future__ import annotations

from functools import cache, partial
from typing import TYPE_CHECKING, Final, NamedTuple

from memcalc.core.dtypes import DType, bf16, fp16, fp32
from memcalc.core.ops.attention import fused_attention, math_attention, scaled_dot_product_attention, takes_efficient
from memcalc.core.ops.autocast import autocast
from memcalc.core.ops.elementwise import recording

if TYPE_CHECKING:
    from memcalc.core.tensor import Tensor
    from memcalc.kernels import Kernels

_AMPERE: Final = "8.0"
_WIDEST: Final = 256
_CUDNN: Final = {9: 256, 10: 128}
"""The first part of a compute capability that prefers cuDNN -> the widest head that cuDNN takes."""
_DEEPSEEK: Final = (192, 128)
"""The widths of keys and values that cuDNN takes on Blackwell besides."""
_CUDNN_ROW: Final = 8
_TENSOR_CORE_BITS: Final = 128
_BITS: Final = {fp32: 32, fp16: 16, bf16: 16}


class Operands(NamedTuple):
    """The properties of the operands that the choice depends on."""

    dtype: DType
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    masked: bool


class Fused(NamedTuple):
    """The dtypes that each fused kernel of a GPU takes."""

    flash: tuple[DType, ...]
    efficient: tuple[DType, ...]
    aligned: tuple[DType, ...]
    """The dtypes whose rows must be multiples of 16 bytes for the memory-efficient kernel."""
    narrow: bool
    """True if flash attention has no backward for heads of 193 to 224."""
    cudnn: int = 0
    """The widest head that cuDNN takes; 0 where it is not preferred."""

    def kernel(self, given: Operands) -> str:
        """Return the kernel that takes the operands: "flash", "cudnn", "efficient" or "math"."""
        if self._takes_cudnn(given):
            return "cudnn"
        if self._takes_flash(given):
            return "flash"
        return "efficient" if self._takes_efficient(given) else "math"

    def _takes_flash(self, given: Operands) -> bool:
        if given.masked or given.dtype not in self.flash or given.head_dim != given.value_dim:
            return False
        return given.head_dim <= _WIDEST and not (self.narrow and 192 < given.head_dim <= 224)

    def _takes_cudnn(self, given: Operands) -> bool:
        widths = given.head_dim, given.value_dim
        if given.dtype is fp32 or any(width % _CUDNN_ROW for width in widths):
            return False
        return max(widths) <= self.cudnn or (self.cudnn > 0 and widths == _DEEPSEEK)

    def _takes_efficient(self, given: Operands) -> bool:
        if given.dtype not in self.efficient or given.heads != given.kv_heads:
            return False
        rows = _TENSOR_CORE_BITS // _BITS[given.dtype] if given.dtype in self.aligned else 1
        return given.head_dim % rows == 0 and given.value_dim % rows == 0


@cache
def fused_on(compute_capability: str) -> Fused | None:
    """Return the fused kernels of an NVIDIA GPU by its compute capability, such as "8.6". Return None for a GPU of
    another vendor: its kernels are not modelled."""
    major, point, minor = compute_capability.partition(".")
    if not point:
        return None
    if int(major) < 8:
        return Fused((), (fp16, fp32), (fp16,), False)  # Volta and Turing; older ones are not in the list of GPUs
    generation = (int(major), int(minor))
    narrow = (8, 6) <= generation <= (8, 9) or generation >= (12, 0)
    return Fused((bf16, fp16), (bf16, fp16, fp32), (bf16, fp16, fp32), narrow, _CUDNN.get(int(major), 0))


def fused_kernels(gpu: str | None) -> Fused | None:
    """Return the fused kernels of a GPU by name; None if no GPU is named, or one of another vendor.

    A GPU known only by its memory gets Ampere's kernels, which all later GPUs have.
    """
    from memcalc.inputs.gpu import load_gpu

    return None if gpu is None else fused_on(load_gpu(gpu).compute_capability or _AMPERE)


@cache
def on_gpu(kernels: Kernels, fused: Fused | None) -> Kernels:
    """Return the kernels with the attention of a GPU; unchanged if the GPU is unknown."""
    if fused is None:
        return kernels
    attend = autocast("scaled_dot_product_attention")(partial(_attend, fused=fused))
    return kernels._replace(replaced=(*kernels.replaced, (scaled_dot_product_attention, attend)))


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool = True, *, fused: Fused) -> Tensor:
    """Run scaled_dot_product_attention on a GPU. A bias that requires a gradient has one kernel on every GPU."""
    head_dim, value_dim = q.shape[3].size, v.shape[3].size
    kernel = fused.kernel(Operands(q.dtype, q.shape[1].size, k.shape[1].size, head_dim, value_dim, mask is not None))
    if kernel == "cudnn" and not (mask is not None and recording(mask)):
        from memcalc.core.ops.cudnn_attention import cudnn_attention

        return cudnn_attention(q, k, v, mask, causal)
    if kernel == "math":
        return math_attention(q, k, v, mask, causal)
    # With a mask, the CPU's flash kernel is used: its bytes are the same but for rows of padding
    # (memcalc.core.ops.attention).
    efficient = takes_efficient(q, v, mask) or (kernel == "efficient" and mask is None)
    return fused_attention(q, k, v, mask, efficient, causal)
