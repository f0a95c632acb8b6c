"""Context parallelism by gathering the keys and values of all ranks (AttnFuncWithCPAndKVAllGather; section 3.3.2 of
arXiv 2407.21783).

Attention runs twice, for the early and the late chunk of a rank's tokens, over the keys that each may see. With a
causal mask that is 2·cp + 1 chunks of keys for both together, on any rank. The outputs of both are alive at once, so
they are one tensor here.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from memcalc.core.autograd import Node
from memcalc.core.dims import Dim, Shape
from memcalc.core.dtypes import fp32
from memcalc.core.ops.elementwise import recording
from memcalc.core.ops.shape import transpose
from memcalc.core.tensor import Tensor, new_tensor
from memcalc.megatron.context_parallel.layout import attends_in_parts, laid_out, send, whole_sequence

if TYPE_CHECKING:
    pass


def gathered_attention(q: Tensor, k: Tensor, v: Tensor, ranks: int) -> Tensor:
    """Compute attention. It saves q, k, v, the outputs of both chunks besides the joined one, and one fp32 logsumexp
    per query and head."""
    keys, values = gather(k, v, ranks)
    attends_in_parts(q, v.shape, 2 * ranks + 1, 4)  # of 2·cp chunks in total
    out = laid_out(q, q.shape, "attention output")
    outputs = laid_out(q, q.shape, "attention outputs of the chunks")
    logsumexp = new_tensor(q.memory, q.shape[:3], fp32, "attention logsumexp")
    del keys, values
    if recording(q, k, v):
        out.node = Node(q.memory, _gathered_backward, (q, k, v), (q, k, v, outputs, logsumexp), ranks)
    return transpose(out, 1, 2)


def gather(k: Tensor, v: Tensor, ranks: int, again: str = "") -> tuple[Tensor, Tensor]:
    """Return gathered keys and values: the chunks come by rank and are put in order by a copy."""
    keys, values = (_gathered(x, ranks, f"gathered {name}{again}") for x, name in ((k, "keys"), (v, "values")))
    keys = laid_out(keys, keys.shape, "keys in order")
    values = laid_out(values, values.shape, "values in order")
    return keys, values


def _gathered(x: Tensor, ranks: int, name: str) -> Tensor:
    shape = whole_of(x.shape, ranks)
    send(x, "all_gather", name, shape)
    return laid_out(x, shape, name)


@lru_cache(maxsize=1024)
def whole_of(shape: Shape, ranks: int) -> Shape:
    """Return the shape for all tokens of the sequence."""
    batch, heads, seq, width = shape
    return batch, heads, whole_sequence(seq, ranks), width


def _gathered_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    q, k, v, _outputs, _logsumexp = node.unpack()
    ranks: int = node.context
    query_gradient = laid_out(q, q.shape, "query gradient")
    sums = [laid_out(x, whole_of(x.shape, ranks), "sum of gradients") for x in (k, v)]
    _keys, _values = gather(k, v, ranks, ", again")
    attends_in_parts(q, v.shape, 2 * ranks + 1, 4, backward=True)
    _of_chunks = [laid_out(q, q.shape, "query gradients of the chunks")]
    _of_chunks += [new_tensor(x.memory, _seen(x.shape, ranks), x.dtype, "gradients of the chunks") for x in (k, v)]
    for i, x in enumerate((k, v)):
        sums[i] = laid_out(x, sums[i].shape, "gradients by rank")
    key_gradient, value_gradient = (
        scattered(whole, x, name) for whole, x, name in zip(sums, (k, v), ("keys", "values"), strict=True)
    )
    return [query_gradient, key_gradient, value_gradient]


@lru_cache(maxsize=1024)
def _seen(shape: Shape, ranks: int) -> Shape:
    """Return the shape of the keys that both chunks see: 2·cp + 1 chunks, each half of a rank's tokens."""
    batch, heads, seq, width = shape
    return batch, heads, seq, Dim(f"(2·cp+1)·{width.name}/2", (2 * ranks + 1) * width.size // 2)


def scattered(whole: Tensor, x: Tensor, name: str) -> Tensor:
    send(whole, "reduce_scatter", f"gradients of the {name}", whole.shape)
    return laid_out(x, x.shape, f"gradient of the {name}")
