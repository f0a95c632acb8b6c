"""torch.autocast on paper: CUDA's lists, and how long the copy of a weight lives."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from cuda_autocast import cuda_lists

from memcalc.core.autograd import Leaf, backward
from memcalc.core.checkpoint import checkpoint
from memcalc.core.dims import ONE_DIM, Dim
from memcalc.core.dtypes import bf16, fp16, fp32, fp64, int64
from memcalc.core.ops.autocast import POLICIES, autocast
from memcalc.core.ops.contraction import einsum
from memcalc.core.ops.convolution import depthwise_conv1d
from memcalc.core.ops.cumulative import cumsum
from memcalc.core.ops.elementwise import like, rsqrt, softmax, sum_last
from memcalc.core.ops.exponential import exp, expm1, softplus
from memcalc.core.ops.matmul import linear, matmul, weight_times
from memcalc.core.ops.shape import expand, transpose, unsqueeze
from memcalc.core.tensor import Autocast, Memory, Tensor, new_tensor

if TYPE_CHECKING:
    from collections.abc import Callable

TOKENS, IN, OUT = Dim("t", 5), Dim("in", 4), Dim("out", 6)


def weight_of(memory: Memory, name: str = "layers.*.fc.weight") -> Tensor:
    weight = new_tensor(memory, (OUT, IN), fp32, name, component="parameters")
    weight.name, weight.node = name, Leaf(memory, name, (OUT, IN), 0)
    return weight


def input_of(memory: Memory) -> Tensor:
    return new_tensor(memory, (TOKENS, IN), fp32, "x")


def alive(memory: Memory, name: str) -> int:
    """How many blocks of that name there are."""
    indices = [event for event in memory.log if event >= 0 and ~event not in memory.log]
    return sum(memory.rows[i].label == name for i in indices)


def made(memory: Memory, name: str) -> int:
    """How many blocks of that name there have been."""
    return sum(row.label == name for row in memory.rows)


COPY = "bf16 copy of layers.*.fc.weight"


def test_the_lists_are_those_of_torchs_header() -> None:
    assert {name.split(".")[0]: policy for name, policy in cuda_lists().items()} == POLICIES


def test_the_header_lists_what_torch_registers() -> None:
    """All but the op that autocast bans, two that only cuDNN has, and norm, which nothing here calls."""
    registered = torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCUDA")
    left_out = {"binary_cross_entropy", "cudnn_convolution", "cudnn_convolution_transpose", "norm"}
    names = {name.removeprefix("aten::") for name in registered}
    assert {name for name in names if name.split(".")[0] not in left_out} == set(cuda_lists())


def test_an_op_that_is_on_no_list_has_no_policy() -> None:
    with pytest.raises(KeyError):
        autocast("gelu")


def test_a_weight_is_cast_once_and_its_copy_lives_as_long_as_the_context() -> None:
    memory = Memory()
    weight = weight_of(memory)
    memory.grad_enabled = False  # autograd keeps nothing
    context = Autocast(memory, bf16)
    with context:
        assert linear(input_of(memory), weight).dtype is bf16
        assert linear(input_of(memory), weight).dtype is bf16
        assert (made(memory, COPY), alive(memory, COPY)) == (1, 1)
        assert (made(memory, "bf16 copy of x"), alive(memory, "bf16 copy of x")) == (2, 0)
    assert alive(memory, COPY) == 0
    with Autocast(memory, bf16):
        linear(input_of(memory), weight)
    assert made(memory, COPY) == 2


def test_what_autograd_saved_of_a_copy_outlives_the_context() -> None:
    memory = Memory()
    weight = weight_of(memory)
    with Autocast(memory, bf16):
        out = linear(weight_of(memory, "x"), weight)  # both want a gradient, so both are saved
    assert alive(memory, COPY) == 1
    del out
    assert alive(memory, COPY) == 0


def test_only_copies_in_the_lower_dtype_are_kept() -> None:
    memory = Memory()
    weight = new_tensor(memory, (OUT, IN), bf16, "weight")
    weight.node = Leaf(memory, "weight", (OUT, IN), 0)
    with Autocast(memory, bf16):
        rsqrt(weight)
        rsqrt(weight)
    assert made(memory, "fp32 copy of weight") == 2


@pytest.mark.parametrize("kind", ["frozen", "view", "result"])
def test_only_a_weight_that_is_trained_is_kept(kind: str) -> None:
    memory = Memory()
    weight = weight_of(memory)
    if kind == "frozen":
        weight.node = None
    elif kind == "view":
        weight = transpose(transpose(weight, 0, 1), 0, 1)
    else:
        weight = weight * 1.0
    with Autocast(memory, bf16):
        linear(input_of(memory), weight)
        linear(input_of(memory), weight)
    name = "bf16 copy of mul" if kind == "result" else COPY
    assert made(memory, name) == 2


def test_a_part_may_leave_autocast_and_the_copies_stay() -> None:
    memory = Memory()
    weight = weight_of(memory)
    with Autocast(memory, bf16):
        linear(input_of(memory), weight)
        with Autocast(memory, None):
            assert linear(input_of(memory), weight).dtype is fp32
        linear(input_of(memory), weight)
        assert made(memory, COPY) == alive(memory, COPY) == 1
    assert memory.autocast is None


def test_recomputation_casts_anew_and_drops_its_copies() -> None:
    memory = Memory()
    weight = weight_of(memory)
    x = weight_of(memory, "x") * 1.0

    def block(x: Tensor) -> Tensor:
        return linear(x, weight) * linear(x, weight)

    with Autocast(memory, bf16):
        out = checkpoint(memory, block, x)
        assert (made(memory, COPY), alive(memory, COPY)) == (1, 1)
    assert alive(memory, COPY) == 0
    backward(out)
    assert (made(memory, COPY), alive(memory, COPY)) == (2, 0)
    assert memory.autocast is None


def test_a_product_casts_before_it_copies() -> None:
    """A repeated k has no view of three dims, but its 16-bit copy has: nothing is copied in fp32."""
    memory = Memory()
    q = new_tensor(memory, (TOKENS, OUT, TOKENS, IN), fp32, "q")
    k = expand(unsqueeze(new_tensor(memory, (TOKENS, TOKENS, IN), fp32, "k"), 1), TOKENS, OUT, TOKENS, IN)
    with Autocast(memory, bf16):
        matmul(q, transpose(k, 2, 3), "scores")
    assert made(memory, "bf16 copy of k") == 1
    assert made(memory, "contiguous copy") == 0


def test_the_gradient_of_an_fp32_result_is_cast_to_a_dense_one() -> None:
    """sum's gradient is an expanded view, in fp32."""
    memory = Memory()
    x = new_tensor(memory, (TOKENS, IN), bf16, "x")
    x.node = Leaf(memory, "x", (TOKENS, IN), 0)
    with Autocast(memory, bf16):
        out = sum_last(x)
    assert out.node is not None
    (grad,) = out.node.run([like(out, "gradient")])
    assert grad is not None
    assert (grad.dtype, grad.strides) == (bf16, (IN.size, 1))


