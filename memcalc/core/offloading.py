"""Saved tensors that are moved to the host in forward and brought back in backward: TRL's OffloadActivations with its streams
(trl/models/activation_offloading.py).

Each tensor that autograd saves gets a number. It stays on the GPU if it is smaller than 1024 bytes, a view of a parameter, or
a tensor whose storage a moved one still holds on the GPU: a tensor that is saved twice is moved once, and the second
reference keeps it. Any other is copied to pinned memory. The tensor itself is let go when five more have been saved and one of
them is moved; one that is not contiguous is copied first, and the copy is what is held. In backward a node's tensors are
copied back, and let go after the next node that has some. What forward still holds is taken from there, and let go after the
first such node.
"""

from __future__ import annotations

from sys import getrefcount
from typing import TYPE_CHECKING, Final, NamedTuple

from memcalc.core.dims import numel
from memcalc.core.tensor import Tensor, is_contiguous, new_tensor

if TYPE_CHECKING:
    from collections.abc import Collection

    from memcalc.core.autograd import Node
    from memcalc.core.dims import Shape
    from memcalc.core.dtypes import DType
    from memcalc.core.tensor import Memory, Storage, Strides

MOVED_BYTES: Final = 1024
"""The least bytes of a tensor that is moved (`min_offload_size`)."""
HELD: Final = 5
"""The last tensors of which moved ones are still held (`max_fwd_stash_size`)."""
_REFERENCES: Final = 2  # the tensor's and getrefcount's argument


class Moved(NamedTuple):
    """A tensor on the host."""

    name: str
    shape: Shape
    dtype: DType
    layer: int | None
    of: Offloading
    number: int
    strides: Strides

    def unpack(self) -> Tensor:
        return self.of.brought_back(self)


class Copied(NamedTuple):
    """A copy of a tensor to the host, or back."""

    name: str
    shape: Shape
    dtype: DType
    layer: int | None
    back: bool


class _Kept:
    """A tensor that stays on the GPU until backward asks for it."""

    __slots__ = ("number", "of", "tensor")

    def __init__(self, of: Offloading, number: int, tensor: Tensor) -> None:
        self.of, self.number = of, number
        self.tensor: Tensor | None = Tensor(tensor.storage, tensor.shape, tensor.strides, tensor.dtype)

    def unpack(self) -> Tensor:
        self.of.release(self.number)
        self.of.tracker.pop(self.number, None)
        tensor, self.tensor = self.tensor, None
        assert tensor is not None
        return tensor


_Key = tuple[int, "DType"]
"""The number of a storage in the log, and a dtype."""


class Offloading:
    """The saved-tensor hook of one micro-batch's forward and backward."""

    keeps = True

    def __init__(self, memory: Memory, parameters: Collection[Storage]) -> None:
        self.memory, self.parameters = memory, parameters
        self.count = 0
        self.tracker: dict[int, _Kept] = {}
        """The tensors that stay on the GPU, by number, until backward asks for them; if it never does, until the next
        micro-batch."""
        self.stash: dict[int, Tensor] = {}
        """The tensors that are moved and still held, by their numbers."""
        self.fetched: dict[int, Tensor] = {}
        """The tensors that are brought back and not let go yet."""
        self.numbers: dict[_Key, int] = {}
        """The last number of each tracked storage."""
        self.keys: dict[int, _Key] = {}
        self.node: Node | None = None
        """The node that has asked for tensors last."""
        self.running: Node | None = None
        self.hooks: list[tuple[int, bool, list[int]]] = []
        """The hooks of the running node, one for each tensor that it has asked for: its number, whether it was brought back,
        and the numbers to let go."""
        self.copied: list[Copied] = []

    def pack(self, tensor: Tensor) -> Moved | _Kept:
        """Return what a node saves in place of a tensor."""
        self.count += 1
        number, key = self.count, (tensor.storage.index, tensor.dtype)
        if key in self.numbers:
            self._track(key, number)
            return self._kept(number, tensor)
        nbytes = numel(tensor.shape)[0] * tensor.dtype.itemsize
        if nbytes < MOVED_BYTES or tensor.storage in self.parameters:
            return self._kept(number, tensor)
        held = tensor = Tensor(tensor.storage, tensor.shape, tensor.strides, tensor.dtype)
        whole = tensor.shape
        if 0 in tensor.strides:  # the storage is copied, not what it is expanded to
            whole = self.memory.rows[tensor.storage.index].shape
        elif not is_contiguous(tensor):
            held = new_tensor(self.memory, tensor.shape, tensor.dtype, "contiguous copy to be moved")
        del tensor
        for old in [one for one in self.stash if one <= number - HELD]:
            del self.stash[old]
            self.release(old)
        row = self.memory.rows[held.storage.index]
        self.stash[number] = held
        self._track(key, number)
        self.copied.append(Copied(row.label, whole, held.dtype, self.memory.layer, back=False))
        return Moved(row.label, held.shape, held.dtype, self.memory.layer, self, number, held.strides)

    def _kept(self, number: int, tensor: Tensor) -> _Kept:
        self.tracker[number] = one = _Kept(self, number, tensor)
        return one

    def _track(self, key: _Key, number: int) -> None:
        self.numbers[key] = number
        self.keys[number] = key

    def release(self, number: int) -> None:
        """Forget that a number's storage is held."""
        key = self.keys.pop(number, None)
        if key is not None and self.numbers.get(key) == number:
            del self.numbers[key]

    def brought_back(self, moved: Moved) -> Tensor:
        """Return a moved tensor on the GPU."""
        let_go: list[int] = []
        if self.running is not self.node:
            self.node, let_go = self.running, list(self.fetched)
        held = self.stash.get(moved.number)
        if held is None:
            shape = moved.shape
            out = new_tensor(self.memory, shape, moved.dtype, f"{moved.name}, brought back", moved.strides)
            self.fetched[moved.number] = out
            self.copied.append(Copied(moved.name, shape, moved.dtype, moved.layer, back=True))
        else:
            out = held
        self.hooks.append((moved.number, held is None, let_go))
        self.release(moved.number)
        return out

    def before(self, node: Node) -> None:
        """Announce the node that runs next."""
        self.running = node

    def after(self) -> None:
        """Run the hooks of the node that has run."""
        for number, back, let_go in self.hooks:
            if back and number in self.fetched and getrefcount(self.fetched[number].storage) > _REFERENCES:
                del self.fetched[number]  # a view of it is in use
            for old in list(self.stash):
                del self.stash[old]
                self.release(old)
            for old in let_go:
                self.fetched.pop(old, None)
        self.hooks.clear()

    def close(self) -> list[Copied]:
        """Let go of all that is still held, when backward is over. Returns what has been copied, in order."""
        self.fetched.clear()
        self.stash.clear()
        self.node = self.running = None
        return self.copied
