"""torch.utils.checkpoint with reentry: forward without a graph, and in backward a graph of its own for every call.

Source: torch/utils/checkpoint.py, CheckpointFunction. The function runs under `no_grad`. One node stands for it, which saves
the tensors among its positional arguments. Its backward detaches them, runs the function to its end, and runs the backward
of what that has made before it returns. So the output, the gradient of the output and all that the function saves are alive
together. Arguments by keyword are in the function, and live as long as the graph does, which is as long as the loss.
"""

from __future__ import annotations

from sys import getrefcount
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

from memcalc.core.autograd import LEAF_SEQUENCE, Node, run_graph
from memcalc.core.tensor import Autocast, Tensor, contiguous_strides, is_contiguous, is_dense, new_tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from memcalc.core.autograd import Gradients
    from memcalc.core.dims import Shape
    from memcalc.core.dtypes import DType
    from memcalc.core.noted import Where
    from memcalc.core.tensor import Memory


class Call(NamedTuple):
    """One call of `torch.utils.checkpoint.checkpoint(use_reentrant=True)`."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    """The arguments: a place in the model, and what the function gets there."""
    positional: int
    """The number of arguments after the place that are given by position."""
    where: Where
    """The module that is checkpointed. Its hooks are outside of the call."""

    @property
    def places(self) -> tuple[int, ...]:
        """Return the places of the tensors among the positional arguments."""
        return tuple([i for i, arg in enumerate(self.args[: 1 + self.positional]) if isinstance(arg, Tensor)])

    @property
    def wants_gradient(self) -> bool:
        """Tell whether a tensor among the positional arguments wants a gradient. Otherwise the outputs want none."""
        return any(self.args[i].node is not None for i in self.places)


class _Context(NamedTuple):
    """The context of a call's node (`ctx`)."""

    call: Call
    """The call without the tensors that are saved."""
    places: tuple[int, ...]
    autocast: DType | None
    outputs: tuple[tuple[Shape, DType], ...]


def reentrant_checkpoint(memory: Memory, call: Call) -> Any:
    """Run a call's forward. Its outputs have a gradient if a tensor that is given by position has one."""
    if not memory.grad_enabled:
        return call.function(*call.args)
    visitor = memory.visitor
    visited = visitor is not None and visitor.enter(*call.where)
    done = False
    try:
        memory.grad_enabled = False
        outputs = call.function(*call.args)
        memory.grad_enabled = True
        outputs = _with_node(memory, call, outputs)
        done = True
    finally:
        memory.grad_enabled = True
        if visited and visitor is not None:
            visitor.leave(done=done)
    return outputs


def _with_node(memory: Memory, call: Call, outputs: Any) -> Any:
    """Return the outputs of a call as those of its node. All that are floats want a gradient, whatever they are."""
    if not call.wants_gradient:
        return outputs
    places = call.places
    inputs = [call.args[i] for i in places]
    several = _several(outputs)
    floats = list(filter(_is_float, several))
    kept = call._replace(args=tuple([None if i in places else arg for i, arg in enumerate(call.args)]))
    autocast = None if memory.autocast is None else memory.autocast.dtype
    context = _Context(kept, places, autocast, tuple([(out.shape, out.dtype) for out in floats]))
    node = Node(memory, _checkpoint_backward, inputs, inputs, context, outputs=len(floats))
    number = iter(range(len(floats)))
    own: list[Any] = [_output(out, node, next(number)) if _is_float(out) else out for out in several]
    return tuple(own) if isinstance(outputs, tuple) else own[0]


def _several(outputs: Any) -> tuple[Any, ...]:
    """Return the outputs of a function one by one."""
    return tuple(outputs) if isinstance(outputs, tuple) else (outputs,)  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]


def _is_float(output: Any) -> bool:
    return isinstance(output, Tensor) and output.dtype.is_floating_point


def _output(tensor: Tensor, node: Node, number: int) -> Tensor:
    out = Tensor(tensor.storage, tensor.shape, tensor.strides, tensor.dtype, node, number, tensor.name)
    out.is_view = tensor.is_view
    return out