def test_a_dtype_that_is_asked_for_is_respected() -> None:
    memory = Memory()
    with Autocast(memory, bf16):
        narrow = new_tensor(memory, (TOKENS, IN), bf16, "narrow")
        assert softmax(narrow).dtype is fp32
        assert softmax(narrow, bf16).dtype is softmax(narrow, dtype=bf16).dtype is bf16


def test_an_op_that_is_made_of_others_casts_once() -> None:
    """Softmax inside an op of the lower-precision list has the dtype that it is given."""
    memory = Memory()
    with Autocast(memory, bf16):
        x = new_tensor(memory, (TOKENS, IN), fp32, "x")
        assert autocast("scaled_dot_product_attention")(softmax)(x).dtype is bf16
        assert softmax(x).dtype is fp32


def test_a_list_of_tensors_is_cast_from_the_left() -> None:
    memory = Memory()
    x, y = input_of(memory), new_tensor(memory, (OUT, IN), fp32, "y")
    with Autocast(memory, bf16):
        out = einsum("ti,oi->to", x, y)
    assert out.dtype is bf16
    assert [row.name for row in memory.rows if row.dtype is bf16][:2] == ["bf16 copy of x", "bf16 copy of y"]


def test_a_weight_that_is_the_first_factor_is_kept() -> None:
    memory = Memory()
    weight = weight_of(memory)
    with Autocast(memory, bf16):
        for _ in range(2):
            x = new_tensor(memory, (TOKENS, IN, TOKENS), fp32, "x")
            assert weight_times(weight, x, "product").dtype is bf16
    assert made(memory, COPY) == 1


