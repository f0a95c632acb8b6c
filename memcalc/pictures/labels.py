"""Names of the blocks that a process allocates, and the components that they count in."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

from memcalc.device.process import Part, in_turn

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from memcalc.core.rows import Row
    from memcalc.device.process import Log

ALLOCATOR: Final = "allocator"
"""The component of blocks that are no tensors: workspaces, and what the allocator adds to each block."""


class Label(NamedTuple):
    """The name and component of a block."""

    component: str
    name: str


WORKSPACE: Final = Label(ALLOCATOR, "workspace of a library (cuBLAS)")
BETWEEN: Final = Label("buffers", "hidden states between pipeline stages")

_NAMED: Final = {
    "shards": Label("parameters", "flat shards of the weights"),
    "gradients": Label("gradients", "flat gradients of the shards"),
    "reduce bucket": Label("buffers", "reduce bucket"),
    "reduce bucket that backward fills": Label("buffers", "reduce bucket that backward fills"),
    "gradients of the partition, and of what straddles it": Label(
        "gradients", "gradients of the partition, and of what straddles it"
    ),
    "flat, cloned": Label("temporaries", "clone of the flat weights"),
    "partition, cloned": Label("temporaries", "clone of the partition"),
    "converted": Label("temporaries", "shards converted to fp32"),
    "padding": Label("temporaries", "padding of the flat weights"),
    "zeros": Label("temporaries", "zeros in the place of gradients"),
    "gathered": Label("buffers", "gathered parameters"),
    "joined": Label("temporaries", "gradients, joined"),
    "cast": Label("temporaries", "gradients in the dtype that is sent"),
    "in fp32": Label("temporaries", "gradients in fp32"),
    "in fp64": Label("temporaries", "gradient in fp64, for the norm"),
    "whether a gradient overflowed": Label("temporaries", "whether a gradient overflowed"),
}
"""The blocks of DeepSpeed's scripts, by name."""
_NUMBERED: Final = {
    "weight": ("parameters", "weight {}"),
    "shard": ("parameters", "shard of frozen weight {}"),
    "flat": ("parameters", "flat weights, group {}"),
    "master": ("optimizer_states", "fp32 master, group {}"),
    "gradient": ("gradients", "gradient of weight {}"),
    "padding": ("gradients", "padding of the partition, group {}"),
    "kept whole": ("buffers", "parameter kept gathered, {}"),
    "scaled loss": ("buffers", "the loss, scaled ({})"),
    "clone": ("temporaries", "clone of weight {}"),
    "stub": ("temporaries", "stub of weight {}"),
    "zeros": ("temporaries", "zeros in the place of gradients, group {}"),
    "cast": ("temporaries", "gradient of weight {} in fp32"),
    "joined": ("temporaries", "gradients in fp32, joined, group {}"),
    "norm": ("temporaries", "norm of slice {}"),
    "norm of a group": ("temporaries", "norm of group {}"),
    "optimizer step": ("temporaries", "optimizer step: tensor {}"),
}
"""The blocks of DeepSpeed's scripts that have a name and a number."""


def of_script(block: Any) -> Label:
    """Return the label of a block of an engine's script. A numbered name that is none of the above is an optimizer's state.

    Raise LookupError for a name that is not known.
    """
    if isinstance(block, tuple):
        kind, number = cast("tuple[str, Any]", block)
        component, words = _NUMBERED.get(kind, ("optimizer_states", f"{kind}, group {{}}"))
        return Label(component, words.format(number))
    return _NAMED[block]


def of_rows(rows: Iterable[Row], layers: int) -> Iterator[Label]:
    """Yield the labels of the blocks of rows. A row with a block for each of `layers` layers names the layer."""
    for row, number in in_turn(rows):
        yield Label(row.component, _in_layer(row.name, number if row.copies == layers else None))


def of_log(log: Log, layers: int) -> list[Label]:
    """Return the label of every block of a log, by number, for a rank of so many layers."""
    if not log.names.segments:
        return _of_update(log, layers)
    names, gradients = log.names, frozenset(log.gradients)
    saved, left = _lives(log)
    out: list[Label] = []
    for number, i in enumerate(names.of_blocks):
        row = names.rows[i]
        if number in gradients or row.component == "gradients":
            component = "gradients"
        elif number in log.stays:
            component = of_script(log.stays[number]).component
        elif row.component == "gathered" or number in left:
            component = "buffers"
        else:
            component = "saved_activations" if number in saved else "temporaries"
        out.append(Label(component, _in_layer(row.label, names.layer_of(number))))
    return out


def _of_update(log: Log, layers: int) -> list[Label]:
    """Return the labels of an optimizer's step. A tensor that comes once for each layer has its layer's number."""
    words = [f"optimizer step: {log.names.rows[i].label}" for i in log.names.of_blocks]
    times, seen = Counter(words), Counter[str]()
    out: list[Label] = []
    for one in words:
        out.append(Label("temporaries", _in_layer(one, seen[one] if times[one] == layers else None)))
        seen[one] += 1
    return out


def _lives(log: Log) -> tuple[frozenset[int], frozenset[int]]:
    """Return the blocks that a forward leaves for a backward, and the blocks that are alive after the log."""
    alive: dict[int, bool] = {}  # True: allocated outside backward
    saved: set[int] = set()
    parts = [*log.names.parts(len(log.events)), Part(0, 0, "", None)]
    for (start, end, phase, _layer), following in pairwise(parts):
        for event in log.events[start:end]:
            if event >= 0:
                alive[event] = phase != "backward"
            else:
                alive.pop(~event, None)
        if phase != "backward" and following.phase == "backward":
            saved |= {block for block, outside in alive.items() if outside}
    return frozenset(saved), frozenset(alive)


def _in_layer(name: str, layer: int | None) -> str:
    return name if layer is None else name.replace("*", str(layer))
