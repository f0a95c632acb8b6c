"""torch.utils.checkpoint without reentry: which tensors it keeps out of the graph, and when it recomputes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from weakref import ref

from memcalc.core.selective import Keeping, Policy, Taking
from memcalc.core.tensor import Autocast, Memory, Tensor

if TYPE_CHECKING:
    from memcalc.core.hooks import Packer


class _StopRecomputation(Exception):
    """Raised when everything that backward needs has been recomputed (torch's `early_stop`)."""


class _Holder:
    """Stands in a checkpointed node for a saved tensor. The holder dies with its node; then nobody asks for the
    tensor."""

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
    """An argument of a checkpoint inside another checkpoint, packed by the outer one. It has a grad_fn if the argument
    had one."""

    __slots__ = ("node", "output", "saved")

    def __init__(self, outer: Packer, tensor: Tensor) -> None:
        self.node, self.output = tensor.node, tensor.output
        self.saved = outer.pack(tensor)

    def unpack(self) -> Tensor:
        t = self.saved.unpack()
        return Tensor(t.storage, t.shape, t.strides, t.dtype, self.node, self.output)


class Checkpoint:
    """One call of `torch.utils.checkpoint.checkpoint(use_reentrant=False)`.

    If the call is inside another checkpoint's function, the outer checkpoint recomputes its arguments.
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
        if outer is None and memory.offloading is not None:
            self.args = _with_first_packed(args, memory.offloading)
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


def _with_first_packed(args: tuple[Any, ...], packer: Packer) -> tuple[Any, ...]:
    """Return the arguments with the first tensor packed, the only one that transformers' layers get by position: a checkpoint
    saves these as autograd saves tensors, and holds those by name as they are."""
    first = next((i for i, arg in enumerate(args) if isinstance(arg, Tensor)), None)
    return tuple(_Argument(packer, arg) if i == first else arg for i, arg in enumerate(args))


class Recomputation:
    """The saved-tensor hook of the recomputation. It hands each saved tensor to its holder and stops after the last
    one."""

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
    """Return the alias that the recomputation keeps of a tensor (torch.utils.checkpoint, pack_hook).

    For a weight that an engine has gathered, the alias refers to the gathered block, which the engine does not free
    with the weight. A weight that wants no gradient is kept itself.
    """
    if tensor.node is None and tensor.name:
        return tensor
    visitor = tensor.memory.visitor
    gathered = None if visitor is None else visitor.gathered(tensor)
    return tensor if gathered is None else gathered


def checkpoint(
    memory: Memory, function: Callable[..., Any], *args: Any, early_stop: bool = True, policy: Policy | None = None
) -> Any:
    """Run `function(*args)` and keep only its arguments. Tensors that it saves are recomputed when backward asks for
    them.

    `early_stop` ends a recomputation after the last tensor that backward asks for, as torch's non-reentrant checkpoint
    does. `policy` says which ops' results are kept as well.
    """
    outer, contexts = memory.checkpoint, memory.contexts
    context = None if policy is None else Keeping(policy, contexts)
    memory.checkpoint = Checkpoint(memory, function, args, context, early_stop=early_stop)
    memory.contexts = context or contexts
    try:
        return function(*args)
    finally:
        memory.checkpoint, memory.contexts = outer, contexts
