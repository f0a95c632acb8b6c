"""Transformer Engine's linear layers in fp8 (module/linear.py, layernorm_linear.py, grouped_linear.py) over sizes, with what
they send.

The input is cast to fp8. Its columns are saved for the gradient of the weight, or with sequence parallelism and one scale for a
tensor the rank's shard of its rows, as columns cannot be gathered then. Weights in fp8 are kept for all micro-batches, so no
layer saves one of its own. Outputs, and gradients of inputs, have 16 bits. What Python's variables hold until a function returns
is held here, too: the gathered gradient of the input until backward ends.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from memcalc.core.autograd import Node
from memcalc.core.dtypes import fp8, fp32
from memcalc.core.ops.elementwise import like, recording
from memcalc.core.ops.work import works
from memcalc.core.tensor import Tensor, new_tensor
from memcalc.megatron.fp8 import Quantized, Recipe
from memcalc.megatron.layers import short_name

if TYPE_CHECKING:
    from memcalc.core.dims import Shape
    from memcalc.core.tensor import Memory
    from memcalc.families.base.module import Module
    from memcalc.megatron.layers import TensorParallel


class _Linear(NamedTuple):
    """A layer as its backward sees it."""

    recipe: Recipe
    tp: TensorParallel
    name: str
    statistics: int
    """The statistics of a norm that the layer has taken in; 0 without one."""
    norm_weights: int
    biased: bool
    keeps_input: bool
    """True if the input is saved in 16 bits, because something else saves it (`save_original_input`)."""


def column_parallel(
    m: Module,
    tp: TensorParallel,
    recipe: Recipe,
    x: Tensor,
    bias: Tensor | None = None,
    norm: tuple[Tensor, ...] = (),
    *,
    keeps_input: bool = False,
) -> Tensor:
    """Run TEColumnParallelLinear, or with the weights of a `norm` TELayerNormColumnParallelLinear: RMSNorm of one weight,
    LayerNorm of two. The product adds the bias."""
    weight, memory, shape = m.weight(), x.memory, x.shape
    whole = (shape[0], tp.whole, shape[2])
    gathers_rows = tp.sequence_parallel and not recipe.by_block
    kept: list[Tensor] = []
    with m:
        if norm:
            kept = [new_tensor(memory, shape[:-1], fp32, f"norm {kind}") for kind in ("mean", "rstd")[-len(norm) :]]
        given = recipe.quantized(memory, shape, columns=not gathers_rows and not keeps_input)
        if norm and not recipe.fuses_norms:
            _in_16_bits = new_tensor(memory, shape, x.dtype, "norm")
            del _in_16_bits
        total = given
        if tp.sequence_parallel:
            total = _gathered(memory, recipe, tp, given, whole, f"input of {short_name(m)}", columns=False)
            total = recipe.settled(memory, total, whole) if recipe.by_block else total
        works(memory, "", (*whole, weight.shape[0]), fp8)
        out = new_tensor(memory, (*whole[:2], weight.shape[0]), x.dtype, "column-parallel output")
        total = Quantized([], [])
        saved = [x] if keeps_input else given.rows if gathers_rows else given.columns
        given = total
        inputs = (x, weight, *norm, *(() if bias is None else (bias,)))
        if recording(*inputs):
            context = _Linear(recipe, tp, short_name(m), len(kept), len(norm), bias is not None, keeps_input)
            of_norm = [x, *kept] if norm else []
            out.node = Node(memory, _column_parallel_backward, inputs, (weight, *of_norm, *saved), context)
    return out


def _column_parallel_backward(node: Node, grads: list[Tensor]) -> list[Tensor | None]:
    layer: _Linear = node.context
    recipe, tp, memory, grad = layer.recipe, layer.tp, node.memory, grads[0]
    weight, *saved = node.unpack()
    shape, dtype = node.metadata[0]
    whole = (shape[0], tp.whole, shape[2])
    bias_gradient = [new_tensor(memory, (grad.shape[-1],), dtype, "bias gradient")] if layer.biased else []
    of_grad = recipe.quantized(memory, grad.shape)
    works(memory, "", (*whole, weight.shape[0]), fp8, 2)
    if layer.keeps_input:
        by_rows = not recipe.by_block
        given = recipe.quantized(memory, shape, rows=by_rows, columns=not (tp.sequence_parallel and by_rows))
    else:
        given = Quantized([], [])
    total = given
    if tp.sequence_parallel:
        total = _gathered(memory, recipe, tp, given, whole, f"input of {layer.name}, again", columns=recipe.by_block)
    gemm_out = new_tensor(memory, whole, dtype, "input gradient")
    grad_x = gemm_out
    if tp.sequence_parallel:
        grad_x = new_tensor(memory, shape, dtype, "shard of the input gradient")
        tp.send(memory, "reduce_scatter", f"input gradient of {layer.name}", whole, dtype)
    else:
        tp.send(memory, "all_reduce", f"input gradient of {layer.name}", whole, dtype)
    total = recipe.settled(memory, total, whole) if tp.sequence_parallel else total
    weight_gradient = tp.gradient_of(weight)
    del total, given, saved
    of_norm: list[Tensor | None] = []
    if layer.norm_weights:
        node.saved = node.saved[: 2 + layer.statistics]  # the input in fp8 is cleared
        grad_x = new_tensor(memory, shape, dtype, "norm gradient")
        of_norm = [new_tensor(memory, shape[-1:], dtype, "norm weight gradient") for _ in range(layer.norm_weights)]
    del of_grad
    return [grad_x, weight_gradient, *of_norm, *bias_gradient]


def row_parallel(m: Module, tp: TensorParallel, recipe: Recipe, x: Tensor, *, keeps_input: bool) -> Tensor:
    """Run TERowParallelLinear. `keeps_input`: it saves its input in 16 bits, which attention has saved anyway. The next kernel
    adds the bias."""
    weight, memory = m.weight(), x.memory
    shape = (x.shape[0], tp.whole, weight.shape[0])
    with m:
        given = recipe.quantized(memory, x.shape, columns=not keeps_input)
        works(memory, "", (*shape, weight.shape[1]), fp8)
        out = gemm_out = new_tensor(memory, shape, x.dtype, "row-parallel output")
        if tp.sequence_parallel:
            out = new_tensor(memory, (x.shape[0], tp.shard, weight.shape[0]), x.dtype, "shard of the sum")
            tp.send(memory, "reduce_scatter", f"output of {short_name(m)}", shape, x.dtype)
        else:
            tp.send(memory, "all_reduce", f"output of {short_name(m)}", shape, x.dtype)
        saved = [x] if keeps_input else given.columns
        del given, gemm_out
        if recording(x, weight):
            context = _Linear(recipe, tp, short_name(m), 0, 0, False, keeps_input)
            out.node = Node(memory, _row_parallel_backward, (x, weight), (weight, *saved), context)
    return out


def _row_parallel_backward(node: Node, grads: list[Tensor]) -> list[Tensor | None]:
    layer: _Linear = node.context
    recipe, tp, memory = layer.recipe, layer.tp, node.memory
    weight, *_saved = node.unpack()
    shape, dtype = node.metadata[0]
    whole = (shape[0], tp.whole, weight.shape[0])
    if tp.sequence_parallel:
        by_block = recipe.by_block
        own = recipe.quantized(memory, grads[0].shape, columns=by_block)
        of_grad = _gathered(memory, recipe, tp, own, whole, f"output gradient of {layer.name}", columns=True)
        of_grad = recipe.settled(memory, of_grad, whole)
        del own
    else:
        of_grad = recipe.quantized(memory, whole)
    works(memory, "", (*whole, weight.shape[1]), fp8, node.needs(0) + node.needs(1))
    again = recipe.quantized(memory, shape, rows=not recipe.by_block) if layer.keeps_input else None
    grad_x = new_tensor(memory, shape, dtype, "input gradient") if node.needs(0) else None
    weight_gradient = tp.gradient_of(weight) if node.needs(1) else None
    del of_grad, again
    return [grad_x, weight_gradient]


def grouped_linear(m: Module, recipe: Recipe, x: Tensor, *, fused: bool, keeps_input: bool) -> Tensor:
    """Run TEGroupedLinear over rows of all experts. `fused`: the kernel that computes the weights' gradients adds them to the
    main gradients. `keeps_input`: the input is recomputed, and its columns with it."""
    weight, memory = m.weight(), x.memory
    name = weight.name.removesuffix(".weight")
    given = recipe.quantized(memory, x.shape, columns=not keeps_input)
    works(memory, name, (*x.shape, weight.shape[1]), fp8, kind="grouped matmul", groups=weight.shape[0].size)
    out = new_tensor(memory, (x.shape[0], weight.shape[1]), x.dtype, "grouped output")
    if recording(x, weight):
        saved = [x] if keeps_input else given.columns
        out.node = Node(
            memory, _grouped_linear_backward, (x, weight), (weight, *saved), (recipe, name, fused, keeps_input)
        )
    return out


def _grouped_linear_backward(node: Node, grads: list[Tensor]) -> list[Tensor | None]:
    recipe, name, fused, keeps_input = node.context
    weight, *_saved = node.unpack()
    shape, dtype = node.metadata[0]
    memory, products = node.memory, node.needs(0) + node.needs(1)
    of_grad = recipe.quantized(memory, grads[0].shape)
    works(memory, name, (*shape, weight.shape[1]), fp8, products, "grouped matmul", groups=weight.shape[0].size)
    grad_x = new_tensor(memory, shape, dtype, "input gradient") if node.needs(0) else None
    weight_gradient = like(weight, "weight gradient") if node.needs(1) and not fused else None
    again = recipe.quantized(memory, shape, rows=not recipe.by_block) if keeps_input else None
    del of_grad, again
    return [grad_x, weight_gradient]


def _gathered(
    memory: Memory, recipe: Recipe, tp: TensorParallel, own: Quantized, whole: Shape, name: str, *, columns: bool
) -> Quantized:
    """Gather the shards of a tensor in fp8: its rows, or with `columns` what products of a gradient need. With a scale for
    each block both ways are gathered that are there; else the columns are made of the gathered rows."""
    by_block = recipe.by_block
    rows = bool(own.rows) or not by_block
    made = recipe if by_block or not columns else recipe._replace(any_layout=False)  # `make_empty` asks no GPU
    out = made.quantized(memory, whole, rows=rows, columns=columns)
    for kind in ("rows",) * rows + ("columns",) * (columns and by_block):
        _send(recipe, memory, tp, whole, name, kind)
    return out


def _send(recipe: Recipe, memory: Memory, tp: TensorParallel, whole: Shape, name: str, kind: str) -> None:
    for shape, dtype, _ in recipe.parts(whole, kind):
        what = "" if dtype is fp8 else ", scales"
        tp.send(memory, "all_gather", f"{name}{what}", shape, dtype)
