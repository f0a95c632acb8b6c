"""Checkpoints whose backward runs a graph of its own: Megatron-Core's CheckpointFunction and CheckpointWithoutOutput
(megatron/core/tensor_parallel/random.py).

CheckpointFunction runs the function again in its own backward, and keeps the recomputed outputs until it has run their graph.

CheckpointWithoutOutput gives back what it computed, too. The next layer saves the function's outputs for its backward. Their
blocks are freed when that layer has run, and the tensors that refer to them stay. When the gradient of that layer's output is
there, the function runs again: its outputs get blocks again and are copied into them, and the recomputed outputs stay, with
what they saved, until the function's own backward has run their graph.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from memcalc.core.autograd import Constant, Node, run_graph, runs_graph
from memcalc.core.tensor import Tensor

if TYPE_CHECKING:
    from memcalc.core.tensor import Memory, Storage


class CheckpointWithoutOutput:
    """One call of a function, whose outputs are freed after the next layer's forward and recomputed before its backward."""

    __slots__ = ("function", "inputs", "node", "outputs", "storages")

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.storages: list[Storage] = []
        """The storages of the outputs, until they are recomputed."""
        self.node: Node | None = None
        """The node of the outputs, until the recomputation is registered."""
        self.inputs: list[Tensor] = []
        self.outputs: tuple[Tensor, ...] = ()

    def checkpoint(self, *args: Tensor) -> Any:
        """Run the function without a graph. Returns what it returns. Its arguments are saved."""
        memory = args[0].memory
        recording, memory.grad_enabled = memory.grad_enabled, False
        outputs = self.function(*args)
        memory.grad_enabled = recording
        if recording:
            tensors = _several(outputs)
            self.node = Node(memory, _without_output_backward, args, args, self, len(tensors))
            self.node.gathered = [_alias(arg) for arg in args if arg.node is not None]
            for i, output in enumerate(tensors):
                output.node, output.output = self.node, i
            self.storages = [output.storage for output in tensors]
        return outputs

    def discard_output_and_register_recompute(self, hook_tensor: Tensor) -> None:
        """Free the outputs' blocks. The function runs again when the gradient of `hook_tensor` is there."""
        if self.node is None:
            return
        for storage in self.storages:
            storage.release()
        assert hook_tensor.node is not None
        hooks = hook_tensor.memory.gradient_hooks
        hooks.setdefault(hook_tensor.node, []).append(partial(self._recompute, self.node))
        self.node = None

    def _recompute(self, node: Node) -> None:
        memory = node.memory
        self.inputs, self.outputs = _again(node, self.function)
        for storage, output in zip(self.storages, self.outputs, strict=True):
            row = memory.rows[output.storage.index]
            storage.restore(row.shape, row.dtype, f"{row.name}, again")
        self.storages = []


def reentrant_checkpoint(function: Callable[..., Any], *args: Tensor) -> Any:
    """Run a function without a graph, and again in backward. Returns what it returns. Its arguments are saved."""
    memory = args[0].memory
    recording, memory.grad_enabled = memory.grad_enabled, False
    outputs = function(*args)
    memory.grad_enabled = recording
    if recording:
        tensors = _several(outputs)
        node = Node(memory, _reentrant_backward, args, args, function, len(tensors))
        for i, output in enumerate(tensors):
            output.node, output.output = node, i
    return outputs


@runs_graph
def _reentrant_backward(node: Node, grads: list[Tensor]) -> list[Tensor | None]:
    inputs, outputs = _again(node, node.context)
    _run_graph_of(outputs, grads)
    return _gradients_of(inputs)


class Kept:
    """A call of a function whose outputs stay: what stands in the place of a checkpoint that is off."""

    __slots__ = ("function",)

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def checkpoint(self, *args: Tensor) -> Any:
        """Run the function."""
        return self.function(*args)

    def discard_output_and_register_recompute(self, hook_tensor: Tensor) -> None:
        """Do nothing."""


def kept_or_recomputed(function: Callable[..., Any], *, recomputes: bool) -> Kept | CheckpointWithoutOutput:
    """Return a call of the function, whose outputs are recomputed or stay."""
    return CheckpointWithoutOutput(function) if recomputes else Kept(function)


def _several(outputs: Any) -> tuple[Tensor, ...]:
    return (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)


def _again(node: Node, function: Callable[..., Any]) -> tuple[list[Tensor], tuple[Tensor, ...]]:
    """Run a function again with what a node saved. Returns its inputs as leaves, and its outputs."""
    memory, scope = node.memory, node.memory.scope
    inputs = [_detached(memory, saved.unpack(), node.edges[i][0]) for i, saved in enumerate(node.saved)]
    memory.grad_enabled = memory.recomputing = True
    outputs = _several(function(*inputs))
    memory.grad_enabled = memory.recomputing = False
    memory.scope = scope
    return inputs, outputs


def _alias(tensor: Tensor) -> Tensor:
    """Return a tensor of the same storage. The gradient accumulator of a detached input refers to the input, and what is saved
    refers to the accumulator (torch/csrc/autograd/saved_variable.cpp), even if a hook has packed the input."""
    return Tensor(tensor.storage, tensor.shape, tensor.strides, tensor.dtype)


def _detached(memory: Memory, saved: Tensor, wants: Node | None) -> Tensor:
    """Return the saved input as a leaf, which keeps its gradient if the input wants one."""
    leaf = Tensor(saved.storage, saved.shape, saved.strides, saved.dtype, name=saved.name)
    if wants is not None:
        leaf.node = Constant(memory, leaf)
    return leaf


def _run_graph_of(outputs: tuple[Tensor, ...], grads: list[Tensor]) -> None:
    inbox: dict[Node, list[Tensor | None]] = {}
    for output, grad in zip(outputs, grads, strict=True):
        assert output.node is not None
        inbox.setdefault(output.node, [None] * output.node.outputs)[output.output] = grad
    memory = outputs[0].memory
    scope = memory.scope
    run_graph(memory, inbox)
    memory.grad_enabled, memory.scope = False, scope


def _gradients_of(inputs: list[Tensor]) -> list[Tensor | None]:
    return [one.node.grad if isinstance(one.node, Constant) else None for one in inputs]


@runs_graph
def _without_output_backward(node: Node, grads: list[Tensor]) -> list[Tensor | None]:
    frame: CheckpointWithoutOutput = node.context
    inputs, outputs = frame.inputs, frame.outputs
    _run_graph_of(outputs, grads)
    frame.inputs, frame.outputs = [], ()
    return _gradients_of(inputs)