def _checkpoint_backward(node: Node, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Run the function again, and backward through it. The frame holds the gradients and the outputs until that is over."""
    memory = node.memory
    context: _Context = node.context
    given = [
        new_tensor(memory, shape, dtype, "gradient of an output that nobody uses") if grad is None else grad
        for grad, (shape, dtype) in zip(grads, context.outputs, strict=True)
    ]
    call = context.call
    args: list[Any] = list(call.args)
    detached: list[Tensor] = []
    for place, tensor, (edge, _) in zip(context.places, node.unpack(), node.edges, strict=True):
        args[place] = _detached(tensor, wants_gradient=edge is not None)
        detached.append(args[place])
    outside = memory.recomputing, memory.reentered, memory.scope
    memory.grad_enabled, memory.recomputing, memory.reentered = True, True, call.where
    with Autocast(memory, context.autocast):
        outputs = call.function(*args)
    memory.grad_enabled = False
    memory.recomputing, memory.reentered, memory.scope = outside
    inbox: dict[Node, list[Tensor | None]] = {}
    for output, grad in zip(filter(_is_float, _several(outputs)), given, strict=True):
        if output.node is not None:
            inbox.setdefault(output.node, [None] * output.node.outputs)[output.output] = grad
    run_graph(memory, inbox)
    memory.grad_enabled = False
    memory.enter(memory.phase, node.layer)
    memory.scope = node.scope
    return [tensor.node.grad if isinstance(tensor.node, Detached) else None for tensor in detached]


def _detached(tensor: Tensor, *, wants_gradient: bool) -> Tensor:
    """Return `tensor.detach()`, a leaf if it wants a gradient."""
    out = Tensor(tensor.storage, tensor.shape, tensor.strides, tensor.dtype)
    if wants_gradient:
        out.node = Detached(tensor)
    return out


class Detached(Node):
    """The gradient accumulator of a detached argument. It takes a gradient that nobody else holds and that is laid out as the
    argument, and copies any other one (functions/accumulate_grad.h)."""

    __slots__ = ("grad", "shape", "strides")
    cast_once = True

    def __init__(self, tensor: Tensor) -> None:
        super().__init__(tensor.memory, Node.run, ())  # type: ignore[arg-type]
        self.sequence = LEAF_SEQUENCE
        self.shape, self.strides = tensor.shape, tensor.strides
        self.grad: Tensor | None = None

    def run(self, grads: list[Tensor]) -> Gradients:
        if getrefcount(grads[0]) == _ONLY_IN_BUFFER and self._is_laid_out(grads[0]):
            self.grad = grads[0]
            return []
        strides = self.strides if is_dense(self.shape, self.strides) else contiguous_strides(self.shape)
        self.grad = new_tensor(self.memory, self.shape, grads[0].dtype, "copied gradient of an argument", strides)
        return []

    def _is_laid_out(self, grad: Tensor) -> bool:
        """Tell whether a gradient obeys the layout contract (utils/grad_layout_contract.h)."""
        if not is_dense(self.shape, self.strides):
            return is_contiguous(grad)
        return all(
            dim.size == 1 or own == other
            for dim, own, other in zip(self.shape, self.strides, grad.strides, strict=True)
        )


_ONLY_IN_BUFFER: Final = 2  # the list of gradients and getrefcount's argument


def in_closures(loss: Tensor) -> list[Tensor]:
    """Return the tensors, each storage once, that the calls in the graph of a loss hold as long as the graph is there."""
    found: dict[int, Tensor] = {}
    seen, stack = set[Node](), [loss.node]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        stack += [following for following, _ in node.edges]
        if isinstance(node.context, _Context):
            found.update((tensor.storage.index, tensor) for tensor in _tensors(node.context.call.args))
    return list(found.values())


def _tensors(held: Any) -> Iterator[Tensor]:
    if isinstance(held, Tensor):
        yield held
    elif isinstance(held, tuple | list):
        for one in cast("Sequence[Any]", held):
            yield from _tensors(one)
