"""torch.utils.checkpoint without reentry: what it leaves out of the graph, and when that is computed again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import ref

from memcalc.core.selective import Keeping, Policy, Taking
from memcalc.core.tensor import Autocast, Memory, Packer, Tensor


class _StopRecomputation(Exception):
    """Everything that backward needs has been recomputed (torch's `early_stop`)."""


class _Holder:
    """What a checkpointed node keeps in place of a saved tensor. It goes with the node, and nobody asks for the tensor then."""

    __slots__ = ("__weakref__", "frame", "tensor")

    def __init__(self, frame: Checkpoint) -> None:
        self.frame = frame
        self.tensor: Tensor | None = None

    def unpack(self) -> Tensor:
        self.frame.recompute()
        tensor, self.tensor = self.tensor, None
        assert tensor is not None
        return tensor


class _Argument:
    """An argument of a checkpoint within another one, which packs it. It wants a gradient if it did."""

    __slots__ = ("node", "output", "saved")

    def __init__(self, outer: Packer, tensor: Tensor) -> None:
        self.node, self.output = tensor.node, tensor.output
        self.saved = outer.pack(tensor)

    def unpack(self) -> Tensor:
        t = self.saved.unpack()
        return Tensor(t.storage, t.shape, t.strides, t.dtype, self.node, self.output)


class Checkpoint:
    """One call of `torch.utils.checkpoint.checkpoint(use_reentrant=False)`.

    Within another one's function, its arguments are among what the other one recomputes.
    """

    __slots__ = ("__weakref__", "args", "autocast", "context", "done", "early_stop", "function", "holders", "memory")
    keeps = False

    def __init__(
        self,
        memory: Memory,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        context: Keeping | None,
        *,
        early_stop: bool,
    ) -> None:
        outer = memory.checkpoint
        self.memory, self.function, self.context, self.early_stop = memory, function, context, early_stop
        self.args = (
            args if outer is None else tuple(_Argument(outer, arg) if isinstance(arg, Tensor) else arg for arg in args)
        )
        self.autocast = None if memory.autocast is None else memory.autocast.dtype
        self.holders: list[ref[_Holder]] = []
        self.done = False

    def pack(self, tensor: Tensor) -> _Holder:
        holder = _Holder(self)
        self.holders.append(ref(holder))
        return holder

    def recompute(self) -> None:
        if self.done:
            return
        memory, scope = self.memory, self.memory.scope
        args = [arg.unpack() if isinstance(arg, _Argument) else arg for arg in self.args]
        memory.grad_enabled = True
        memory.checkpoint, memory.recomputing = Recomputation(self), True
        if self.context is not None:
            memory.contexts = Taking(self.context.kept, memory.contexts)
        try:
            with Autocast(memory, self.autocast):
                self.function(*args)
        except _StopRecomputation:
            pass
        memory.checkpoint = memory.contexts = None
        memory.grad_enabled = memory.recomputing = False
        memory.scope = scope
        self.done = True
        self.holders = []


class Recomputation:
    """The hook of the second run: it hands each saved tensor to its holder and stops after the last."""

    __slots__ = ("count", "frame")
    keeps = True

    def __init__(self, frame: Checkpoint) -> None:
        self.frame = frame
        self.count = 0

    def pack(self, tensor: Tensor) -> Tensor:
        holder = self.frame.holders[self.count]()
        if holder is not None:
            holder.tensor = Tensor(_detached(tensor).storage, tensor.shape, tensor.strides, tensor.dtype)
        self.count += 1
        if self.frame.early_stop and self.count == len(self.frame.holders):
            raise _StopRecomputation
        return tensor


def _detached(tensor: Tensor) -> Tensor:
    """What the recomputation keeps of it (torch.utils.checkpoint, pack_hook): of a weight that an engine has gathered an alias
    of what was gathered, which the engine does not free with the weight."""
    visitor = tensor.memory.visitor
    gathered = None if visitor is None else visitor.gathered(tensor)
    return tensor if gathered is None else gathered


def checkpoint(
    memory: Memory, function: Callable[..., Any], *args: Any, early_stop: bool = True, policy: Policy | None = None
) -> Any:
    """Run `function(*args)`, keeping its arguments only; what it saves is recomputed when backward asks for it.

    `early_stop`: a recomputation ends with the last tensor that is asked for, as torch's non-reentrant one does.
    `policy`: of which ops the results are kept too.
    """
    outer, contexts = memory.checkpoint, memory.contexts
    context = None if policy is None else Keeping(policy, contexts)
    memory.checkpoint = Checkpoint(memory, function, args, context, early_stop=early_stop)
    memory.contexts = context or contexts
    try:
        return function(*args)
    finally:
        memory.checkpoint, memory.contexts = outer, contexts
