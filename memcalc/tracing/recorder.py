# pyright: basic
"""A recorder of torch's allocations and frees in memcalc's log.

A dispatch mode sees every op that torch runs, in forward, in the recomputation of a checkpoint and in backward. Each
new storage that an op returns gets a `memcalc.core.tensor.Storage` that lives as long as it does. Of the allocations that
an op frees at its end, those that memcalc.tracing.as_on_cuda knows are seen; on paper no others are modelled.
"""

from __future__ import annotations

import math
import weakref
from bisect import bisect_right
from functools import partial
from typing import Any, Final

import torch
from torch._C._autograd import _get_sequence_nr, _top_saved_tensors_default_hooks
from torch.nn import Module
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from memcalc.core.tensor import Memory, Storage
from memcalc.errors import InputError
from memcalc.tracing.as_on_cuda import run_as_on_cuda
from memcalc.tracing.description import Place, place
from memcalc.tracing.modules import dtype_of, stacks, storage_shape
from memcalc.tracing.values import Values
from memcalc.tracing.work import note

MOST_OPS: Final = 100_000
"""The most ops of the first forward. A hundred layers have some 10 000; a model with more goes through its tokens one
by one."""


class Recorder(TorchDispatchMode):
    """A dispatch mode that keeps a memcalc storage for each of torch's storages that the model has or an op
    returned."""

    def __init__(self, memory: Memory, model: Module) -> None:
        super().__init__()
        self.memory = memory
        self.blocks: dict[int, Storage] = {}
        self.values = Values()
        self.ops_left: float = MOST_OPS
        paths = stacks(model)
        self.running = Running(memory, model, paths)
        for name, buffer in model.named_buffers():
            self.register(buffer, "buffers", name)
        for name, parameter in model.named_parameters():
            at = place(name, paths)
            self.register(parameter, "parameters", at.name)
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(partial(self._accumulated, at))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._count()
        self.running.follow_backward()
        out, temporaries = run_as_on_cuda(func, args, kwargs or {}, self.values.run)
        self.running.recomputes()
        note(self.memory, func, args, kwargs or {}, out)
        for leaf in tree_iter((out, temporaries)):
            if isinstance(leaf, torch.Tensor):
                self.register(leaf, "activation", func._schema.name.split("::")[1])
        return out

    def register(self, tensor: torch.Tensor, component: str, name: str) -> None:
        """Give the tensor's storage a block, unless it has one."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self.blocks:
            self.blocks[key] = Storage(self.memory, storage_shape(tensor), dtype_of(tensor.dtype), component, name)
            weakref.finalize(storage, self.blocks.pop, key).atexit = False

    def relabel(self, tensor: torch.Tensor, component: str, at: Place) -> None:
        """Give an activation another name from here on."""
        block = self.blocks[tensor.untyped_storage()._cdata]
        if self.memory.rows[block.index].component == "activation":
            self.memory.relabel(block, storage_shape(tensor), component, *at)

    def _accumulated(self, at: Place, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        self.relabel(parameter.grad, "gradients", at)

    def restart(self, model: Module) -> None:
        """Start the log anew with the live blocks, after a first forward."""
        self.ops_left = math.inf
        for name, buffer in model.named_buffers():  # a buffer that forward has replaced is still the model's
            self.relabel(buffer, "buffers", Place(name, None))
        rows = list(self.memory.rows)
        memory = self.memory
        for log in (memory.rows, memory.log, memory.segments, memory.renamed, memory.work, memory.streamed):
            log.clear()
        for block in self.blocks.values():
            self.memory.rows.append(rows[block.index])
            block.index = len(self.memory.rows) - 1
            self.memory.log.append(block.index)

    def _count(self) -> None:
        self.ops_left -= 1
        if self.ops_left < 0:
            raise InputError(
                f"--seq-len: at this length one forward runs more than {MOST_OPS} operations (a loop over the tokens?), which "
                "is too long to trace; allowed: less"
            )


class Running:
    """The running module: in forward by module hooks, in backward the module that was running when the node was
    made."""

    def __init__(self, memory: Memory, model: Module, paths: frozenset[str]) -> None:
        self.memory = memory
        self.modules = [Place("", None)]
        self.first_nodes = [0]
        self.places = [Place("", None)]
        for path, module in model.named_modules():
            module.register_forward_pre_hook(partial(self._enter, place(path, paths)))
            module.register_forward_hook(self._leave, always_call=True)

    def _enter(self, at: Place, *_: object) -> None:
        self.modules.append(at)
        self._go_on()

    def _leave(self, *_: object) -> None:
        self.modules.pop()
        self._go_on()

    def _go_on(self) -> None:
        self._is_at(self.modules[-1])
        self.first_nodes.append(_get_sequence_nr())
        self.places.append(self.modules[-1])

    def follow_backward(self) -> None:
        """Follow the running node of backward outside all modules: one of them may have made the node."""
        if len(self.modules) == 1 and (node := torch._C._current_autograd_node()) is not None:
            self._is_at(self.places[bisect_right(self.first_nodes, node._sequence_nr()) - 1])

    def recomputes(self) -> None:
        """Note whether a checkpoint's forward is running again.

        It does if backward records a graph, or if saved tensors are hooked, also within an op that records no graph.
        Backward's own ops do neither.
        """
        looks = _top_saved_tensors_default_hooks(True) is not None
        self.memory.recomputing = self.memory.phase == "backward" and (torch.is_grad_enabled() or looks)

    def _is_at(self, at: Place) -> None:
        self.memory.scope = at.name
        self.memory.enter(self.memory.phase, at.layer)
