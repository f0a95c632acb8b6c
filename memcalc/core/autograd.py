"""A tiny autograd over sizes: it keeps what the real one keeps and runs in the order in which the real one runs.

Sources: torch/csrc/autograd/engine.cpp (the ready queue is ordered by sequence number, highest first; inputs of a node die
when it returns, its saved variables right after), input_buffer.cpp (a second gradient for the same tensor is added out of
place unless the buffer is the only owner; under a dispatch mode always out of place, which is what the oracle sees),
functions/accumulate_grad.cpp (a leaf takes the first gradient as it is, if it is laid out as the leaf),
torch/utils/checkpoint.py (non-reentrant).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from heapq import heapify, heappop, heappush
from typing import Any, NamedTuple
from weakref import ref

from memcalc.core.dims import ONE_DIM, Shape, numel
from memcalc.core.dtypes import DType
from memcalc.core.selective import Keeping, Policy, Taking
from memcalc.core.tensor import (
    Autocast,
    Memory,
    Packer,
    Saved,
    Tensor,
    contiguous_strides,
    is_contiguous,
    new_tensor,
    same_sizes,
)

Gradients = list[Tensor | None]
Backward = Callable[["Node", list[Tensor]], Sequence[Tensor | None]]
_LEAF_SEQUENCE = 1 << 60


class Node:
    """A grad_fn: where its gradients go, what it saved, and how it runs."""

    __slots__ = (
        "backward",
        "context",
        "edges",
        "held",
        "layer",
        "memory",
        "metadata",
        "outputs",
        "saved",
        "scope",
        "sequence",
        "visit",
    )

    def __init__(
        self,
        memory: Memory,
        backward: Backward,
        inputs: Sequence[Tensor],
        saved: Sequence[Tensor] = (),
        context: Any = None,
        outputs: int = 1,
    ) -> None:
        memory.sequence += 1
        self.memory = memory
        self.backward = backward
        self.sequence = memory.sequence
        self.layer = memory.layer
        self.scope = memory.scope
        self.context = context
        self.outputs = outputs
        self.visit: Any = None if memory.visitor is None else memory.visitor.current()
        self.edges: list[tuple[Node | None, int]] = [(t.node, t.output) for t in inputs]
        self.metadata: list[tuple[Shape, DType]] = [(t.shape, t.dtype) for t in inputs]
        frame = memory.checkpoint
        self.saved: list[Saved] = list(saved) if frame is None else [frame.pack(tensor) for tensor in saved]
        self.held = _gathered(memory, saved) if frame is None and memory.visitor is not None else ()
        """What an engine has gathered of weights that it has saved views of: a view keeps it, whatever the engine frees."""

    def unpack(self) -> list[Tensor]:
        """The saved tensors; recomputes a checkpointed block on the first call."""
        return [tensor.unpack() for tensor in self.saved]

    def needs(self, i: int) -> bool:
        """Tell whether input `i` wants a gradient (`task_should_compute_output`)."""
        only = self.memory.only
        return self.edges[i][0] is not None and (only is None or self.edges[i][0] in only)

    def run(self, grads: list[Tensor]) -> Gradients:
        outs = list(self.backward(self, grads))
        if self.memory.only is not None:
            outs = [out if self.needs(i) else None for i, out in enumerate(outs)]
        for i in range(len(outs)):  # enumerate would hold a gradient for longer
            out = outs[i]
            if out is not None:
                shape, dtype = self.metadata[i]
                if not same_sizes(out.shape, shape):
                    out = outs[i] = sum_to(out, shape)
                if out.dtype is not dtype:
                    from memcalc.core.ops.strides import elementwise_strides

                    strides = elementwise_strides(out.shape, (out,))  # out may be expanded; a copy of it is dense
                    outs[i] = new_tensor(self.memory, out.shape, dtype, "gradient cast", strides)
        return outs


def _gathered(memory: Memory, saved: Sequence[Tensor]) -> Sequence[Tensor]:
    visitor = memory.visitor
    assert visitor is not None
    views = [tensor for tensor in saved if not isinstance(tensor.node, Leaf)]
    return [block for view in views if (block := visitor.gathered(view)) is not None]


class Leaf(Node):
    """A weight's gradient accumulator (AccumulateGrad). `shape` is the weight's: a shard can have a whole gradient."""

    __slots__ = ("accumulating", "grad", "ready", "shape", "weight_layer")

    def __init__(
        self, memory: Memory, name: str, shape: Shape, layer: int | None, *, accumulating: bool = False
    ) -> None:
        super().__init__(memory, Node.run, ())  # type: ignore[arg-type]
        self.shape = shape
        self.sequence = _LEAF_SEQUENCE
        self.scope = name
        self.weight_layer = layer
        self.grad: Tensor | None = None
        self.accumulating = accumulating
        self.ready: Callable[[Tensor], None] | None = None
        """What is done with a gradient that has been accumulated (register_post_accumulate_grad_hook)."""

    def run(self, grads: list[Tensor]) -> Gradients:
        """Take the gradient as it is, or add it to the one that an earlier micro-batch left."""
        if not self.accumulating and self.grad is None:
            whole = grads[0].shape if numel(grads[0].shape)[0] != numel(self.shape)[0] else self.shape
            self.memory.relabel(grads[0].storage, whole, "gradients", self.scope, self.weight_layer)
            self.grad = grads[0]
        if self.ready is not None:
            self.ready(grads[0])
        return []


class Constant(Node):
    """The gradient accumulator of a leaf that a forward makes and nobody trains: the graph keeps both it and its gradient,
    a copy where that is not laid out as the leaf, which is contiguous.

    `tensor` refers to the leaf's storage, not to the leaf, which refers to this.
    """

    __slots__ = ("grad", "leaf")

    def __init__(self, memory: Memory, leaf: Tensor) -> None:
        super().__init__(memory, Node.run, ())  # type: ignore[arg-type]
        self.sequence = _LEAF_SEQUENCE
        self.leaf = leaf.storage
        self.grad: Tensor | None = None

    def run(self, grads: list[Tensor]) -> Gradients:
        grad = grads[0]
        self.grad = (
            grad if is_contiguous(grad) else new_tensor(self.memory, grad.shape, grad.dtype, "gradient as the leaf")
        )
        return []


def sum_to(tensor: Tensor, shape: Shape) -> Tensor:
    """`tensor.sum_to_size(shape)`: one reduction, then a view."""
    lead = len(tensor.shape) - len(shape)
    kept = tuple(
        dim if i >= lead and shape[i - lead].size == dim.size else ONE_DIM for i, dim in enumerate(tensor.shape)
    )
    out = new_tensor(tensor.memory, kept, tensor.dtype, "gradient sum")
    return Tensor(out.storage, shape, contiguous_strides(shape), tensor.dtype)


class Part(NamedTuple):
    """A part of a graph that is run alone, as `torch.autograd.grad` does with `inputs`."""

    nodes: AbstractSet[Node]
    """Those that run, the captured ones among them."""
    captured: dict[Node, Tensor | None]
    """Leaves whose gradient is handed out instead of accumulated."""
    watched: dict[Node, Gradients]
    """Nodes of which it is noted what comes to them (Node.register_prehook)."""
    retains: bool
    """retain_graph"""


def backward(
    loss: Tensor, queued: Callable[[], None] | None = None, gradient: Tensor | None = None, part: Part | None = None
) -> None:
    """`loss.backward()`: every leaf that was used gets its gradient; the graph's saved tensors go as it runs.

    `queued` runs last, within it (Engine::queue_callback). `gradient` is that of the output, where it is no loss.
    """
    memory = loss.memory
    root = loss.node
    assert root is not None
    memory.scope = "loss"
    root_gradient = gradient  # the caller's frame holds it
    if root_gradient is None:
        root_gradient = new_tensor(memory, loss.shape, loss.dtype, "gradient of the loss")
    inbox: dict[Node, list[Tensor | None]] = {root: [root_gradient]}
    del root
    run_graph(memory, inbox, queued, part)
    del root_gradient


def run_graph(
    memory: Memory,
    inbox: dict[Node, list[Tensor | None]],
    queued: Callable[[], None] | None = None,
    part: Part | None = None,
) -> None:
    """Run the graph behind the nodes that `inbox` has gradients for, or a part of it."""
    memory.grad_enabled = False
    memory.only = None if part is None else part.nodes
    waiting = _dependencies(list(inbox), memory.only)
    visitor = memory.visitor
    if visitor is not None:
        visitor.backward_begins(waiting)
    ready = [(-root.sequence, i, root) for i, root in enumerate(inbox) if not waiting[root]]
    heapify(ready)
    ticket = len(inbox)
    while ready:
        node = heappop(ready)[2]
        if part is not None and node in part.captured:
            (part.captured[node],) = inbox.pop(node)
            continue
        if node.sequence != _LEAF_SEQUENCE and node.layer != memory.layer:
            memory.enter(memory.phase, node.layer)
        memory.scope = node.scope
        if part is not None and node in part.watched:
            part.watched[node] = list(inbox[node])
        if visitor is not None and node.sequence != _LEAF_SEQUENCE:
            visitor.before(node)
        outs = _call(node, inbox, retains=part is not None and part.retains)
        for i, (following, slot) in enumerate(node.edges):
            if following is None or (part is not None and following not in part.nodes):
                continue
            if outs[i] is not None:
                _deliver(inbox, following, slot, outs, i)
            waiting[following] -= 1
            if not waiting[following]:
                ticket += 1
                heappush(ready, (-following.sequence, ticket, following))
        if visitor is not None:
            visitor.after(node)
    if visitor is not None:
        visitor.backward_ends()
    memory.only = None
    if queued is not None:
        queued()
    memory.grad_enabled = True


def _call(node: Node, inbox: dict[Node, list[Tensor | None]], *, retains: bool) -> Gradients:
    grads = inbox.pop(node, None)
    if grads is None:  # no gradient has come to it: it has none to give, and the nodes behind it need not wait
        node.saved = []
        return [None] * len(node.edges)
    outs = node.run(grads)  # type: ignore[arg-type]
    grads.clear()
    if not retains:
        node.saved, node.held = [], ()
    return outs


def _deliver(inbox: dict[Node, list[Tensor | None]], node: Node, slot: int, outs: Gradients, i: int) -> None:
    buffer = inbox.get(node)
    if buffer is None:
        buffer = inbox[node] = [None] * node.outputs
    old, new = buffer[slot], outs[i]
    outs[i] = None
    assert new is not None
    if old is None:
        buffer[slot] = new
    else:
        from memcalc.core.ops.strides import elementwise_strides

        own = new
        if not same_sizes(old.shape, new.shape):  # a shard's and a whole table's, of which a part is taken
            own = new_tensor(new.memory, old.shape, new.dtype, "gradient of the shard")
        strides = elementwise_strides(own.shape, (old, own))
        buffer[slot] = new_tensor(own.memory, own.shape, own.dtype, "gradient sum", strides)


def _dependencies(roots: list[Node], only: AbstractSet[Node] | None) -> dict[Node, int]:
    counts: dict[Node, int] = dict.fromkeys(roots, 0)
    stack = roots
    while stack:
        for following, _ in stack.pop().edges:
            if following is None or (only is not None and following not in only):
                continue
            if following in counts:
                counts[following] += 1
            else:
                counts[following] = 1
                stack.append(following)
    return counts


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
