# pyright: basic
"""The values of tensors that do not depend on weights: masks, positions, token ids and tensors computed from them.

Fake tensors have no values, but transformers looks at some: whether a mask masks anything, whether positions are those
of a packed batch. For small tensors that depend on no weight the real values are computed beside the fake ones, so that
the code takes the branches of a real run. If the code asks for a value that depends on weights, the trace fails.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._pytree import tree_leaves, tree_map_only

MOST_ELEMENTS: Final = 2**22
"""The most elements of a tensor whose values are computed."""

_GROUPED: Final = torch.ops.aten._grouped_mm.default


class Values:
    """Runs ops on fake tensors, and also on the real values if these are known."""

    def __init__(self) -> None:
        self.overwritten: set[int] = set()

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the op's result, as fake tensors and plain numbers."""
        known = all(
            self.value(leaf) is not None for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)
        )
        if torch.Tag.data_dependent_output in func.tags and known:
            return self._really(func, args, kwargs)
        if torch.Tag.dynamic_output_shape in func.tags and known:
            real = self._really(func, args, kwargs)
            out = tree_map_only(torch.Tensor, lambda t: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype), real)
            self._remember(out, real)
            return out
        if func is torch.ops.aten.embedding.default:
            self._check_indices(*args[:2])
        out = _grouped_product(*args, **kwargs) if func is _GROUPED else func(*args, **kwargs)
        if known and all(leaf.numel() <= MOST_ELEMENTS for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)):
            self._remember(out, self._really(func, args, kwargs))
        elif func._schema.is_mutable:
            self._forget(func, args, kwargs)
        return out

    def value(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the real tensor beside a fake one; None if its values depend on weights."""
        if not isinstance(tensor, FakeTensor):
            return tensor
        value = getattr(tensor, "value_beside", None)
        return None if value is None or value.untyped_storage()._cdata in self.overwritten else value

    def give(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        tensor.value_beside = value  # type: ignore[attr-defined]

    def _really(self, func: Any, args: Any, kwargs: Any) -> Any:
        args, kwargs = tree_map_only(torch.Tensor, self.value, (args, kwargs))
        with unset_fake_temporarily():
            return func(*args, **kwargs)

    def _remember(self, out: Any, real: Any) -> None:
        for fake, value in zip(tree_leaves(out), tree_leaves(real), strict=True):
            if isinstance(fake, torch.Tensor):
                self.give(fake, value)

    def _forget(self, func: Any, args: Any, kwargs: Any) -> None:
        """Forget the values of tensors that are overwritten with unknown ones, and of all their views."""
        for place, argument in enumerate(func._schema.arguments):
            given = kwargs.get(argument.name) if argument.name in kwargs else args[place] if place < len(args) else None
            if argument.is_write:
                for tensor in tree_leaves(given):
                    value = getattr(tensor, "value_beside", None)
                    if value is not None:
                        self.overwritten.add(value.untyped_storage()._cdata)

    def _check_indices(self, table: torch.Tensor, indices: torch.Tensor) -> None:
        value = self.value(indices)
        if value is not None and value.numel():
            with unset_fake_temporarily():
                least, most = int(value.min()), int(value.max())
            if least < 0 or most >= table.shape[0]:
                raise IndexError(f"index {most} of a table of {table.shape[0]} rows")


def _grouped_product(*args: Any, **kwargs: Any) -> torch.Tensor:
    """Compute torch._grouped_mm in bf16 and cast the result: fake tensors support no other dtype."""
    as_bf16 = tree_map_only(torch.Tensor, lambda t: t.bfloat16() if t.is_floating_point() else t, (args, kwargs))
    return _GROUPED(*as_bf16[0], **as_bf16[1]).to(args[0].dtype)
