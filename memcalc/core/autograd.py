"""A tiny autograd over sizes: it keeps what the real one keeps and runs in the order in which the real one runs.

Sources: torch/csrc/autograd/engine.cpp (the ready queue is ordered by sequence number, highest first; inputs of a node die
when it returns, its saved variables right after), input_buffer.cpp (a second gradient of the same tensor is added into the
first one if the buffer is its only owner, else a third tensor is made),
functions/accumulate_grad.cpp (a leaf takes the first gradient as it is, if it is laid out as the leaf),
torch/utils/checkpoint.py (non-reentrant).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from functools import cache
from heapq import heapify, heappop, heappush
from sys import getrefcount
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from memcalc.core.dims import ONE_DIM, Shape, numel
from memcalc.core.dtypes import DType
from memcalc.core.tensor import (
    Memory,
    Streamed,
    Tensor,
    contiguous_strides,
    is_contiguous,
    is_dense,
    new_tensor,
    same_sizes,
)

if TYPE_CHECKING:
    from memcalc.core.hooks import Saved

Gradients = list[Tensor | None]
Backward = Callable[["Node", list[Tensor]], Sequence[Tensor | None]]
LEAF_SEQUENCE = 1 << 60
_NAME = re.compile(r"_?(.*?)(_backward)?$")


_Function = TypeVar("_Function", bound=Callable[..., Any])


def no_kernel(backward: _Function) -> _Function:
    """Mark the backward of an op whose forward runs no kernel of its own: it makes a view, or it sends a collective."""
    backward.runs_no_kernel = True  # type: ignore[attr-defined]
    return backward


def runs_graph(backward: _Function) -> _Function:
    """Mark the backward of an op that runs a graph of its own, whose nodes say which kernels run."""
    backward.runs_graph = True  # type: ignore[attr-defined]
    return no_kernel(backward)


class Node:
    """A grad_fn. It knows where its gradients go, which tensors it saved, and how it runs."""

    __slots__ = (
        "again", "backward", "context", "edges", "gathered", "kept", "layer", "memory", "metadata", "outputs", "saved", "scope",
        "sequence", "visit",
    )  # fmt: skip
    cast_once = False
    """True for a leaf whose copy in autocast's dtype is kept for the next op that needs it."""

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
        self.again = frame is not None or memory.recomputing
        """True if the op's forward runs twice: in forward, and when backward recomputes it."""
        self.kept = [(_stored(t), t.dtype) for t in saved]
        packer = frame or memory.offloading
        self.saved: list[Saved] = list(saved) if packer is None else [packer.pack(tensor) for tensor in saved]
        self.gathered = _gathered(memory, saved) if frame is None and memory.visitor is not None else ()
        """The blocks that an engine has gathered weights into, where the node saved views of these weights. A view
        keeps its block alive, whatever the engine frees."""

    def unpack(self) -> list[Tensor]:
        """Return the saved tensors. The first call inside a checkpoint recomputes the checkpointed function."""
        return [tensor.unpack() for tensor in self.saved]

    def needs(self, i: int) -> bool:
        """Tell whether input `i` requires a gradient (`task_should_compute_output`)."""
        only = self.memory.only
        return self.edges[i][0] is not None and (only is None or self.edges[i][0] in only)

    def run(self, grads: list[Tensor]) -> Gradients:
        memory = self.memory
        before, place = (len(memory.work), len(memory.sent)), len(memory.log)
        outs = list(self.backward(self, grads))
        if (len(memory.work), len(memory.sent)) == before:
            self._stream(grads, place)
        edges, only = self.edges, memory.only
        for i in range(len(outs)):  # enumerate would hold a gradient for longer
            following = edges[i][0]
            out = outs[i] = outs[i] if following is not None and (only is None or following in only) else None
            if out is not None:
                shape, dtype = self.metadata[i]
                if out.shape is not shape and not same_sizes(out.shape, shape):
                    out = outs[i] = sum_to(out, shape)
                if out.dtype is not dtype:
                    from memcalc.core.ops.strides import elementwise_strides

                    strides = elementwise_strides(out.shape, (out,))  # out may be expanded; the copy is dense
                    cast = outs[i] = new_tensor(self.memory, out.shape, dtype, "gradient cast", strides)
                    _stream_of(self.memory, "gradient cast", out, cast)
                    del cast
        return outs

    def _stream(self, grads: Sequence[Tensor | None], place: int) -> None:
        """Record the kernels of an op's forward and backward, by the tensors that they read and write.

        Backward runs a kernel for each block that it has allocated since `place` in the log. Each reads the gradient. The
        op is none that multiplies matrices, whose kernels are its products, and none that sends.
        """
        rows, log = self.memory.rows, self.memory.log
        runs_kernel = not hasattr(self.backward, "runs_no_kernel")
        if not runs_kernel and (len(log) == place or hasattr(self.backward, "runs_graph")):
            return
        read = tuple([(_stored(grad), grad.dtype) for grad in grads if grad is not None])
        written = [(row.shape, row.dtype) for row in [rows[block] for block in log[place:] if block >= 0]]
        name, record = _name_of(self.backward), self.memory.streamed.append
        if runs_kernel:
            for phase in ("forward", "recomputation") if self.again else ("forward",):
                record(Streamed(self.scope, name, phase, self.layer, (*self.metadata, *read)))
        saved = tuple(self.kept)
        for block in written:
            record(Streamed(self.scope, name, "backward", self.layer, (*read, *saved, block)))
            saved = ()


