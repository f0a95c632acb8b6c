"""The inputs of 8-bit layers that the graph of the previous step keeps as long as its loss is alive."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from memcalc.core.autograd import Constant
from memcalc.core.tensor import Autocast, Memory, new_tensor
from memcalc.families.base.module import after_forward
from memcalc.quantized.eight_bit import input_kept_by

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memcalc.core.autograd import Node
    from memcalc.core.tensor import Tensor
    from memcalc.families.base.module import Run
    from memcalc.families.base.program import Program


LEFT_BEHIND: Final = "inputs left behind"
"""The first words of the names of these inputs."""


def kept_by_graph(program: Program, run: Run) -> list[Tensor]:
    """Return tensors of the sizes and layers of the inputs that the graph of a forward keeps, in the run's memory."""
    memory, before = run.memory, _before(program, run)
    autocast = None if memory.autocast is None else memory.autocast.dtype
    with Autocast(before.memory, autocast):
        loss = program.forward(before, *program.give(before))
    graph = list(_graph(loss.node))
    storages = {kept.storage for node in graph if (kept := input_kept_by(node)) is not None}
    storages -= {node.leaf for node in graph if isinstance(node, Constant)}  # these are left behind as leaves
    out: list[Tensor] = []
    for storage in sorted(storages, key=lambda one: one.index):
        row = before.memory.rows[storage.index]
        if row.component != "activation":
            continue
        memory.layer = row.layer
        out.append(new_tensor(memory, row.shape, row.dtype, f"{LEFT_BEHIND}: {row.label}"))
    memory.layer = None
    return out


def _before(program: Program, run: Run) -> Run:
    """Return a run like this one, with a memory of its own."""
    memory = Memory(run.memory.kernels)
    before = replace(
        run, memory=memory, hooks=None, noted=None, attention_mask=None, sent_once=[], frame_tensors=[], weights={},
        frozen={}, packings={}, scales=[], buffers={}, of_reference=[],
    )  # fmt: skip
    for weight in program.weights():
        before.add_weight(weight, wants_gradient=program.wants_gradient(weight))
    for buffer in after_forward(program.buffers(), program.length(run.seq)):
        before.add_buffer(buffer)
    if run.attention_mask is not None:
        before.attention_mask = before.add_input(program.padding(run.batch, run.seq))
    return before


def _graph(root: Node | None) -> Iterator[Node]:
    """Yield the nodes behind a loss, each once."""
    assert root is not None
    seen, stack = {root}, [root]
    while stack:
        node = stack.pop()
        yield node
        for following, _ in node.edges:
            if following is not None and following not in seen:
                seen.add(following)
                stack.append(following)
