"""Rows of experts in DeepSpeed's Triton kernels (deepspeed/moe/ep_kernels.py, ops/triton_ops/swiglu_triton.py).

One kernel gathers rows into a block per expert, one gathers them back, one gates them.
"""

from __future__ import annotations

from functools import lru_cache

from memcalc.core.autograd import Node
from memcalc.core.dims import Dim
from memcalc.core.dtypes import boolean, int64
from memcalc.core.ops.elementwise import like, recording
from memcalc.core.tensor import Tensor, new_tensor


def _inverse_permutation(permuted_indices: Tensor, rows: Dim) -> Tensor:
    """Return a view of the first `rows` entries of the inverse permutation. Its block also has room for scattered
    padding."""
    memory, padded = permuted_indices.memory, permuted_indices.shape[0]
    _positions = new_tensor(memory, (padded,), int64, "positions")
    _indices = new_tensor(memory, (padded,), int64, "indices")
    _valid = new_tensor(memory, (padded,), boolean, "rows that are no padding")
    beyond = new_tensor(memory, (padded,), int64, "targets of padding")
    _targets = like(beyond, "targets")
    del beyond
    inverse = new_tensor(memory, (_together(rows, padded),), int64, "inverse permutation")
    return Tensor(inverse.storage, (rows,), inverse.strides, inverse.dtype)


def permuted(rows: Tensor, permuted_indices: Tensor) -> Tensor:
    """Compute permute_rows. It saves both permutations."""
    inverse = _inverse_permutation(permuted_indices, rows.shape[0])
    out = new_tensor(rows.memory, (permuted_indices.shape[0], rows.shape[1]), rows.dtype, "blocks of the experts")
    if recording(rows):
        out.node = Node(rows.memory, _gathered_backward, (rows,), (permuted_indices, inverse), "rows gradient")
    return out


def unpermuted(rows: Tensor, permuted_indices: Tensor, n_tokens: Dim) -> Tensor:
    """Compute unpermute_rows. It saves both permutations."""
    inverse = _inverse_permutation(permuted_indices, n_tokens)
    out = new_tensor(rows.memory, (n_tokens, rows.shape[1]), rows.dtype, "rows as they came")
    if recording(rows):
        out.node = Node(rows.memory, _gathered_backward, (rows,), (permuted_indices, inverse), "blocks gradient")
    return out


def _gathered_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    _permutations = node.unpack()
    shape, dtype = node.metadata[0]
    return [new_tensor(node.memory, shape, dtype, node.context)]


@lru_cache(maxsize=1024)
def _together(a: Dim, b: Dim) -> Dim:
    poly = tuple(x + y for x, y in zip(a.poly, b.poly, strict=True))
    return Dim(f"({a.name}+{b.name})", a.size + b.size, poly)  # type: ignore[arg-type]


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Compute _SwiGLUFn. It saves gate and up."""
    out = like(gate, "swiglu")
    if recording(gate, up):
        out.node = Node(gate.memory, _swiglu_backward, (gate, up), (gate, up))
    return out


def _swiglu_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    return [like(t, "swiglu gradient") for t in node.unpack()]


def placed(zeros: Tensor, where: Tensor, rows: Tensor) -> Tensor:
    """Compute `zeros[where] = rows`. It saves the indices; the result has the storage of `zeros`."""
    node = Node(zeros.memory, _placed_backward, (rows,), (where,)) if recording(rows) else None
    return Tensor(zeros.storage, zeros.shape, zeros.strides, zeros.dtype, node)


def _placed_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    _where = node.unpack()
    shape, dtype = node.metadata[0]
    return [new_tensor(node.memory, shape, dtype, "rows gradient")]
