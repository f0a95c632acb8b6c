"""Layers put together: each with its path in the module, the shape that comes in and the one that goes out.

Paths are those of nn.Sequential. A pass of a `repeat` that is in no other one is a block: its layers have a number, and
a `*` for it in their names.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from memcalc.core.dims import Dim
from memcalc.core.ops.elementwise import broadcast
from memcalc.families.base.layers.layer import Layer, shown, sizes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memcalc.core.dims import Shape


@dataclass(frozen=True)
class One:
    """A layer as a file says it, with its place in the file: "layer 3"."""

    layer: Layer
    where: str


@dataclass(frozen=True)
class Chain:
    """Layers one after the other."""

    entries: tuple[Entry, ...]


@dataclass(frozen=True)
class Repeated:
    """Passes of equal layers, each with weights of its own."""

    times: int
    body: Chain


@dataclass(frozen=True)
class Residual:
    """`body(x) + shortcut(x)`; the shortcut of None is x itself."""

    body: Chain
    shortcut: Chain | None
    where: str


@dataclass(frozen=True)
class Concat:
    """`torch.cat([branch(x) for branch in branches], dim)`."""

    branches: tuple[Chain, ...]
    dim: int
    where: str


Entry = One | Chain | Repeated | Residual | Concat


class Placed(NamedTuple):
    """A layer at its place."""

    path: str
    number: int | None
    layer: Layer
    x: Shape
    out: Shape

    @property
    def full_path(self) -> str:
        """Return the path with the block's number."""
        return self.path if self.number is None else self.path.replace("*", str(self.number), 1)


class Block(NamedTuple):
    """Something at its place that calls others."""

    path: str
    number: int | None
    entry: Chain | Repeated | Residual | Concat
    parts: tuple[Node, ...]
    out: Shape


Node = Placed | Block


@dataclass(frozen=True)
class Value:
    """A tensor at some place of forward, as far as overwriting it is concerned."""

    shape: Shape
    holder: Holder
    integers: bool = False


@dataclass(slots=True)
class Holder:
    """A storage. `saved_by` says which layer keeps it for backward; "" if none does."""

    saved_by: str = ""
    wants_gradient: bool = False


