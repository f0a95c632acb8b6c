# pyright: basic
"""Real CPU tensors of any size whose bytes nobody touches: an op makes its result and does not compute it.

A block that was never written to has addresses and no memory. So tensors, storages and pointers are torch's own, and
C++ that looks at them (DDP's reducer, functional collectives) or libraries that do (DeepSpeed) run as always. torch's
fake tensors tell what an op would return, once for all equal arguments. Small tensors that depend on no weight (tokens,
positions, masks, routing) are computed, so that code which looks at values takes its branches.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Iterable
from functools import cache
from math import prod
from typing import Any, Final, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, UnsupportedOperatorException
from torch.distributed.fsdp._fully_shard._fsdp_collectives import all_gather_copy_in_cuda
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from memcalc.validate.collectives import has_local_tensors

MOST_PLACES: Final = 2**22
MOST_NUMBERS: Final = 2**16
"""The most elements of a tensor whose values are computed: of integers and bools, and of other numbers."""
_NORESERVE: Final = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Linux's
_AS_THEY_ARE: Final = ("_c10d_functional::wait_tensor", "_c10d_functional::_wrap_tensor_autograd")
"""Ops for which fake tensors have a different result: a new tensor."""


class Made(NamedTuple):
    """A tensor that an op returns."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


class Result(NamedTuple):
    """The results of an op, or the contents of its outputs: a tree of Made and plain values. None stands for an op that
    computes nothing."""

    leaves: list[Any]
    tree: Any

    @property
    def made(self) -> list[Made]:
        return [leaf for leaf in self.leaves if isinstance(leaf, Made)]


