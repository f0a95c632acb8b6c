# pyright: basic
"""The collectives of a step, as torch's dispatcher sees them: torch.distributed's, DTensor's functional ones,
DeepSpeed's."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _resolve_process_group
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

_C10D: Final[dict[str, str | None]] = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "_allgather_base_": "all_gather",
    "allgather_": "all_gather",
    "allgather_coalesced_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "alltoall_base_": "all_to_all",
    "alltoall_": "all_to_all",
    "broadcast_": "broadcast",
    "send": "send",
    "recv_": None,  # counted where it is sent
    "recv_any_source_": None,
    "barrier": None,
    "monitored_barrier_": None,
    "check_for_nan": None,
}
"""torch.distributed's ops -> collective. An op that is not listed is counted under its own name."""
_FUNCTIONAL: Final = {
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_out": "all_gather",
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_out": "reduce_scatter",
    "all_to_all_single": "all_to_all",
}
_DEEPSPEED: Final = {"dim_zero_all_to_all": "all_to_all"}
_NO_TRANSFER: Final = ("wait_tensor", "_wrap_tensor_autograd")


class Call(NamedTuple):
    """One call of a collective."""

    collective: str
    ranks: int
    """The number of ranks in its group."""
    payload: int
    """The bytes of the full tensors, as in an estimate's collectives."""


def call_of(func: Any, args: tuple[Any, ...]) -> Call | None:
    """Return the collective of an op; None if it sends nothing, or if its other side is counted."""
    name = func._schema.name.split("::")[1]
    if func.namespace == "c10d":
        kind = _C10D.get(name, name)
        return None if kind is None else Call(kind, _ranks(args), max(map(_nbytes, args[:2])))
    if func.namespace == "_c10d_functional" and name not in _NO_TRANSFER:
        ranks = _resolve_process_group(args[-1]).size()
        functional = "send" if name == "all_to_all_single" and _to_one(args[2]) else _FUNCTIONAL.get(name, name)
        whole = ranks if functional == "all_gather" else 1
        return Call(functional, ranks, _nbytes(args[0]) * whole)
    if func.namespace == "deepspeed":  # an op with its collective inside
        return Call(_DEEPSPEED.get(name, name), _resolve_process_group(args[1]).size(), args[0].nbytes)
    return None


class Collectives(TorchDispatchMode):
    """A dispatch mode that counts collective calls and changes nothing. Backward's threads have the mode of their
    caller."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[tuple[str, int], tuple[int, int]] = {}
        """(collective, ranks of its group) -> calls and payload."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if has_local_tensors(types):
            return NotImplemented
        call = call_of(func, args)
        if call is not None:
            calls, payload = self.calls.get(call[:2], (0, 0))
            self.calls[call[:2]] = calls + 1, payload + call.payload
        return func(*args, **(kwargs or {}))


def has_local_tensors(types: Any) -> bool:
    """Tell whether an op is over wrappers. The ops over their local tensors reach a mode separately."""
    return any(issubclass(t, (DTensor, AsyncCollectiveTensor)) for t in types)


def _nbytes(tensors: Any) -> int:
    return sum(leaf.nbytes for leaf in tree_iter(tensors) if isinstance(leaf, torch.Tensor))


def _to_one(parts: list[int]) -> bool:
    """Tell whether one rank gets everything, as in torch's ring."""
    return sum(n > 0 for n in parts) == 1 < len(parts)


def _ranks(args: tuple[Any, ...]) -> int:
    objects = (a for a in args if isinstance(a, torch.ScriptObject) and "ProcessGroup" in str(a._type()))
    return dist.ProcessGroup.unbox(next(objects)).size()
