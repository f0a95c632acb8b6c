"""Fine-grained offloading of activations (core/pipeline_parallel/fine_grained_activation_offload.py) for one chunk of the model.

What autograd saves between the start and the stop of a module is a group. When the group is committed, tensors of at least
`min_offloaded_tensor_size` elements are copied to the host, parameters never, and the GPU's are let go; storages that others
still refer to are freed by force. A backward that reaches the start of a group brings back the group before those that are
there already, so always as many groups are there ahead as there are modules: the last ones of each name stay where the
backward of the chunk follows its forward at once, and are brought back before backward begins where it does not.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final, NamedTuple

from memcalc.core.autograd import Node, runs_graph
from memcalc.core.dims import numel
from memcalc.core.offloading import Copied
from memcalc.core.tensor import Tensor, is_contiguous, new_tensor
from memcalc.megatron.layout import OF_EXPERTS

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from memcalc.core.dims import Shape
    from memcalc.core.dtypes import DType
    from memcalc.core.tensor import Memory, Storage
    from memcalc.families.base.module import Module, Run
    from memcalc.megatron.gpt_model import GPTModel
    from memcalc.megatron.layers import TensorParallel


class OnHost(NamedTuple):
    """A tensor of a group on the host."""

    name: str
    shape: Shape
    dtype: DType


class _Group:
    """The tensors that one module has saved, in their order."""

    __slots__ = ("name", "tensors")

    def __init__(self, name: str) -> None:
        self.name = name
        self.tensors: dict[int, Tensor | OnHost] = {}


class _Pushed(NamedTuple):
    """Stands in a node for a tensor of a group."""

    of: Chunk
    group: _Group
    tag: int

    def unpack(self) -> Tensor:
        """Return the tensor, which the group forgets."""
        tensor = self.group.tensors.pop(self.tag)
        return self.of.brought_back(tensor) if isinstance(tensor, OnHost) else tensor


class Chunk:
    """The groups of one forward and backward of a chunk: ChunkOffloadHandler. It is the hook that packs saved tensors."""

    keeps = True

    def __init__(
        self, memory: Memory, parameters: Collection[Storage], groups: Mapping[str, int], *, follows: bool, least: int
    ) -> None:
        """`groups`: how many there are of each name. `follows`: the chunk's backward follows its forward at once."""
        self.memory, self.parameters, self.follows, self.least = memory, parameters, follows, least
        self.active = False
        """True inside a module."""
        self.left = Counter(groups)
        """The groups of each name that are still to come."""
        self.ahead = sum(1 for count in groups.values() if count)
        """The groups that are on the GPU when backward begins."""
        self.pending: list[_Group] = []
        self.to_reload: list[_Group] = []
        self.moved: list[Copied] = []

    def start(self, name: str, tensor: Tensor) -> Tensor:
        """Begin a group. Returns the module's input; the backward of that brings a group back."""
        if name not in self.left:
            return tensor
        self.pending.append(_Group(name))
        self.left[name] -= 1
        self.active = True
        node = Node(self.memory, _start_backward, (tensor,), (), self) if tensor.node is not None else None
        return Tensor(tensor.storage, tensor.shape, tensor.strides, tensor.dtype, node, 0, tensor.name)

    def stop(self) -> None:
        """Leave the module: what is saved from here on is in no group."""
        self.active = False

    def pack(self, tensor: Tensor) -> _Pushed | Tensor:
        """Return what a node saves in place of a tensor."""
        if not self.active:
            return tensor
        group = self.pending[-1]
        tag = len(group.tensors)
        group.tensors[tag] = Tensor(tensor.storage, tensor.shape, tensor.strides, tensor.dtype)
        return _Pushed(self, group, tag)

    def before(self, node: Node) -> None:
        """Do nothing: backward runs without the hook."""

    def after(self) -> None:
        """Do nothing."""

    def close(self) -> list[Copied]:
        """Return what has been copied, in order."""
        return self.moved

    def commit(self, name: str, *released: Tensor) -> None:
        """Move a group to the host and free the storages of `released`, unless backward wants the group at once."""
        if name not in self.left:
            return
        group = self.pending.pop()
        if self.follows and not self.left[group.name]:
            return
        for tag in group.tensors:
            group.tensors[tag] = self._moved(group.tensors[tag])
        self.to_reload.append(group)
        for one in released:
            if self._is_moved(one):
                one.storage.release()

    def _is_moved(self, tensor: Tensor) -> bool:
        return tensor.storage not in self.parameters and numel(tensor.shape)[0] >= self.least

    def _moved(self, tensor: Tensor | OnHost) -> Tensor | OnHost:
        """Return what a group has in the place of a tensor."""
        if isinstance(tensor, OnHost) or not self._is_moved(tensor):
            return tensor
        name = "activation" if tensor.storage.is_released else self.memory.rows[tensor.storage.index].label
        if not is_contiguous(tensor):
            _contiguous = new_tensor(self.memory, tensor.shape, tensor.dtype, "contiguous copy to be moved")
        self.moved.append(Copied(name, tensor.shape, tensor.dtype, self.memory.layer, back=False))
        return OnHost(name, tensor.shape, tensor.dtype)

    def ends(self, output: Tensor) -> Tensor:
        """Return the chunk's output. Where other chunks run before its backward, that begins with groups brought back."""
        if self.follows or output.node is None:
            return output
        node = Node(self.memory, _ends_backward, (output,), (), self)
        return Tensor(output.storage, output.shape, output.strides, output.dtype, node)

    def reload(self) -> None:
        """Bring back the last group that is on the host."""
        if self.to_reload:
            group = self.to_reload.pop()
            for tag, tensor in group.tensors.items():
                if isinstance(tensor, OnHost):
                    group.tensors[tag] = self.brought_back(tensor)

    def brought_back(self, moved: OnHost) -> Tensor:
        self.moved.append(Copied(moved.name, moved.shape, moved.dtype, self.memory.layer, back=True))
        return new_tensor(self.memory, moved.shape, moved.dtype, f"{moved.name}, brought back")


