"""What single ops allocate, against the allocator's history of the same ops on a GPU (tests/measured_ops)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from memcalc.core.autograd import Leaf, Node
from memcalc.core.dims import Dim, numel
from memcalc.core.dtypes import bf16, fp32, int64
from memcalc.core.ops.attention_scratch import cudnn_scratch, efficient_scratch, flash_scratch
from memcalc.core.ops.elementwise import softmax
from memcalc.core.ops.norm import layer_norm
from memcalc.core.ops.reduction import reduction_scratch
from memcalc.core.ops.routing import index
from memcalc.core.tensor import Memory, Tensor, new_tensor

if TYPE_CHECKING:
    from collections.abc import Callable

DTYPES = {"bf16": bf16, "fp32": fp32}
RECORDS = [
    json.loads(path.read_text())
    for path in sorted((Path(__file__).resolve().parents[2] / "measured_ops").glob("*.json"))
]


def of(op: str, **wanted: Any) -> list[dict[str, Any]]:
    """The recorded calls of an op."""
    found = [one for record in RECORDS for one in record["ops"] if one["op"] == op and wanted.items() <= one.items()]
    assert found, op
    return found


def tensor(memory: Memory, sizes: tuple[int, ...], dtype: Any, *, wants_gradient: bool = True) -> Tensor:
    out = new_tensor(memory, tuple(Dim(f"d{i}", size) for i, size in enumerate(sizes)), dtype, "operand")
    if wants_gradient:
        out.node = Leaf(memory, "leaf", out.shape, None)
    return out


def logged(memory: Memory, start: int) -> list[int]:
    """The bytes that have come (positive) and gone (negative) since a place in the log."""
    sizes = [numel(row.shape)[0] * row.dtype.itemsize for row in memory.rows]
    return [sizes[i] if i >= 0 else -sizes[~i] for i in memory.log[start:]]


def events_of_backward(forward: Callable[[Tensor], Tensor], sizes: tuple[int, ...], dtype: Any) -> list[int]:
    memory = Memory()
    out = forward(tensor(memory, sizes, dtype))
    grad = new_tensor(memory, out.shape, out.dtype, "gradient")
    node = out.node
    assert isinstance(node, Node)
    start = len(memory.log)
    kept = node.run([grad])
    found = logged(memory, start)
    del kept
    return found


def test_softmax_multiplies_its_gradient_by_its_result_first() -> None:
    for one in of("softmax backward"):
        assert events_of_backward(softmax, (one["rows"], one["cols"]), DTYPES[one["dt"]]) == one["events"]


def test_layer_norm_keeps_its_statistics_in_fp32() -> None:
    for one in of("layer_norm"):
        memory = Memory()
        rows, columns = one["rows"], one["cols"]
        x = tensor(memory, (rows, columns), DTYPES[one["dt"]])
        weight, bias = (tensor(memory, (columns,), x.dtype) for _ in range(2))
        start = len(memory.log)
        kept = layer_norm(x, weight, bias)
        assert logged(memory, start) == one["events"]
        del kept


@pytest.mark.parametrize("op", ["sum over rows", "norm over rows"])
def test_partial_sums(op: str) -> None:
    largest = 0
    for one in of(op):
        itemsize = DTYPES[one["dt"]].itemsize
        # The result comes first and stays. A result in 16 bits of a tensor beyond 2 GiB also has a buffer in fp32.
        freed = {-event for event in one["events"] if event < 0} - {4 * one["cols"]}
        wanted = max((nbytes for nbytes in freed if nbytes > 4096), default=0)
        assert reduction_scratch(one["rows"], one["cols"], itemsize) == wanted, one
        largest = max(largest, wanted)
    assert largest > 2**27


def scratch(one: dict[str, Any], seq: int, run: Callable[[Tensor, Tensor, Tensor], object]) -> list[int]:
    """The bytes of what a kernel's backward takes, for `seq` queries."""
    memory, dtype = Memory(), DTYPES[one["dt"]]
    batch, kv_heads, keys = one["b"], one["kv"], one["s"]
    q = tensor(memory, (batch, one["h"], seq, one["d"]), dtype)
    k, v = (tensor(memory, (batch, kv_heads, keys, one[width]), dtype) for width in ("d", "dv"))
    start = len(memory.log)
    kept = run(q, k, v)
    found = logged(memory, start)
    del kept
    return found


def taken(one: dict[str, Any]) -> list[int]:
    """The recorded events without those of the three gradients, which come first and stay."""
    freed = [-event for event in one["events"] if event < 0]
    return [event for event in one["events"][3:] if event > 0 and event in freed]


def test_cudnn_takes_one_block() -> None:
    for one in of("sdpa backward", kernel="cudnn"):
        assert scratch(one, one["s"], cudnn_scratch) == taken(one), one


def test_flash_attention_rounds_its_queries_up() -> None:
    for one in of("sdpa backward", kernel="flash"):
        rounded = -(-one["s"] // 128) * 128
        assert scratch(one, rounded, lambda q, k, v: flash_scratch(q, k)) == taken(one), one


def test_the_memory_efficient_kernel_has_some_bytes_more_for_each_tile() -> None:
    for one in of("sdpa backward", kernel="efficient"):
        if one["dt"] == "bf16" and max(one["d"], one["dv"]) > 128:
            continue  # accumulators of keys and values, which are not counted
        tile = 64 if one["d"] <= 64 < 2 * one["d"] else 128
        rounded = -(-one["s"] // tile) * tile
        one = one | {"kv": one["h"]}
        gradient = scratch(one, rounded, lambda q, k, v: efficient_scratch(q))[-1]
        tiles = 4 * one["b"] * one["h"] * rounded / 64 * max(1, one["d"] / 64)
        assert 0 < taken(one)[-1] - gradient <= 16 * tiles, one


def test_an_index_writes_into_its_zeros() -> None:
    """And sorts its places, in blocks that are not counted."""
    for one in of("index backward"):
        places = Dim("places", 2 * one["tokens"])

        def rows(x: Tensor, places: Dim = places) -> Tensor:
            return index(x, new_tensor(x.memory, (places,), int64, "places"), "rows")

        zeros, *sorting = one["events"]
        assert events_of_backward(rows, (one["tokens"], one["h"]), DTYPES[one["dt"]]) == [zeros]
        assert max(sorting) < 0.05 * zeros
