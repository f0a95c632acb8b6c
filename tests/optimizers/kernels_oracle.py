"""The kernels of a real optimizer's step: what each reads and writes, and what its products multiply.

A dispatch mode sees every op of the step over fake tensors on a fake GPU. An op reads each of its tensors once, however often
it is named, and writes those that its schema says it writes, and what it returns. Views are free. Numbers are not counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from flop_oracle import flops_of
from optimizers.test_optimizers import DTYPES, build, of_apollo, of_galore, tensors_of, without_pages, without_seeds
from records import on_record
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from memcalc.core.dtypes import DType
from memcalc.optimizers import Parameter
from memcalc.validate.optimizers import BITSANDBYTES

WRITTEN_ONLY = ("copy_", "zero_", "fill_")
READ_ONLY = {
    "_fused_adamw_": {"grads"}, "_fused_adam_": {"grads"}, "_fused_sgd_": {"grads"},
    "optimizer_update_32bit": {"g"}, "optimizer_update_8bit_blockwise": {"g", "qmap1", "qmap2"},
}  # fmt: skip
"""Arguments that a schema names as written, and the kernel does not write: gradients are only unscaled in place."""
PRODUCTS = ("mm", "addmm", "bmm")
REDUCTIONS = ("linalg_vector_norm", "mean")


class Kernels(NamedTuple):
    nbytes: int
    calls: int
    flops: int
    products: int


class _Kernels(TorchDispatchMode):
    def __init__(self, *, outer: bool) -> None:
        """`outer`: the product of a column with a row is not counted as one of matrices."""
        super().__init__()
        self.outer = outer
        self.nbytes = self.calls = self.flops = self.products = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default:
            return 1.0
        out = None if func is torch.ops.aten._fused_sgd_.default else func(*args, **kwargs)
        self.count(func, args, kwargs, out)
        return out

    def count(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        name = func._schema.name.split("::")[1]
        given = list(_given(func, args, kwargs))
        read = _of_several([t for _, value, _ in given for t in tree_leaves(value)])
        seen = {_key(t) for t in read}
        made = [t for t in _of_several(tree_leaves(out)) if _key(t) not in seen]
        unwritten = READ_ONLY.get(name, set())
        written = _of_several(
            [t for a, value, writes in given if writes and a not in unwritten for t in tree_leaves(value)]
        )
        if name in PRODUCTS and not (self.outer and args[-2].shape[-1] == 1):
            self.products, self.flops = self.products + 1, self.flops + flops_of(func, args, kwargs, out)
            return
        if not made and not written and not (read and name in REDUCTIONS):
            return
        self.calls += 1
        self.nbytes += _nbytes(made) + _nbytes(written) + (0 if name in WRITTEN_ONLY else _nbytes(read))


def _given(func: Any, args: Any, kwargs: Any) -> Iterator[tuple[str, Any, bool]]:
    """Name, value and whether it is written, of each argument."""
    for i, argument in enumerate(func._schema.arguments):
        value = args[i] if i < len(args) else kwargs.get(argument.name)
        info = argument.alias_info
        yield argument.name, value, info is not None and info.is_write


def _key(tensor: torch.Tensor) -> Any:
    return tensor.untyped_storage()._cdata


def _of_several(leaves: Sequence[Any]) -> list[torch.Tensor]:
    """Those on the GPU with more than one element, each once."""
    found = {_key(t): t for t in leaves if isinstance(t, torch.Tensor) and t.device.type == "cuda" and t.numel() > 1}
    return list(found.values())


def _nbytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def _vectors(projector: Any, matrix: torch.Tensor, rank: int, type: str) -> torch.Tensor:
    """GaLore's projection without the decomposition, for the first step, which is not looked at."""
    rows, columns = matrix.shape
    least = min(rank, rows, columns)
    return matrix.new_empty((least, columns) if type == "right" else (rows, least))


@on_record
def kernels_of_step(name: str, implementation: str, parameters: Sequence[Parameter], dtype: DType) -> Kernels:
    """Of the second step."""
    expanded, mode = list(tensors_of(parameters)), _Kernels(outer=name == "adafactor")
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "synchronize", lambda *_: None)
        if name in BITSANDBYTES:
            without_pages(patch)
        if name == "apollo-adamw":
            without_seeds(patch)
        with fake:
            tensors = [
                torch.nn.Parameter(torch.ones([d.size for d in p.shape], dtype=DTYPES[dtype], device="cuda"))
                for p in expanded
            ]
            for tensor in tensors:
                tensor.grad = torch.ones_like(tensor)
        matrices = [p.is_matrix for p in expanded]
        optimizer = build(name, implementation, tensors, matrices)
        if name == "apollo-adamw":
            optimizer = of_apollo(tensors, matrices, 200)  # most steps draw no projection
        if name == "galore-adamw":
            optimizer = of_galore(tensors, matrices, 200)
            patch.setattr("galore_torch.galore_projector.GaLoreProjector.get_orthogonal_matrix", _vectors)
        with fake, _Kernels(outer=True):
            optimizer.step()
        with fake, mode:
            optimizer.step()
    return Kernels(mode.nbytes, mode.calls, mode.flops, mode.products)
