"""Where autograd adds a second gradient into the first one, and where it makes a third tensor: torch's own allocations on the
CPU, without a dispatch mode, which would change the answer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from memcalc.core.autograd import Leaf, backward
from memcalc.core.dims import Dim, numel
from memcalc.core.dtypes import fp32
from memcalc.core.ops.elementwise import add, mul, scale, sigmoid
from memcalc.core.ops.shape import transpose, view
from memcalc.core.tensor import Memory, Tensor, new_tensor
from memcalc.tracing.as_on_cuda import run_as_on_cuda

if TYPE_CHECKING:
    from collections.abc import Callable

SIDE = 64
NBYTES = 4 * SIDE * SIDE
ROWS, ALL = Dim("rows", SIDE), Dim("all", SIDE * SIDE)

CASES: dict[str, tuple[Callable[[Any], Any], Callable[[Tensor], Tensor]]] = {
    "two owners": (lambda x: x * 2 + x * 3, lambda x: add(scale(x, "mul"), scale(x, "mul"))),
    "a residual": (lambda x: x + torch.sigmoid(x * 3), lambda x: add(x, sigmoid(scale(x, "mul")))),
    "the same twice": (lambda x: x + x, lambda x: add(x, x)),
    "three": (
        lambda x: torch.sigmoid(x) + x * 2 + torch.sigmoid(x * 3),
        lambda x: add(add(sigmoid(x), scale(x, "mul")), sigmoid(scale(x, "mul"))),
    ),
    "a view comes first": (
        lambda x: torch.sigmoid(x) + torch.sigmoid(x.view(SIDE * SIDE)).view(SIDE, SIDE),
        lambda x: add(sigmoid(x), view(sigmoid(view(x, ALL)), ROWS, ROWS)),
    ),
    "a view comes second": (
        lambda x: torch.sigmoid(x.view(SIDE * SIDE)).view(SIDE, SIDE) + torch.sigmoid(x),
        lambda x: add(view(sigmoid(view(x, ALL)), ROWS, ROWS), sigmoid(x)),
    ),
    "a transposed view": (
        lambda x: torch.sigmoid(x) * torch.sigmoid(x.t()).t(),
        lambda x: mul(sigmoid(x), transpose(sigmoid(transpose(x, 0, 1)), 0, 1)),
    ),
    "one after the other": (
        lambda x: (lambda y: y * torch.sigmoid(y))(x + torch.sigmoid(x)),
        lambda x: (lambda y: mul(y, sigmoid(y)))(add(x, sigmoid(x))),
    ),
}


def of_torch(forward: Callable[[torch.Tensor], torch.Tensor]) -> int:
    """The matrices that torch allocates in backward."""
    out = forward(torch.ones(SIDE, SIDE, requires_grad=True) * 1)
    gradient = torch.ones(SIDE, SIDE)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        out.backward(gradient)
    return sum(e.nbytes() == NBYTES for e in recorded.profiler.kineto_results.events() if e.name() == "[memory]")


def of_memcalc(forward: Callable[[Tensor], Tensor]) -> int:
    memory = Memory()
    leaf = new_tensor(memory, (ROWS, ROWS), fp32, "leaf")
    leaf.node = Leaf(memory, "leaf", leaf.shape, None)
    out = forward(scale(leaf, "mul"))
    gradient = new_tensor(memory, out.shape, fp32, "gradient")
    start = len(memory.log)
    backward(out, gradient=gradient)
    made = [memory.rows[i] for i in memory.log[start:] if i >= 0]
    return sum(4 * numel(row.shape)[0] == NBYTES for row in made) - len(memory.renamed)  # the leaf's has two names


class Counting(TorchDispatchMode):
    """Counts the matrices that ops allocate, as they do on CUDA."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {leaf.untyped_storage()._cdata for leaf in args if isinstance(leaf, torch.Tensor)}
        out, _ = run_as_on_cuda(func, args, kwargs or {})
        if (
            out.numel() == SIDE * SIDE
            and out.untyped_storage()._cdata not in given
            and out.untyped_storage().nbytes() == NBYTES
        ):
            self.count += 1
        return out


def under_a_mode(forward: Callable[[torch.Tensor], torch.Tensor]) -> int:
    out = forward(torch.ones(SIDE, SIDE, requires_grad=True) * 1)
    gradient = torch.ones(SIDE, SIDE)
    with Counting() as counting:
        out.backward(gradient)
    return counting.count


@pytest.mark.parametrize("name", CASES)
def test_as_many_tensors_as_torch(name: str) -> None:
    real, paper = CASES[name]
    assert of_memcalc(paper) == of_torch(real)


def test_the_oracle_leaves_the_gradient_of_what_is_written_over_alone() -> None:
    def written(x: torch.Tensor) -> torch.Tensor:
        return torch.index_put(x, (torch.tensor([0, 1]),), torch.zeros(2, SIDE)) * 2

    assert under_a_mode(written) == of_torch(written) == 3  # of both products, and a copy of one


def test_the_oracle_sees_who_else_holds_a_gradient() -> None:
    def held(x: torch.Tensor) -> torch.Tensor:
        y, z = torch.sigmoid(x), x * 3
        assert z.grad_fn is not None
        z.grad_fn.register_hook(lambda given, taken: kept.append(given))
        return y + z

    kept: list[object] = []
    assert under_a_mode(held) == of_torch(held)


@pytest.mark.parametrize("name", CASES)
def test_the_oracle_sees_what_happens_without_it(name: str) -> None:
    real, _ = CASES[name]
    assert under_a_mode(real) == of_torch(real)