class Untouched(TorchDispatchMode):
    """A dispatch mode that must be entered before all others."""

    def __init__(self) -> None:
        super().__init__()
        self._without_values: set[int] = set()
        self._results: dict[Any, Result | None] = {}
        self._fake = FakeTensorMode()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if has_local_tensors(types):
            return NotImplemented
        kwargs = kwargs or {}
        if _is_as_it_is(func):
            return func(*args, **kwargs)
        leaves, tree = tree_flatten((args, kwargs))
        given = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if kwargs.get("device") == _META or any(t.is_meta or isinstance(t, FakeTensor) for t in given):
            return func(*args, **kwargs)
        if func.namespace == "c10d":
            return self._collective(func, args, kwargs, given)
        if func is _COPY_IN:
            with self:
                return all_gather_copy_in_cuda(*args, **kwargs)
        if func._schema.is_mutable:
            return self._write(func, args, kwargs, given)
        return self._make(func, args, kwargs, given, leaves, tree)

    # --- ops by kind

    def _make(self, func: Any, args: Any, kwargs: Any, given: list[Any], leaves: list[Any], tree: Any) -> Any:
        known = self._known(given)
        if func is _OF_CHOSEN and not known:
            return self._new(Made(tuple(args[2]), torch.empty(args[2], device="meta").stride(), args[0].dtype))
        if not _LOOKS.isdisjoint(func.tags):
            if known:
                return func(*args, **kwargs)
            if func is _ITEM and given[0].is_floating_point():
                return 1.0  # optimizers scale by such numbers
            if func is not _INDEX:
                raise RuntimeError(f"{func} looks at the values of tensors that have none")
            args = (args[0], [i for index in args[1] for i in self._places(index)])
            leaves, tree = tree_flatten((args, kwargs))
        try:
            result = self._result(func, leaves, tree)
        except (NotImplementedError, UnsupportedOperatorException):  # unknown to fake tensors: it is computed
            result = None
        if result is None or (known and all(map(_few, result.made)) and func._schema.name not in _EMPTY):
            return func(*args, **kwargs)
        if result.made and all(not _measures(m.dtype) and _few(m) for m in result.made) and all(map(_few, given)):
            args, kwargs = tree_map_only(torch.Tensor, self._stand_in, (args, kwargs))
            return func(*args, **kwargs)
        return tree_unflatten([self._new(x) if isinstance(x, Made) else x for x in result.leaves], result.tree)

    def _places(self, index: torch.Tensor | None) -> list[torch.Tensor | None]:
        """Return the places where a mask is true; return any other index unchanged."""
        if index is None or index.dtype not in _MASKS:
            return [index]
        if not self._known([index]):
            raise RuntimeError("a mask that has no values chooses from a tensor")
        return list(index.nonzero().unbind(1))

    def _write(self, func: Any, args: Any, kwargs: Any, given: list[Any]) -> Any:
        """Run an op that writes in place, or into `out`."""
        written = list(_written(func, args, kwargs))
        places = {id(t) for t in written}
        overwrites = func._schema.name in _OVERWRITE
        read = [t for t in given if id(t) not in places] if overwrites else given
        if self._known(read) and all(map(_few, written)):
            out = func(*args, **kwargs)
            for tensor in written:
                storage = tensor.untyped_storage()
                if overwrites and tensor.numel() * tensor.itemsize == storage.nbytes():
                    self._without_values.discard(storage._cdata)
            return out
        for tensor in written:
            self._forget(tensor)
        kinds = [r.alias_info is not None and r.alias_info.is_write for r in func._schema.returns]
        into = func.namespace == "aten" and any(a.kwarg_only and a.is_write for a in func._schema.arguments)
        if all(kinds) and not into:
            return None if not kinds else written[0] if len(kinds) == 1 else tuple(written)
        result = self._result(func, *tree_flatten((args, kwargs)))
        assert result is not None
        given_back = iter(written)
        out = [
            next(given_back) if own else self._new(x) if isinstance(x, Made) else x
            for own, x in zip(kinds, result.leaves, strict=True)
        ]
        for tensor, made in zip(out, result.leaves, strict=True):
            if isinstance(made, Made) and tuple(tensor.shape) != made.shape:
                tensor.resize_(made.shape)  # a tensor given as `out` takes the result's shape
        return tree_unflatten(out, result.tree)

    def _collective(self, func: Any, args: Any, kwargs: Any, given: list[Any]) -> Any:
        """Run a collective. A fake group copies some of what it is given; here only shapes are copied, except for known
        values."""
        if self._known(given):
            return func(*args, **kwargs)
        for tensor in _written(func, args, kwargs):
            self._forget(tensor)
        shapes: dict[int, torch.Tensor] = {}

        def shape(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) not in shapes:
                shapes[id(tensor)] = torch.empty_strided(
                    tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta"
                )
            return shapes[id(tensor)]

        as_shapes, named = tree_map_only(torch.Tensor, shape, (args, kwargs))
        out = func(*as_shapes, **named)
        back = {id(shapes[id(t)]): t for t in given}
        return tree_map_only(torch.Tensor, lambda t: back[id(t)], out)

    # --- results

    def _result(self, func: Any, leaves: list[Any], tree: Any) -> Result | None:
        """Return the results of an op as fake tensors have them; None for an op that shares memory with its
        arguments."""
        key = (func, *(_described(leaf) for leaf in leaves), tree)
        if key not in self._results:
            self._results[key] = self._asked(func, leaves, tree)
        return self._results[key]

    def _asked(self, func: Any, leaves: list[Any], tree: Any) -> Result | None:
        with self._fake:
            fakes = [_like(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
            args, kwargs = tree_unflatten(fakes, tree)
            out, shape = tree_flatten(func(*args, **kwargs))
        if not func._schema.is_mutable:
            there = {t.untyped_storage()._cdata for t in fakes if isinstance(t, torch.Tensor)}
            if any(isinstance(t, torch.Tensor) and t.untyped_storage()._cdata in there for t in out):
                return None
        return Result(
            [Made(tuple(t.shape), t.stride(), t.dtype) if isinstance(t, torch.Tensor) else t for t in out], shape
        )

    def _new(self, made: Made) -> torch.Tensor:
        tensor = empty(made)
        if _measures(made.dtype) or not _few(made):
            self._forget(tensor)
            return tensor
        return tensor.zero_()  # a place or a mask computed from all of a large tensor

    def _stand_in(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a substitute for a tensor without values. A number is one, which is finite and can be divided by; a
        mask chooses nothing."""
        if self._known([tensor]):
            return tensor
        return torch.empty_like(tensor).fill_(1 if _measures(tensor.dtype) else 0)

    # --- values

    def _known(self, tensors: Iterable[torch.Tensor]) -> bool:
        return all(_few(t) and t.untyped_storage()._cdata not in self._without_values for t in tensors)

    def _forget(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._without_values:
            self._without_values.add(storage._cdata)
            weakref.finalize(storage, self._without_values.discard, storage._cdata).atexit = False


def empty(made: Made) -> torch.Tensor:
    """Return a block that is not written to. No memory is reserved for one that is larger than all of the memory."""
    try:
        return torch.empty_strided(made.shape, made.strides, dtype=made.dtype)
    except RuntimeError:
        extent = 1 + sum((n - 1) * stride for n, stride in zip(made.shape, made.strides, strict=True))
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
        block = torch.frombuffer(mmap.mmap(-1, extent * made.dtype.itemsize, flags=flags), dtype=made.dtype)
        return block.as_strided(made.shape, made.strides)


@cache
def _is_as_it_is(func: Any) -> bool:
    """Tell whether an op computes nothing: a view, or a change of shape. An op made of others (`contiguous`, `to`) may
    copy."""
    if func._schema.name in _AS_THEY_ARE or torch.Tag.inplace_view in func.tags:
        return True
    return func.is_view and not func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)


def _measures(dtype: torch.dtype) -> bool:
    """Tell whether a dtype's numbers are measures. Others are places and masks."""
    return dtype.is_floating_point or dtype.is_complex


def _few(tensor: torch.Tensor | Made) -> bool:
    """Tell whether a tensor is small enough to be computed."""
    return prod(tensor.shape) <= (MOST_NUMBERS if _measures(tensor.dtype) else MOST_PLACES)


def _like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")


def _described(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf.dtype, tuple(leaf.shape), leaf.stride()
    return type(leaf), leaf


def _written(func: Any, args: Any, kwargs: Any) -> Iterable[torch.Tensor]:
    for place, argument in enumerate(func._schema.arguments):
        if argument.is_write:
            value = kwargs.get(argument.name) if argument.name in kwargs else args[place] if place < len(args) else None
            yield from (leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, torch.Tensor))


_COPY_IN: Final = torch.ops.fsdp.all_gather_copy_in.default
_META: Final = torch.device("meta")
_LOOKS: Final = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_ITEM: Final = torch.ops.aten._local_scalar_dense.default
_INDEX: Final = torch.ops.aten.index.Tensor
_EMPTY: Final = tuple(
    f"aten::{name}"
    for name in ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided")
)
_OF_CHOSEN: Final = torch.ops.aten.masked_scatter_backward.default
"""An op whose result has a given size. Fake tensors would look for the places of its mask."""
_MASKS: Final = (torch.bool, torch.uint8)
_OVERWRITE: Final = ("aten::copy_", "aten::fill_", "aten::zero_")
