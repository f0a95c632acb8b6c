"""A network of a file, layer by layer: what each has, makes, multiplies and leaves for backward. All of it is read off the
run that the totals come from."""

from __future__ import annotations

from collections import Counter
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from memcalc.core.dims import Dim, numel
from memcalc.families.base.layers.layer import sizes

if TYPE_CHECKING:
    from collections.abc import Iterable

    from memcalc.estimation.report import Report
    from memcalc.families.base.layers.network import Placed
    from memcalc.tape.runs import Trace

Place = tuple[str, int | None]
"""A layer's path, with a `*` for its block, and the block's number."""


class LayerRow(NamedTuple):
    """One layer, or equal ones of several equal blocks."""

    name: str
    """The path in the module: "0", "4.*.1"."""
    kind: str
    input: tuple[int, ...]
    """The shape without the batch, like `output`."""
    output: tuple[int, ...]
    output_formula: str
    parameters: int
    parameters_formula: str
    buffers: int
    """Elements of buffers."""
    forward: int
    """FLOPs of one micro-batch, like `backward`."""
    backward: int
    saved: int
    """The bytes that the layer makes in a micro-batch's forward and that autograd keeps until backward."""
    copies: int = 1
    """The number of equal layers; numbers are of one of them."""

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON of the row."""
        return {
            "name": self.name,
            "kind": self.kind,
            "copies": self.copies,
            "input": list(self.input),
            "output": list(self.output),
            "output_formula": self.output_formula,
            "parameters": self.parameters,
            "parameters_formula": self.parameters_formula,
            "buffers": self.buffers,
            "flops": {"forward": self.forward, "backward": self.backward},
            "saved_activations": self.saved,
        }


def layer_rows(report: Report) -> list[LayerRow]:
    """Return a row for each layer of a network of a file, in its order; those of equal blocks once. [] for other models.

    What joins layers (a residual's sum, a concat) and the loss have rows of their own if they leave something for backward.
    """
    if report.model.model_type != "layers":
        return []
    run = report.rank.profiles[0].run
    program: Any = report.model.program
    network = program.at(Dim("seq", report.setup.seq_len or 1))
    saved, work = _saved(run), _work(run)
    rows: list[tuple[int | None, LayerRow]] = []
    for one in network.layers:
        place = one.path, one.number
        rows.append((one.number, _row(one, saved.pop(place, 0), work[place, "forward"], work[place, "backward"])))
    rows += [(None, _joint(path, number, n)) for (path, number), n in saved.items() if n]
    return _folded(rows)


def _row(one: Placed, saved: int, forward: int, backward: int) -> LayerRow:
    return LayerRow(
        one.full_path,
        one.layer.kind,
        sizes(one.x),
        sizes(one.out),
        one.layer.placed(one.x),
        sum(prod(sizes(p.shape)) for p in one.layer.parameters(one.x)),
        one.layer.counted(one.x),
        sum(prod(sizes(s.shape)) for s in one.layer.states(one.x)),
        forward,
        backward,
        saved,
    )


def _joint(path: str, number: int | None, saved: int) -> LayerRow:
    name = path if number is None else path.replace("*", str(number), 1)
    return LayerRow(name, "loss" if path == "loss" else "sum or join", (), (), "", 0, "", 0, 0, 0, saved)


def _folded(rows: Iterable[tuple[int | None, LayerRow]]) -> list[LayerRow]:
    """Return the rows with those of equal blocks once, if they follow each other."""
    blocks: list[tuple[int | None, str, list[LayerRow], int]] = []
    for number, row in rows:
        stack = row.name.split(".")[0]
        if blocks and number is not None and blocks[-1][:2] == (number, stack):
            blocks[-1][2].append(row)
        else:
            blocks.append((number, stack, [row], 1))
    out: list[tuple[int | None, str, list[LayerRow], int]] = []
    for number, stack, own, _ in blocks:
        if out and number is not None and out[-1][1] == stack and _alike(out[-1][2], own):
            out[-1] = (*out[-1][:3], out[-1][3] + 1)
        else:
            out.append((number, stack, own, 1))
    return [
        row._replace(name=f"{stack}.*{row.name[len(f'{stack}.{number}') :]}" if n > 1 else row.name, copies=n)
        for number, stack, own, n in out
        for row in own
    ]


def _alike(left: list[LayerRow], right: list[LayerRow]) -> bool:
    return [row._replace(name="") for row in left] == [row._replace(name="") for row in right]


def _place(scope: str, layer: int | None) -> Place:
    path = scope.split(" ")[0]
    return path, layer if "*" in path else None


def _saved(run: Trace) -> Counter[Place]:
    """Return the bytes that each layer's forward leaves for backward."""
    alive: set[int] = set()
    forward_end = run.forward_ends[0] if run.forward_ends else run.forward_end
    for event in run.log[:forward_end]:
        alive.add(event) if event >= 0 else alive.discard(~event)
    gone = {~event for event in run.log[forward_end:] if event < 0}
    out: Counter[Place] = Counter()
    for i in alive & gone:
        row = run.rows[i]
        if row.component == "activation":
            out[_place(row.scope or row.name, row.layer)] += numel(row.shape)[0] * row.dtype.itemsize
    return out


def _work(run: Trace) -> Counter[tuple[Place, str]]:
    """Return the FLOPs of each layer in each phase of a micro-batch."""
    out: Counter[tuple[Place, str]] = Counter()
    for one in run.work:
        out[_place(one.scope, one.layer), one.phase] += 2 * one.products * numel(one.factors)[0]
    return out
