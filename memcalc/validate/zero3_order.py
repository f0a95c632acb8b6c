# pyright: basic
"""The order in which ZeRO-3 goes through its sets of parameters: by address on each real rank, here the estimated
order."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator
from typing import Any
from unittest import mock


class InOrder(set[Any]):
    """A set with a known order. A set of parameters is ordered by their addresses, and ZeRO-3 waits for the gathers of
    a module in that order. Here the order is one in which most is alive: one parameter of each gather first."""

    def __init__(self, things: Iterable[Any] = ()) -> None:
        super().__init__()
        self.order: dict[Any, None] = {}
        self.update(things)

    def __iter__(self) -> Iterator[Any]:
        first: dict[int, Any] = {}
        gather = None
        for thing in self.order:
            gather = getattr(thing, "gathered_by", lambda: None)()
            if gather is not None and not gather.complete:
                first.setdefault(id(gather), thing)
        del gather
        one_of_each = list(first.values())
        return iter([*one_of_each, *(thing for thing in self.order if not any(thing is one for one in one_of_each))])

    def add(self, thing: Any) -> None:
        super().add(thing)
        self.order[thing] = None

    def update(self, *others: Iterable[Any]) -> None:
        for thing in (thing for things in others for thing in things):
            self.add(thing)

    def discard(self, thing: Any) -> None:
        super().discard(thing)
        self.order.pop(thing, None)


@contextlib.contextmanager
def sets_in_order() -> Iterator[None]:
    """Let ZeRO-3's bookkeeping use these sets within a block."""
    from deepspeed.runtime.zero import partition_parameters, partitioned_param_coordinator

    kind = partition_parameters.AllGatherCoalescedHandle
    make = kind.__init__

    def noted(self: Any, allgather_handle: Any, params: Any, *args: Any, **kwargs: Any) -> None:
        make(self, allgather_handle, params, *args, **kwargs)
        for parameter in params:
            parameter.gathered_by = weakref.ref(self)

    with (
        mock.patch.object(kind, "__init__", noted),
        mock.patch.object(partitioned_param_coordinator, "set", InOrder, create=True),
    ):
        yield
