"""Context parallelism by gathering keys and values, with kernels that take the batch first (AttnFuncWithCPAndKVAllGather with
`qkv_format` bshd), on the first rank.

Keys and values are gathered along the sequence, so each chunk of queries copies those that it sees to the kernel's layout. The
first rank's late chunk sees all of them, so no rank has larger copies. Its early chunk sees one of 2·cp chunks.
"""

from __future__ import annotations

from memcalc.core.autograd import Node
from memcalc.core.dims import Shape
from memcalc.core.dtypes import fp32
from memcalc.core.ops.elementwise import recording
from memcalc.core.ops.shape import transpose
from memcalc.core.tensor import Tensor, new_tensor
from memcalc.megatron.context_parallel.gathered import gather, scattered, whole_of
from memcalc.megatron.context_parallel.layout import Laid, attends_in_parts, laid_out, share


def gathered_attention_by_batch(q: Tensor, k: Tensor, v: Tensor, ranks: int, incoming: Laid) -> Tensor:
    """Compute attention. It saves q, copies of k and v by token, and each chunk's output and fp32 logsumexp. `incoming` lays
    out the gradient that backward is given."""
    k_by_token, v_by_token = laid_out(k, k.shape, "keys by token"), laid_out(v, v.shape, "values by token")
    keys, values = gather(k_by_token, v_by_token, ranks)
    attends_in_parts(q, v.shape, 2 * ranks + 1, 4)  # of 2·cp chunks in total
    out = laid_out(q, q.shape, "attention output")
    of_chunks: list[Tensor] = []
    chunk = _Chunk()
    for seen in _seen(ranks):
        chunk.copy(q, k, v, seen)
        of_chunks.append(_half(q, "attention output of a chunk"))
    of_chunks.append(new_tensor(q.memory, q.shape[:3], fp32, "attention logsumexp"))
    del keys, values, chunk
    if recording(q, k, v):
        saved = (q, k_by_token, v_by_token, *of_chunks)
        out.node = Node(q.memory, _backward, (q, k, v), saved, (ranks, incoming))
    return transpose(out, 1, 2)


def _seen(ranks: int) -> tuple[int, int]:
    """Return the chunks of keys that the first rank's two chunks of queries see."""
    return 1, 2 * ranks


class _Chunk:
    """The variables of a step: a chunk of queries, and what it sees of keys and values."""

    def __init__(self) -> None:
        self.query: Tensor | None = None
        self.pair: list[Tensor] = []

    def copy(self, q: Tensor, k: Tensor, v: Tensor, seen: int) -> None:
        self.query = _half(q, "queries of a chunk")
        self.pair.clear()
        self.pair += [_of_seen(x, seen, "keys or values of a chunk") for x in (k, v)]


def _of_half(x: Tensor) -> Shape:
    return (*x.shape[:3], share(x.shape[3], 1, 2))


def _half(x: Tensor, name: str) -> Tensor:
    return laid_out(x, _of_half(x), name)


def _of_seen(x: Tensor, chunks: int, name: str) -> Tensor:
    return new_tensor(x.memory, (*x.shape[:3], share(x.shape[3], chunks, 2)), x.dtype, name)


def _backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    q, k, v, *_of_chunks = node.unpack()
    ranks: int = node.context[0]
    incoming: Laid = node.context[1]
    _gradient = incoming(grads[0])
    query_gradient = laid_out(q, q.shape, "query gradient")
    sums = [laid_out(x, whole_of(x.shape, ranks), "sum of gradients") for x in (k, v)]
    _keys, _values = gather(k, v, ranks, ", again")
    attends_in_parts(q, v.shape, 2 * ranks + 1, 4, backward=True)
    chunk, of_queries, of_pairs = _Chunk(), list[Tensor](), list[list[Tensor]]()
    _of_chunk: Tensor | None = None
    for i, seen in enumerate(_seen(ranks)):
        chunk.copy(q, k, v, seen)
        _of_chunk = _half(q, "output gradient of a chunk")
        of_queries.append(_half(q, "query gradient of a chunk"))
        of_pairs.append([_of_seen(x, seen, "gradient of a chunk") for x in (k, v)])
        if i:
            of_pairs[i - 1] = _by_token(of_pairs[i - 1])
    _last_arguments = of_pairs[-1]  # of the kernel, which the frame has to its end
    of_pairs[-1] = _by_token(of_pairs[-1])
    for i, x in enumerate((k, v)):
        sums[i] = laid_out(x, sums[i].shape, "gradients by rank")
    for i, (x, name) in enumerate(((k, "keys"), (v, "values"))):
        sums[i] = scattered(sums[i], x, name)
    for i, x in enumerate((k, v)):
        sums[i] = laid_out(x, x.shape, "gradient by sequence")
    return [query_gradient, *sums]


def _by_token(pair: list[Tensor]) -> list[Tensor]:
    return [new_tensor(x.memory, x.shape, x.dtype, "gradient of a chunk, by token") for x in pair]
