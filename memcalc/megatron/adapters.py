"""LoRA as Megatron-Bridge runs it (megatron/bridge/peft): two thin tensor-parallel matrices beside a frozen layer.

LoRALinear adds the adapter's output to the layer's. ParallelLinearAdapter is built of Megatron-Core's own layers, whatever the
adapted layer is:

- beside a column-parallel layer, A is cut along the rank: (rank/tp, in). Its output is gathered along the rank before B, which
  has the rows of the layer's part of the output: (out/tp, rank).
- beside a row-parallel layer, A has the columns of the layer's part of the input: (rank, in/tp). Its output is summed over the
  ranks. B is (out/tp, rank), and its output is gathered; with sequence parallelism each rank then keeps its shard.

Transformer Engine's fused norm and linear layer returns the norm's output to the adapter: with sequence parallelism the gathered
one, which A saves whole (transformer_engine/pytorch/module/layernorm_linear.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcalc.core.autograd import Node
from memcalc.core.dtypes import fp32
from memcalc.core.ops.elementwise import dropout, like, recording, scale
from memcalc.core.ops.work import works
from memcalc.core.tensor import Tensor, new_tensor
from memcalc.families.base.module import Weight
from memcalc.kernels.liger import packed
from memcalc.megatron.layers import TensorParallel, column_parallel, short_name
from memcalc.megatron.layout import part

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memcalc.core.dims import Dim
    from memcalc.families.base.module import Module

COMPONENT = "adapters"


def adapter_weights(base: Weight, rank: int, tensor_parallel: int) -> Iterator[Weight]:
    """Yield the two matrices of the adapter of a layer whose weight is `base`, that of one rank."""
    layer = base.name.removesuffix(".weight")
    whole = part("rank", rank, 1)
    fan_out, fan_in = base.shape
    if is_row_parallel(layer):
        down, up = whole, part(fan_out.name, fan_out.size, tensor_parallel)
    else:
        down, up = part("rank", rank, tensor_parallel), fan_out
    yield Weight(f"{layer}.adapter.linear_in.weight", (down, fan_in), COMPONENT)
    yield Weight(f"{layer}.adapter.linear_out.weight", (up, whole), COMPONENT)


def is_row_parallel(layer: str) -> bool:
    """Tell whether a layer gets a part of its input."""
    return layer.endswith(("linear_proj", "linear_fc2"))


def beside_column(m: Module, tp: TensorParallel, x: Tensor, p: float) -> Tensor:
    """Run ParallelLinearAdapter.forward beside a column-parallel layer. `x` has all tokens of a sequence.

    Without sequence parallelism A sums its input's gradient over the ranks; with it the layer does not
    (`disable_grad_reduce`).
    """
    linear_in, linear_out = m / "linear_in", m / "linear_out"
    group = _without_shards(tp)
    with m / "dropout":
        x = dropout(x, p)
    x = column_parallel(linear_in, _alone(tp) if tp.sequence_parallel else group, x, linear_in.weight())
    x = side_by_side(linear_in, tp, x, linear_out.weight().shape[1])
    x = column_parallel(linear_out, group, x, linear_out.weight())
    with m:
        return scale(x, "mul")


def beside_row(m: Module, tp: TensorParallel, x: Tensor, p: float, width: Dim) -> Tensor:
    """Run ParallelLinearAdapter.forward beside a row-parallel layer with outputs of `width`. `x` has a part of each token."""
    linear_in, linear_out = m / "linear_in", m / "linear_out"
    with m / "dropout":
        x = dropout(x, p)
    x = column_parallel(linear_in, _alone(tp), x, linear_in.weight())
    tp.send(x.memory, "all_reduce", f"output of {short_name(linear_in)}", x.shape, x.dtype)
    x = column_parallel(linear_out, _without_shards(tp), x, linear_out.weight())
    x = side_by_side(linear_out, tp, x, width)
    if tp.sequence_parallel:
        x = _own_shard(linear_out, tp, x)
    with m:
        return scale(x, "mul")


def _without_shards(tp: TensorParallel) -> TensorParallel:
    """Return the group for layers that are made without sequence parallelism."""
    return tp._replace(sequence_parallel=False, shard=tp.whole)


def _alone(tp: TensorParallel) -> TensorParallel:
    """Return the group for a layer that sends nothing."""
    return _without_shards(tp)._replace(ranks=1)


def side_by_side(m: Module, tp: TensorParallel, x: Tensor, whole: Dim) -> Tensor:
    """Run gather_from_tensor_model_parallel_region: gather along the first dim, then put the parts side by side. Backward
    copies the rank's own part and sends nothing."""
    if tp.ranks == 1:
        return x
    shape = (*x.shape[:-1], whole)
    with m:
        gathered = new_tensor(x.memory, shape, x.dtype, "gathered parts")
        tp.send(x.memory, "all_gather", f"output of {short_name(m)}", shape, x.dtype)
        out = new_tensor(x.memory, shape, x.dtype, "parts side by side")
        del gathered
        if recording(x):
            out.node = Node(x.memory, _side_by_side_backward, (x,))
    return out