def groups_to_move(model: GPTModel, run: Run) -> Chunk | None:
    """Begin the groups of what a chunk moves to the host; None if it moves nothing."""
    layout, a = model.layout, model.a
    if not layout.offloaded:
        return None
    of_mtp = a.mtp if layout.last else 0
    routed = sum(map(model.is_routed, range(model.layers))) + (of_mtp if a.predicts_by_experts else 0)
    counts = {name: routed if name in OF_EXPERTS else model.layers + of_mtp for name in layout.offloaded}
    counts = {name: n for name, n in counts.items() if name != "attn_norm" or model.latent is not None}
    weights = {weight.storage for weight in run.weights.values()}
    chunk = Chunk(run.memory, weights, counts, follows=layout.last, least=layout.least_offloaded)
    run.memory.offloading = chunk
    return chunk


class _NoGroups:
    """Stands for the groups of a chunk that moves nothing."""

    def start(self, name: str, tensor: Tensor) -> Tensor:
        return tensor

    def stop(self) -> None: ...

    def commit(self, name: str, *released: Tensor) -> None: ...


_NONE: Final = _NoGroups()


def groups_of(memory: Memory) -> Chunk | _NoGroups:
    """Return the groups of the chunk that runs."""
    return memory.offloading if isinstance(memory.offloading, Chunk) else _NONE


def projected(
    row_parallel: Callable[[Module, TensorParallel, Tensor], Tensor],
    m: Module,
    tp: TensorParallel,
    core_attn_out: Tensor,
) -> Tensor:
    """Run the projection of attention's output, a row-parallel layer."""
    groups = groups_of(m.memory)
    given = groups.start("attn_proj", core_attn_out)
    output = row_parallel(m, tp, given)
    groups.stop()
    groups.commit("attn_proj", core_attn_out)
    return output


@runs_graph
def _start_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    chunk: Chunk = node.context
    chunk.reload()
    return [grads[0]]


@runs_graph
def _ends_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    chunk: Chunk = node.context
    for _ in range(chunk.ahead):
        chunk.reload()
    return [grads[0]]
