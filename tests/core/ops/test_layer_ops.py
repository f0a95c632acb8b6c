"""The ops of textbook layers: what each keeps for backward, against torch's own `saved_tensors_hooks`, and what a shared batch
norm allocates and sends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from layers_oracle import fused_cells
from oracle import LiveBytes
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from memcalc.core.autograd import Leaf, backward
from memcalc.core.dims import Dim, numel
from memcalc.core.dtypes import bf16, fp32
from memcalc.core.ops import (
    group_norm,
    in_place,
    mean_squared_error,
    recurrent,
    sync_batch_norm,
    transposed_convolution,
    window_pooling,
)
from memcalc.core.tensor import Memory, Tensor, new_tensor

B, C, H, W, K, O = (Dim(n, s) for n, s in zip("bchwko", (2, 6, 9, 10, 3, 4), strict=True))  # noqa: E741
GATES, GATES3 = Dim("4h", 4 * C.size), Dim("3h", 3 * C.size)
DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.int64: "int64", torch.bool: "bool"}
Shape = tuple[Dim, ...]


def ours(op: Callable[..., Any], shapes: list[Shape]) -> Counter[Any]:
    memory = Memory()
    inputs: list[Tensor] = []
    for i, shape in enumerate(shapes):
        tensor = new_tensor(memory, shape, fp32, f"input {i}")
        tensor.node = Leaf(memory, f"input {i}", shape, None)
        inputs.append(tensor)
    out = op(*inputs)
    node = (out[0] if isinstance(out, tuple) else out).node
    return Counter((tuple(d.size for d in shape), dtype.name) for shape, dtype in node.kept)


def torchs(op: Callable[..., Any], shapes: list[Shape]) -> Counter[Any]:
    seen: Counter[Any] = Counter()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        seen[tuple(tensor.shape), DTYPES[tensor.dtype]] += 1
        return tensor

    with FakeTensorMode(), fused_cells():
        inputs = [torch.zeros([d.size for d in shape], requires_grad=True) for shape in shapes]
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            op(*inputs)
    return seen


def fused(name: str) -> Callable[..., Any]:
    return lambda *inputs: getattr(torch.ops.aten, name)(*inputs)


CASES: dict[str, tuple[Callable[..., Any], Callable[..., Any], list[Shape]]] = {
    "transposed convolution": (
        lambda x, w, b: transposed_convolution.transposed_convolution(x, w, b, O, Dim("h", 11), Dim("w", 12)),
        lambda x, w, b: F.conv_transpose2d(x, w, b),
        [(B, C, H, W), (C, O, K, K), (O,)],
    ),
    "average pooling": (
        lambda x: window_pooling.average(x, Dim("h", 3), Dim("w", 3)), lambda x: F.avg_pool2d(x, 3), [(B, C, H, W)],
    ),
    "adaptive average pooling": (
        lambda x: window_pooling.adaptive_average(x, Dim("h", 2), Dim("w", 3)),
        lambda x: F.adaptive_avg_pool2d(x, (2, 3)),
        [(B, C, H, W)],
    ),
    "group norm": (
        lambda x, w, b: group_norm.group_norm(x, w, b, 3), lambda x, w, b: F.group_norm(x, 3, w, b), [(B, C, H, W), (C,), (C,)],
    ),
    "group norm without weights": (
        lambda x: group_norm.group_norm(x, None, None, 2), lambda x: F.group_norm(x, 2), [(B, C, H)],
    ),
    "lstm cell": (
        recurrent.lstm_cell, fused("_thnn_fused_lstm_cell"), [(B, GATES), (B, GATES), (B, C), (GATES,), (GATES,)],
    ),
    "lstm cell without biases": (
        lambda *x: recurrent.lstm_cell(*x, None, None), fused("_thnn_fused_lstm_cell"), [(B, GATES), (B, GATES), (B, C)],
    ),
    "gru cell": (recurrent.gru_cell, fused("_thnn_fused_gru_cell"), [(B, GATES3), (B, GATES3), (B, C), (GATES3,), (GATES3,)]),
    "steps": (lambda x: recurrent.unbind(x), lambda x: x.unbind(0), [(B, C)]),
    "stacked steps": (
        lambda x, y: recurrent.stack_first([x, y], B), lambda x, y: torch.stack([x, y], 0), [(C, H), (C, H)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_an_op_keeps_what_torch_keeps(name: str) -> None:
    own, theirs, shapes = CASES[name]
    assert ours(own, shapes) == torchs(theirs, shapes)


def test_ops_that_overwrite_keep_one_tensor_of_the_inputs_size() -> None:
    """Hooks on leaves are refused in place, so the input is the result of a product."""
    for own, theirs in (
        (in_place.relu_, lambda x: F.relu_(x)),
        (lambda x: in_place.dropout_(x, 0.5), lambda x: torch.dropout_(x, 0.5, True)),
    ):
        kept = torchs(lambda x, theirs=theirs: theirs(x + 1), [(B, C)])
        assert ours(own, [(B, C)]) == kept == {((2, 6), "fp32"): 1}


def test_mean_squared_error_keeps_both() -> None:
    memory = Memory()
    x, y = (new_tensor(memory, (B, C), fp32, name) for name in "xy")
    x.node = Leaf(memory, "x", x.shape, None)
    out = mean_squared_error.mse_loss(x, y)
    assert out.node is not None
    kept = Counter(tuple(d.size for d in shape) for shape, _ in out.node.kept)
    assert kept == Counter(
        dict.fromkeys([shape for shape, _ in torchs(lambda x: F.mse_loss(x, x.detach()), [(B, C)])], 2)
    )


# --- a batch norm over several ranks


@pytest.fixture
def cuda_kernels_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The kernels of nn.SyncBatchNorm, which the CPU does not have: the sizes that native/cuda/Normalization.cu allocates."""
    library = torch.library.Library("aten", "IMPL")

    def wide(x: torch.Tensor) -> torch.dtype:
        return torch.float32 if x.dtype is torch.bfloat16 else x.dtype

    def per_channel(x: torch.Tensor, n: int, dtype: torch.dtype) -> list[torch.Tensor]:
        return [torch.zeros(x.shape[1], dtype=dtype) for _ in range(n)]

    library.impl("batch_norm_stats", lambda x, eps: tuple(per_channel(x, 2, wide(x))), "CPU")
    library.impl("batch_norm_gather_stats_with_counts", lambda x, *_: tuple(per_channel(x, 2, wide(x))), "CPU")
    library.impl("batch_norm_elemt", lambda x, *_: torch.empty_like(x), "CPU")
    library.impl(
        "batch_norm_backward_reduce",
        lambda g, x, mean, invstd, weight, a, b, c: (
            *per_channel(x, 2, wide(x)), *per_channel(x, 2, weight.dtype),
        ),
        "CPU",
    )  # fmt: skip
    library.impl("batch_norm_backward_elemt", lambda g, x, *_: torch.empty_like(x), "CPU")
    sent: list[tuple[str, int, torch.dtype]] = []

    def gather(out: torch.Tensor, given: torch.Tensor, *_: Any, **__: Any) -> None:
        out.fill_(1)
        sent.append(("all_gather", out.numel(), out.dtype))

    def reduce(given: torch.Tensor, *_: Any, **__: Any) -> None:
        sent.append(("all_reduce", given.numel(), given.dtype))

    monkeypatch.setattr(dist, "all_gather_single", gather)
    monkeypatch.setattr(dist, "all_reduce", reduce)
    yield sent
    library._destroy()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_shared_batch_norm(cuda_kernels_on_the_cpu: list[Any], dtype: torch.dtype) -> None:
    """What torch/nn/modules/_functions.py keeps and sends with stand-ins for its kernels."""
    ranks, own = 4, bf16 if dtype is torch.bfloat16 else fp32
    group: Any = SimpleNamespace(_get_backend_name=lambda: "nccl")
    kept: Counter[Any] = Counter()
    seen: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tuple(tensor.shape), tensor.dtype] += 1
        seen.append(tensor)
        return tensor

    norm = nn.SyncBatchNorm(C.size).to(dtype)
    x = torch.zeros((2, 6, 9, 10), dtype=dtype, requires_grad=True)
    function: Any = torch.nn.modules._functions.SyncBatchNorm
    mode = LiveBytes()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), mode:
        mode.phase = "forward"
        out = function.apply(x, norm.weight, norm.bias, norm.running_mean, norm.running_var, 1e-5, 0.1, group, ranks)
        left = mode.now
        out.sum().backward()
    memory = Memory()
    memory.phase = "forward"
    given = [new_tensor(memory, shape, own, "given") for shape in ((B, C, H, W), (C,), (C,), (C,), (C,))]
    for tensor in given[:3]:
        tensor.node = Leaf(memory, "given", tensor.shape, None)
    before = len(memory.rows)
    made = sync_batch_norm.sync_batch_norm(*given, ranks)
    alive = set(range(before, len(memory.rows))) - {~e for e in memory.log if e < 0}
    assert sum(numel(memory.rows[i].shape)[0] * memory.rows[i].dtype.itemsize for i in alive) == left
    assert made.node is not None
    names = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.int32: "int32"}
    ours = Counter((numel(shape)[0], dtype.name) for shape, dtype in made.node.kept)
    assert ours == _by_size(kept, names)
    memory.phase = "backward"
    backward(made, gradient=new_tensor(memory, made.shape, own, "gradient"))
    sizes = [(one.kind, numel(one.shape)[0], names_of(one.dtype.name)) for one in memory.sent]
    assert sizes == cuda_kernels_on_the_cpu == [
        ("all_gather", ranks * (2 * C.size + 1), torch.float32), ("all_reduce", 2 * C.size, torch.float32),
    ]  # fmt: skip


def _by_size(kept: Counter[Any], names: dict[Any, str]) -> Counter[Any]:
    out: Counter[Any] = Counter()
    for (shape, dtype), n in kept.items():
        size = 1
        for side in shape:
            size *= side
        out[size, names[dtype]] += n
    return out


def names_of(name: str) -> torch.dtype:
    return {"fp32": torch.float32, "bf16": torch.bfloat16}[name]


def test_one_rank_has_a_plain_batch_norm() -> None:
    memory = Memory()
    given = [new_tensor(memory, shape, fp32, "given") for shape in ((B, C, H), (C,), (C,), (C,), (C,))]
    given[0].node = Leaf(memory, "x", given[0].shape, None)
    made = sync_batch_norm.sync_batch_norm(*given, 1)
    assert made.node is not None and made.node.backward.__name__ == "_batch_norm_backward"
    assert not memory.sent
