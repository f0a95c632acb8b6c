"""Real tensors of any size that take no memory: `memcalc/validate/untouched.py`."""

from __future__ import annotations

import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from memcalc.tracing.modules import quiet
from memcalc.units import GIB, MIB
from memcalc.validate.fake import process_group
from memcalc.validate.untouched import Untouched

HUGE = (1 << 20, 1 << 18)
"""Elements: a TiB in fp32."""


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_what_is_not_touched_takes_no_memory() -> None:
    before = resident()
    with Untouched():
        layer = torch.nn.Linear(65536, 65536)
        out = layer(torch.ones(4096, 65536))
        out.square().mean().backward()
        optimizer = torch.optim.AdamW(layer.parameters())
        optimizer.step()
        assert layer.weight.grad is not None
        assert layer.weight.grad.untyped_storage().nbytes() == 16 * GIB
    assert resident() - before < 300 * MIB


def test_a_block_larger_than_all_memory() -> None:
    with Untouched():
        x = torch.empty(HUGE)
        assert torch.cat([x, x]).untyped_storage().nbytes() == 2 << 40
        assert (x.t() + 1).stride() == (1, HUGE[1])


def test_integers_are_computed() -> None:
    with Untouched():
        ids = torch.arange(24).view(4, 6)
        assert ids.sum().item() == 276
        assert ids[ids % 5 == 0].tolist() == [0, 5, 10, 15, 20]
        assert torch.empty(24, 3)[ids.flatten() > 20].shape == (3, 3)
        assert torch.bincount(ids.flatten() % 3).tolist() == [8, 8, 8]
        assert torch.full((3,), 0.5).sum().item() == 1.5


@pytest.mark.parametrize("numel", [10, 100_000, 2**30])
def test_numbers_that_are_not_there_are_ones(numel: int) -> None:
    with Untouched():
        weight = torch.empty(numel)
        assert weight.norm().item() == 1.0
        assert bool(torch.isfinite(weight.amax()))
        assert bool(weight.amax() > 0)
        assert not bool(torch.isinf(weight).any())
        assert not bool(weight.amax() < 0)


def test_values_that_are_not_there_are_not_made_up() -> None:
    with Untouched():
        few, many = torch.empty(100), torch.empty(2**23)
        with pytest.raises(RuntimeError, match="looks at the values"):
            many.nonzero()
        with pytest.raises(RuntimeError, match="a mask that has no values"):
            many[many > 0]
        few.fill_(2)
        assert few.sum().item() == 200
        few.add_(torch.empty(100))
        assert few.sum().item() == 1.0, "an unknown summand makes the sum unknown"
        with torch._C._AutoDispatchBelowAutograd():  # where a mode sees these ops as a whole
            square = few.view(10, 10)
            copies = square.t().contiguous(), square.to(torch.float64), square.contiguous()
        assert [one.sum().item() for one in copies] == [1.0] * 3


def test_places_are_within_what_they_are_of() -> None:
    with Untouched():
        chosen = torch.topk(torch.empty(1000, 64), 4)
        assert 0 <= int(chosen.indices.min()) <= int(chosen.indices.max()) < 64


OPS: dict[str, Callable[[torch.Tensor], Any]] = {
    "in place": lambda x: x.mul_(2),
    "of a view": lambda x: x[1:].t().contiguous(),
    "no copy": lambda x: x.contiguous(),
    "other dtype": lambda x: x.to(torch.bfloat16),
    "same dtype": lambda x: x.to(torch.float32),
    "chunks": lambda x: list(x.chunk(3, 1)),
    "reduction": lambda x: x.sum(0, keepdim=True),
    "several": lambda x: list(torch.max(x, 1)),
    "out": lambda x: torch.mm(x, x.t(), out=torch.empty(0)),
    "statistics": lambda x: list(torch.native_layer_norm(x, (x.shape[1],), None, None, 1e-5)),
    "running statistics": lambda x: list(
        torch.ops.aten._native_batch_norm_legit(x, None, None, x[0].clone(), x[0].clone(), True, 0.1, 1e-5)
    ),
    "lists": lambda x: torch._foreach_sqrt([x, x[0]]),
    "softmax": lambda x: torch.nn.functional.softmax(x.bfloat16(), -1),
    "scatter": lambda x: x.scatter(1, torch.zeros(4, 1, dtype=torch.int64), 1.0),
}


@pytest.mark.parametrize("name", OPS)
def test_results_are_as_torch_has_them(name: str) -> None:
    """Shape, strides, dtype, what a storage has, and whether it is the argument's."""

    def seen(given: torch.Tensor) -> list[Any]:
        out = OPS[name](given)
        tensors = out if isinstance(out, list | tuple) else [out]
        return [
            (t.shape, t.stride(), t.dtype, t.untyped_storage().nbytes(), t.data_ptr() - given.data_ptr() if shared else None)
            for t in tensors
            for shared in [t.untyped_storage()._cdata == given.untyped_storage()._cdata]
        ]  # fmt: skip

    real = seen(torch.rand(4, 6))
    with Untouched():
        assert seen(torch.empty(4, 6)) == real


def test_collectives_of_a_fake_group() -> None:
    with process_group(8), quiet(), Untouched():
        given = torch.empty(2**32)
        gathered = torch.empty(8 * 2**32)
        work = dist.all_gather_into_tensor(gathered, given, async_op=True)
        assert work is not None
        work.wait()
        dist.reduce_scatter_tensor(given, gathered)
        dist.all_reduce(gathered)
        counts = torch.arange(8)
        dist.all_reduce(counts)
        assert counts.tolist() == list(range(8))
        received = [torch.zeros(1, dtype=torch.int64) for _ in range(8)]
        dist.all_gather(received, torch.ones(1, dtype=torch.int64))
        assert [int(one) for one in received] == [1] * 8