def _side_by_side_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    shape, dtype = node.metadata[0]
    return [new_tensor(node.memory, shape, dtype, "own part of the gradient")]


def _own_shard(m: Module, tp: TensorParallel, x: Tensor) -> Tensor:
    """Run scatter_to_sequence_parallel_region: the rank's shard of the sequence, a view of all of it."""
    out = Tensor(x.storage, (x.shape[0], tp.shard, x.shape[2]), x.strides, x.dtype)
    if recording(x):
        out.node = Node(x.memory, _own_shard_backward, (x,), (), (tp, short_name(m)))
    return out


def _own_shard_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    tp, name = node.context
    shape, dtype = node.metadata[0]
    whole = new_tensor(node.memory, shape, dtype, "gathered gradient")
    tp.send(node.memory, "all_gather", f"output gradient of {name}", shape, dtype)
    return [whole]


def normed_column_parallel(
    norm: Module, m: Module, tp: TensorParallel, x: Tensor, *, rms: bool
) -> tuple[Tensor, Tensor]:
    """Run LayerNormLinear over frozen weights, with `return_layernorm_output`. Returns its output and the norm's, for all tokens
    of a sequence. It saves the norm's input and the rank's part of its output."""
    memory, weight = x.memory, m.weight()
    with norm:
        x = packed(x)
        ln_out = new_tensor(memory, x.shape, x.dtype, "norm")
        statistics = [new_tensor(memory, x.shape[:-1], fp32, f"norm {name}") for name in _statistics(rms)]
    ln_weights = [norm.weight()] if rms else [norm.weight(), norm.weight("bias")]
    whole = (x.shape[0], tp.whole, x.shape[2])
    with m:
        total = ln_out
        if tp.sequence_parallel:
            total = new_tensor(memory, whole, x.dtype, "gathered norm")
            tp.send(memory, "all_gather", f"input of {short_name(m)}", whole, x.dtype)
        works(memory, "", (*whole, weight.shape[0]), x.dtype)
        out = new_tensor(memory, (*whole[:2], weight.shape[0]), x.dtype, "column-parallel output")
        if recording(x):
            saved = (x, weight, *ln_weights, ln_out, *statistics)
            inputs, context = (x, weight, *ln_weights), (tp, short_name(m), len(ln_weights))
            node = Node(memory, _normed_column_parallel_backward, inputs, saved, context, outputs=2)
            out.node = node
            total = Tensor(total.storage, total.shape, total.strides, total.dtype, node, 1)
    return out, total


def _statistics(rms: bool) -> tuple[str, ...]:
    return ("rstd",) if rms else ("mean", "rstd")


def _normed_column_parallel_backward(node: Node, grads: list[Tensor]) -> list[Tensor | None]:
    """Return the gradient of the norm's input. The kernels make the norm's weights a gradient, too, which nobody gets.

    Of the gathered output of the norm no gradient comes to the input: the sum is made only where that is not gathered.
    """
    tp, name, count = node.context
    x, weight = node.unpack()[:2]
    memory, whole = node.memory, (x.shape[0], tp.whole, x.shape[2])
    works(memory, "", (*whole, weight.shape[0]), x.dtype)
    dgrad = gemm_out = new_tensor(memory, whole, x.dtype, "input gradient")
    if tp.sequence_parallel:
        dgrad = like(x, "shard of the input gradient")
        tp.send(memory, "reduce_scatter", f"input gradient of {name}", whole, x.dtype)
    else:
        tp.send(memory, "all_reduce", f"input gradient of {name}", whole, x.dtype)
        dgrad = like(x, "gradient of the norm's output")
    grad_x = like(x, "norm gradient")
    _of_weights = [new_tensor(memory, x.shape[-1:], x.dtype, "norm weight gradient") for _ in range(count)]
    del dgrad, gemm_out
    return [grad_x]
