"""torch.autocast as on CUDA: how an op casts its arguments while autocast is on.

An op on the lower-precision list casts its arguments to 16 bits, one on the fp32 list to fp32. An op on the fp32-result
list takes its arguments as they are and returns fp32. An op on the promote list casts its arguments to the widest dtype
among them. All other ops compute in the dtypes that they are given. A weight is cast once per context. Sources:
aten/src/ATen/autocast_mode.h (the lists, WrapFunction_), autocast_mode.cpp (cached_cast).
"""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING, Any, Final, ParamSpec, TypeVar, cast

from memcalc.core.autograd import Constant
from memcalc.core.dtypes import DType, fp32, fp64
from memcalc.core.tensor import Autocast, Memory, Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

P = ParamSpec("P")
R = TypeVar("R")

_LISTS: Final[Mapping[str, str]] = {
    "lower precision": """
        _convolution _scaled_dot_product_flash_attention _thnn_fused_gru_cell _thnn_fused_lstm_cell addbmm addmm addmv addr
        baddbmm bmm chain_matmul conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d
        convolution einsum gru_cell linalg_multi_dot linalg_vecdot linear lstm_cell matmul mm mv prelu rnn_relu_cell
        rnn_tanh_cell scaled_dot_product_attention""",
    "fp32": """
        _upsample_bicubic2d_aa _upsample_bilinear2d_aa _upsample_nearest_exact1d _upsample_nearest_exact2d
        _upsample_nearest_exact3d acos asin binary_cross_entropy_with_logits cdist cosh cosine_embedding_loss
        cosine_similarity dist erfinv exp expm1 frobenius_norm group_norm hinge_embedding_loss huber_loss kl_div l1_loss
        layer_norm log log10 log1p log2 logsumexp margin_ranking_loss mse_loss multi_margin_loss multilabel_margin_loss
        native_layer_norm nll_loss nll_loss2d nuclear_norm pdist poisson_nll_loss pow reciprocal renorm rms_norm rsqrt sinh
        smooth_l1_loss soft_margin_loss softplus tan triplet_margin_loss upsample_bicubic2d upsample_bilinear2d
        upsample_linear1d upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_trilinear3d""",
    "fp32 result": "cumprod cumsum linalg_matrix_norm linalg_vector_norm log_softmax prod softmax sum",
    "promote": "addcdiv addcmul atan2 bilinear cross dot grid_sampler index_put scatter_add tensordot vdot",
}

POLICIES: Final[Mapping[str, str]] = {name: policy for policy, names in _LISTS.items() for name in names.split()}
"""The list that an op is on, by torch's name of the op."""


class WholeConstant(Constant):
    """A constant that is no view of another tensor: autocast casts it once, as a weight (cached_cast)."""

    __slots__ = ()
    cast_once = True


def autocast(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return the decorator of an op that torch calls `name`; the name must be on one of the lists.

    The op's first argument is a tensor or a tuple of tensors. An op with an fp32 result takes the dtype of its result
    as `dtype`.
    """
    policy = POLICIES[name]

    def decorate(op: Callable[P, R]) -> Callable[P, R]:
        @wraps(op)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            memory = _memory(args[0])
            state = memory.autocast
            if state is None:
                return op(*args, **kwargs)
            given: Sequence[Any] = args
            named: dict[str, Any] = kwargs
            if policy != "fp32 result":
                given = _cast(args, _dtype(policy, args, state), state)
            elif not any(isinstance(a, DType) for a in args):
                named = {"dtype": fp32, **kwargs}
            memory.autocast = None  # the op's own ops are not cast again (ExcludeDispatchKeyGuard)
            try:
                return op(*given, **named)  # type: ignore[arg-type]
            finally:
                memory.autocast = state

        return call

    return decorate


def _memory(first: Any) -> Memory:
    tensor: Tensor = first if isinstance(first, Tensor) else first[0]
    return tensor.storage.memory


def _dtype(policy: str, args: tuple[Any, ...], state: Autocast) -> DType:
    assert state.dtype is not None
    wide = policy == "fp32"
    if policy == "promote":
        wide = any(isinstance(a, Tensor) and a.dtype is fp32 for a in args)
    return fp32 if wide else state.dtype


def _cast(args: tuple[Any, ...], dtype: DType, state: Autocast) -> list[Any]:
    """Cast the arguments of a C++ call in the order in which gcc evaluates them: from the right."""
    return [_argument(a, dtype, state) for a in reversed(args)][::-1]


def _argument(a: Any, dtype: DType, state: Autocast) -> Any:
    """Cast one argument; a list of tensors is cast from the left."""
    if isinstance(a, tuple):
        return tuple([_argument(tensor, dtype, state) for tensor in cast("tuple[Any, ...]", a)])
    return _copy(a, dtype, state) if isinstance(a, Tensor) else a


def _copy(a: Tensor, dtype: DType, state: Autocast) -> Tensor:
    """Cast a tensor (cached_cast): the copy of a weight in the lower dtype is kept for the next op that needs it."""
    if a.dtype in (dtype, fp64) or not a.dtype.is_floating_point:
        return a
    leaf = a.node if a.node is not None and a.node.cast_once and dtype is state.dtype else None
    if leaf in state.copies:
        return state.copies[leaf]
    from memcalc.core.ops import elementwise

    memory = a.storage.memory
    name = f"{dtype} copy of {memory.rows[a.storage.index].label}"
    outer, memory.scope = memory.scope, name
    copy = elementwise.cast(a, dtype, name)
    memory.scope = outer
    copy.name = a.name
    if leaf is not None:
        state.copies[leaf] = copy
    return copy