class Network:
    """All layers at their places. Raises ValueError for a layer that does not take its input: the place, what is wrong."""

    def __init__(self, chain: Chain, input_shape: Shape, *, integers: bool) -> None:
        self.blocks = 0
        self.root, out = self._chain(chain, "", None, Value(input_shape, Holder(), integers))
        if out.integers:
            raise ValueError("layers: the ids of `input` reach the end; allowed: an embedding first")
        self.out = out.shape
        self.wants_gradient = out.holder.wants_gradient

    @property
    def layers(self) -> Iterator[Placed]:
        """Yield all layers in the order of the module."""
        return placed(self.root)

    # --- places

    def _chain(self, chain: Chain, path: str, number: int | None, value: Value) -> tuple[Block, Value]:
        parts: list[Node] = []
        for i, entry in enumerate(chain.entries):
            node, value = self._entry(entry, f"{path}.{i}" if path else str(i), number, value)
            parts.append(node)
        return Block(path, number, chain, tuple(parts), value.shape), value

    def _entry(self, entry: Entry, path: str, number: int | None, value: Value) -> tuple[Node, Value]:
        if isinstance(entry, One):
            return self._one(entry, path, number, value)
        if isinstance(entry, Chain):
            return self._chain(entry, path, number, value)
        if isinstance(entry, Repeated):
            return self._repeated(entry, path, number, value)
        if isinstance(entry, Residual):
            return self._residual(entry, path, number, value)
        return self._concat(entry, path, number, value)

    def _one(self, one: One, path: str, number: int | None, value: Value) -> tuple[Placed, Value]:
        layer = one.layer
        try:
            if value.integers and not layer.integers:
                raise ValueError("takes numbers, and its input is ids; allowed: an embedding before it")
            if layer.integers and not value.integers:
                raise ValueError(
                    "takes ids, and its input is numbers; allowed: `input: tokens` or {ids: [...]}, and first"
                )
            out = layer.shape(value.shape)
            after = _after(layer, one.where, value, out)
        except ValueError as error:
            raise ValueError(f"{one.where} {layer.kind}: {error}") from None
        return Placed(path, number, layer, value.shape, out), after

    def _repeated(self, repeated: Repeated, path: str, number: int | None, value: Value) -> tuple[Block, Value]:
        parts: list[Node] = []
        for i in range(repeated.times):
            if number is None and "*" not in path:
                self.blocks += 1
                own, value = self._chain(repeated.body, f"{path}.*", i, value)
            else:
                own, value = self._chain(repeated.body, f"{path}.{i}", number, value)
            parts.append(own)
        return Block(path, number, repeated, tuple(parts), value.shape), value

    def _residual(self, residual: Residual, path: str, number: int | None, value: Value) -> tuple[Block, Value]:
        body, out = self._chain(residual.body, f"{path}.body", number, value)
        parts: list[Node] = [body]
        other = value
        if residual.shortcut is not None:
            short, other = self._chain(residual.shortcut, f"{path}.shortcut", number, value)
            parts.append(short)
        if sizes(out.shape) != sizes(other.shape):
            raise ValueError(
                f"{residual.where} residual: the body makes {shown(out.shape)} and the shortcut {shown(other.shape)}, "
                "which do not add up; allowed: equal shapes, with a `shortcut` of layers if needed"
            )
        wants = out.holder.wants_gradient or other.holder.wants_gradient
        shape = broadcast(out.shape, other.shape)
        return Block(path, number, residual, tuple(parts), shape), Value(shape, Holder("", wants))

    def _concat(self, concat: Concat, path: str, number: int | None, value: Value) -> tuple[Block, Value]:
        made = [self._chain(b, f"{path}.branches.{i}", number, value) for i, b in enumerate(concat.branches)]
        shapes = [after.shape for _, after in made]
        axis = concat.dim - 1
        if not 1 <= concat.dim <= len(shapes[0]):
            raise ValueError(f"{concat.where} concat: dim {concat.dim}: allowed: 1 to {len(shapes[0])}")
        rests = {(len(s), sizes(s[:axis]), sizes(s[axis + 1 :])) for s in shapes}
        if len(rests) > 1:
            raise ValueError(
                f"{concat.where} concat: the branches make {' and '.join(map(shown, shapes))}; allowed: equal but in dim "
                f"{concat.dim}"
            )
        joined = Dim(shapes[0][axis].name, sum(s[axis].size for s in shapes))
        if any(s[axis].name == "seq" for s in shapes):
            raise ValueError(f"{concat.where} concat: dim {concat.dim} is --seq-len; allowed: another one")
        shape = (*shapes[0][:axis], joined, *shapes[0][axis + 1 :])
        wants = any(after.holder.wants_gradient for _, after in made)
        return Block(path, number, concat, tuple(block for block, _ in made), shape), Value(shape, Holder("", wants))


def _after(layer: Layer, where: str, value: Value, out: Shape) -> Value:
    """Return the output of a layer. Raises ValueError if it overwrites what another one keeps, which fails in torch's
    backward."""
    holder = value.holder
    has_weights = next(layer.parameters(value.shape), None) is not None
    wants = has_weights or holder.wants_gradient
    if layer.is_in_place and holder.saved_by:
        raise ValueError(
            f"inplace true: overwrites what {holder.saved_by} keeps for backward, which torch refuses; allowed: false"
        )
    if layer.saves_input and wants and not holder.saved_by:
        holder.saved_by = f"{where} {layer.kind}"
    if layer.is_view:
        return Value(out, holder)
    after = holder if layer.is_in_place else Holder()
    after.wants_gradient = wants
    if layer.saves_output and wants:
        after.saved_by = f"{where} {layer.kind}"
    return Value(out, after)


def placed(node: Node) -> Iterator[Placed]:
    """Yield the layers within a place, in the order of the module."""
    if isinstance(node, Placed):
        yield node
        return
    for part in node.parts:
        yield from placed(part)