@pytest.mark.parametrize("op", [exp, expm1, softplus])
def test_exponentials_are_fp32(op: Callable[[Tensor], Tensor]) -> None:
    memory = Memory()
    with Autocast(memory, bf16):
        assert op(new_tensor(memory, (TOKENS, IN), bf16, "x")).dtype is fp32


def test_a_cumulative_sum_is_fp32_and_its_gradient_is_cast_before_it_is_turned_round() -> None:
    memory = Memory()
    x = new_tensor(memory, (TOKENS, IN), bf16, "x")
    x.node = Leaf(memory, "x", (TOKENS, IN), 0)
    with Autocast(memory, bf16):
        out = cumsum(x, 0)
    assert out.dtype is fp32
    assert out.node is not None
    before = len(memory.rows)
    out.node.run([like(out, "gradient")])
    assert [row.dtype for row in memory.rows[before:]] == [fp32, bf16, bf16, bf16, bf16]


def test_a_convolution_along_a_sequence_is_16_bits() -> None:
    memory = Memory()
    x = new_tensor(memory, (TOKENS, IN, TOKENS), fp32, "x")
    with Autocast(memory, fp16):
        out = depthwise_conv1d(x, new_tensor(memory, (IN, ONE_DIM, OUT), fp32, "kernel"), None, 5)
    assert out.dtype is fp16


def test_integers_and_doubles_are_left_alone() -> None:
    memory = Memory()
    with Autocast(memory, bf16):
        for dtype in (fp64, int64):
            tensor = new_tensor(memory, (TOKENS, IN), dtype, "x")
            assert autocast("mm")(lambda a: a)(tensor) is tensor


@pytest.mark.parametrize(("dtypes", "wide"), [((bf16, bf16), bf16), ((bf16, fp32), fp32), ((fp32, fp32), fp32)])
def test_promotion_takes_the_widest(dtypes: tuple[object, object], wide: object) -> None:
    memory = Memory()

    @autocast("addcmul")
    def addcmul(a: Tensor, b: Tensor) -> list[Tensor]:
        return [a, b]

    tensors = [new_tensor(memory, (TOKENS, IN), dtype, "x") for dtype in dtypes]  # type: ignore[arg-type]
    with Autocast(memory, bf16):
        assert [t.dtype for t in addcmul(*tensors)] == [wide, wide]
    assert addcmul(*tensors) == tensors


def test_a_copy_is_named_after_what_it_copies() -> None:
    memory = Memory()
    weight = weight_of(memory)
    with Autocast(memory, fp16):
        memory.scope = "layers.*.mlp"
        product = linear(input_of(memory), weight) * 1.0
        softmax(product)
    labels = [row.label for row in memory.rows if "fp16 copy" in row.label]
    assert labels == ["fp16 copy of layers.*.fc.weight", "fp16 copy of layers.*.mlp: x"]
    assert memory.scope == "layers.*.mlp"
