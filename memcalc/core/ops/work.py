"""The matrix products of a run, counted as torch's own counter does (torch/utils/flop_counter.py).

A product of (m, k) and (k, n) is 2·m·n·k FLOPs. Fused attention is two such products per head in forward and five in
backward, which computes the scores again. All queries are counted with all keys, however many a causal mask leaves out.
The weight's gradient of a convolution with groups is counted with the channels of a group; torch's counter takes all
channels. Sums, norms, softmax, activations and the optimizer multiply no matrices and are not counted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcalc.core.tensor import Streamed, Work

if TYPE_CHECKING:
    from memcalc.core.autograd import Node
    from memcalc.core.dims import Shape
    from memcalc.core.dtypes import DType
    from memcalc.core.tensor import Memory, Tensor


def works(
    memory: Memory,
    name: str,
    factors: Shape,
    dtype: DType,
    products: int = 1,
    kind: str = "matmul",
    groups: int = 1,
    is_causal: bool = False,
) -> None:
    """Record equal products. `factors` are the dims of the result and the dim that is summed over, each once.

    (…, m, k) times (…, k, n) has the factors (…, m, k, n). A grouped product of `groups` experts has (rows, k, n).
    """
    phase = "recomputation" if memory.recomputing else memory.phase
    memory.work.append(Work(kind, memory.scope, name, phase, memory.layer, factors, dtype, products, groups, is_causal))


def works_backward(
    node: Node,
    name: str,
    factors: Shape,
    dtype: DType,
    kind: str = "matmul",
    first: int = 0,
    groups: int = 1,
) -> None:
    """Record the gradients of a product's two factors, the inputs `first` and `first + 1`, as far as they are
    needed."""
    products = node.needs(first) + node.needs(first + 1)
    if products:
        works(node.memory, name, factors, dtype, products, kind, groups)


def streams(name: str, *operands: Tensor) -> None:
    """Record a kernel that multiplies no matrices and that backward never comes by: autograd records all others. It
    reads or writes each operand once."""
    memory = operands[0].storage.memory
    phase = "recomputation" if memory.recomputing else memory.phase
    dense = tuple((tensor.shape, tensor.dtype) for tensor in operands)
    memory.streamed.append(Streamed(memory.scope, name, phase, memory.layer, dense))


def attends(memory: Memory, q: Shape, k: Shape, v: Shape, dtype: DType, is_causal: bool = True) -> None:
    """Record fused attention of (batch, heads, queries, width), (…, keys, width) and (…, keys, width of the values)."""
    _attention(memory, q, k, v, dtype, 1, 1, is_causal)


def attends_backward(memory: Memory, q: Shape, k: Shape, v: Shape, dtype: DType, is_causal: bool = True) -> None:
    """Record the backward of fused attention: the scores again, the gradients of scores and values, and those of
    queries and keys."""
    _attention(memory, q, k, v, dtype, 3, 2, is_causal)


def _attention(
    memory: Memory, q: Shape, k: Shape, v: Shape, dtype: DType, of_keys: int, of_values: int, is_causal: bool
) -> None:
    scores = (*q[:3], k[2])
    if q[3].size == v[3].size:
        works(memory, "", (*scores, q[3]), dtype, of_keys + of_values, "attention", is_causal=is_causal)
        return
    works(memory, "", (*scores, q[3]), dtype, of_keys, "attention", is_causal=is_causal)
    works(memory, "", (*scores, v[3]), dtype, of_values, "attention", is_causal=is_causal)
