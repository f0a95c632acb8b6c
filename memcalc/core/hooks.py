"""Protocols of what acts around ops and saved tensors: checkpoints, offloading, selective checkpoints and engines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from memcalc.core.autograd import Node
    from memcalc.core.tensor import Tensor


class Packer(Protocol):
    """The saved-tensor hook of a checkpoint: it packs each tensor that a node saves."""

    keeps: bool
    """True if what is packed stays alive."""

    def pack(self, tensor: Tensor) -> Saved: ...


class Offloader(Packer, Protocol):
    """The saved-tensor hook that moves tensors to the host (`memcalc.core.offloading`)."""

    def before(self, node: Node) -> None:
        """Announce the node that runs next."""
        ...

    def after(self) -> None:
        """Run the hooks of the node that has run."""
        ...

    def close(self) -> list[Any]:
        """Let go of all that is still held, when backward is over. Returns what has been copied, in order."""
        ...


class Saved(Protocol):
    """A saved tensor, or an object that returns it."""

    def unpack(self) -> Tensor: ...


class Contexts(Protocol):
    """The hook around an op's results inside a selective checkpoint (`memcalc.core.selective`)."""

    def call(self, op: str, run: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]: ...


class Visitor(Protocol):
    """An engine that acts around every module, when its forward or backward begins and ends."""

    def enter(self, path: str, layer: int | None, weights: Sequence[Tensor] = ()) -> bool:
        """Begin a module's forward. Returns False if that module is running already. `weights` are some of the weights
        that it uses."""
        ...

    def leave(self, *, done: bool) -> None:
        """End the forward of the current module; `done` is False if it was broken off."""
        ...

    def current(self) -> Any:
        """Return the visit that a new node belongs to."""
        ...

    def gathered(self, view: Tensor) -> Tensor | None:
        """Return the block that the weight behind `view` has been gathered into; None if no weight was gathered."""
        ...

    def backward_begins(self, nodes: Iterable[Node]) -> None: ...

    def before(self, node: Node) -> None:
        """Announce the node that runs next; it is no gradient accumulator."""
        ...

    def after(self, node: Node) -> None: ...

    def backward_ends(self) -> None: ...