def _stream_of(memory: Memory, name: str, *tensors: Tensor) -> None:
    """Record a kernel of autograd itself, which reads or writes these tensors."""
    operands = tuple((_stored(tensor), tensor.dtype) for tensor in tensors)
    memory.streamed.append(Streamed(memory.scope, name, memory.phase, memory.layer, operands))


def _stored(tensor: Tensor) -> Shape:
    """Return a tensor's shape without the dims that it is expanded along: their elements are the same in memory."""
    if 0 not in tensor.strides:
        return tensor.shape
    return tuple(dim for dim, stride in zip(tensor.shape, tensor.strides, strict=True) if stride)


@cache
def _name_of(backward: Backward) -> str:
    """Return the name of the op that a backward function belongs to."""
    match = _NAME.fullmatch(backward.__name__)
    assert match is not None
    return match[1].replace("_", " ")


def _gathered(memory: Memory, saved: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the gathered blocks behind views of weights. A weight itself, which has a name, is no view: what it refers
    to changes when the engine frees it."""
    visitor = memory.visitor
    assert visitor is not None
    views = [tensor for tensor in saved if not (isinstance(tensor.node, Leaf) or (tensor.node is None and tensor.name))]
    return [block for view in views if (block := visitor.gathered(view)) is not None]


class Leaf(Node):
    """The gradient accumulator of a weight (AccumulateGrad). `shape` is the weight's; the gradient of a shard may have
    the shape of the whole weight."""

    __slots__ = ("accumulating", "grad", "ready", "shape", "weight_layer")
    cast_once = True

    def __init__(
        self, memory: Memory, name: str, shape: Shape, layer: int | None, *, accumulating: bool = False
    ) -> None:
        super().__init__(memory, Node.run, ())  # type: ignore[arg-type]
        self.shape = shape
        self.sequence = LEAF_SEQUENCE
        self.scope = name
        self.weight_layer = layer
        self.grad: Tensor | None = None
        self.accumulating = accumulating
        self.ready: Callable[[Tensor], None] | None = None
        """Called with each gradient after it has been accumulated (register_post_accumulate_grad_hook)."""

    def run(self, grads: list[Tensor]) -> Gradients:
        """Keep the gradient as it is, or add it to the gradient of an earlier micro-batch."""
        if self.accumulating:
            _stream_of(self.memory, "gradient of an earlier micro-batch", grads[0], grads[0], grads[0])
        if not self.accumulating and self.grad is None:
            whole = grads[0].shape if numel(grads[0].shape)[0] != numel(self.shape)[0] else self.shape
            self.memory.relabel(grads[0].storage, whole, "gradients", self.scope, self.weight_layer)
            self.grad = grads[0]
        if self.ready is not None:
            self.ready(grads[0])
        return []


class Constant(Node):
    """The gradient accumulator of a leaf that forward makes and nobody trains. The graph keeps both the accumulator and
    its gradient. The gradient is copied if it is not laid out as the leaf, which is contiguous.

    `leaf` is the leaf's storage, not the leaf itself: the leaf refers to this accumulator.
    """

    __slots__ = ("grad", "leaf")

    def __init__(self, memory: Memory, leaf: Tensor) -> None:
        super().__init__(memory, Node.run, ())  # type: ignore[arg-type]
        self.sequence = LEAF_SEQUENCE
        self.leaf = leaf.storage
        self.grad: Tensor | None = None

    def run(self, grads: list[Tensor]) -> Gradients:
        grad = grads[0]
        self.grad = (
            grad if is_contiguous(grad) else new_tensor(self.memory, grad.shape, grad.dtype, "gradient as the leaf")
        )
        return []


def sum_to(tensor: Tensor, shape: Shape) -> Tensor:
    """Return `tensor.sum_to_size(shape)`: one reduction, then a view."""
    lead = len(tensor.shape) - len(shape)
    kept = tuple(
        dim if i >= lead and shape[i - lead].size == dim.size else ONE_DIM for i, dim in enumerate(tensor.shape)
    )
    out = new_tensor(tensor.memory, kept, tensor.dtype, "gradient sum")
    _stream_of(tensor.memory, "gradient sum", tensor, out)
    return Tensor(out.storage, shape, contiguous_strides(shape), tensor.dtype)


class Part(NamedTuple):
    """A part of a graph that runs alone, as in `torch.autograd.grad` with `inputs`."""

    nodes: AbstractSet[Node]
    """The nodes that run, including the captured ones."""
    captured: dict[Node, Tensor | None]
    """The leaves whose gradient is returned instead of accumulated."""
    watched: dict[Node, Gradients]
    """The nodes whose incoming gradients are recorded (Node.register_prehook)."""
    retains: bool
    """True keeps the saved tensors after the run (`retain_graph`)."""


def backward(
    loss: Tensor, queued: Callable[[], None] | None = None, gradient: Tensor | None = None, part: Part | None = None
) -> None:
    """Run `loss.backward()`: every leaf that was used gets its gradient, and saved tensors are freed as their nodes
    run.

    `queued` runs last, within backward (Engine::queue_callback). `gradient` is the gradient of the output, for an
    output that is not a loss.
    """
    memory = loss.memory
    root = loss.node
    assert root is not None
    memory.scope = "loss"
    root_gradient = gradient  # the caller's frame keeps this gradient alive
    if root_gradient is None:
        root_gradient = new_tensor(memory, loss.shape, loss.dtype, "gradient of the loss")
    inbox: dict[Node, list[Tensor | None]] = {root: [root_gradient]}
    del root
    run_graph(memory, inbox, queued, part)
    memory.scope = ""  # later allocations are in no module
    del root_gradient


def run_graph(
    memory: Memory,
    inbox: dict[Node, list[Tensor | None]],
    queued: Callable[[], None] | None = None,
    part: Part | None = None,
) -> None:
    """Run the graph behind the nodes that `inbox` has gradients for, or the part of it that `part` names."""
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
        if node.sequence != LEAF_SEQUENCE and node.layer != memory.layer:
            memory.enter(memory.phase, node.layer)
        memory.scope = node.scope
        if part is not None and node in part.watched:
            part.watched[node] = list(inbox[node])
        if visitor is not None and node.sequence != LEAF_SEQUENCE:
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
    if grads is None:  # no gradient has come to the node: it gives none, and the nodes behind it do not wait
        node.saved = []
        return [None] * len(node.edges)
    if node.memory.gradient_hooks:
        for hook in node.memory.gradient_hooks.pop(node, ()):
            hook()
    offloading = node.memory.offloading
    if offloading is not None:
        offloading.before(node)
    outs = node.run(grads)  # type: ignore[arg-type]
    if offloading is not None:
        offloading.after()
    grads.clear()
    if not retains:
        node.saved, node.gathered = [], ()
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
        own = new
        if not same_sizes(old.shape, new.shape):  # one is a shard's gradient, the other the whole table's
            own = new_tensor(new.memory, old.shape, new.dtype, "gradient of the shard")
        if not _is_owned(old):
            from memcalc.core.ops.strides import elementwise_strides

            strides = elementwise_strides(own.shape, (old, own))
            buffer[slot] = new_tensor(own.memory, own.shape, own.dtype, "gradient sum", strides)
        _stream_of(own.memory, "gradient sum", own, own, own)


def _is_owned(tensor: Tensor) -> bool:
    """Tell whether nobody but the buffer holds a dense tensor or its storage (can_accumulate_inplace)."""
    return (
        not tensor.is_view
        and getrefcount(tensor) == _HELD_BY_BUFFER
        and getrefcount(tensor.storage) == _HELD_BY_TENSOR
        and is_dense(tensor.shape, tensor.strides)
    )


_HELD_BY_BUFFER: Final = 4  # the buffer, the caller's name, the parameter and getrefcount's argument
_HELD_BY_TENSOR: Final = 2  # the tensor and getrefcount's argument


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
