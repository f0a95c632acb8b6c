"""The forwards and backwards of one training step on paper."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memcalc.core.autograd import backward
from memcalc.core.tensor import Autocast, new_tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from memcalc.core.dtypes import DType
    from memcalc.core.offloading import Copied, Offloading
    from memcalc.core.tensor import StorageRow, Tensor
    from memcalc.families.base.module import Run
    from memcalc.families.base.program import Program


def passes(
    program: Program,
    run: Run,
    autocast: DType | None,
    micro_batches: int,
    batch: Sequence[Tensor],
    in_closures: Sequence[StorageRow] = (),
) -> tuple[tuple[int, ...], Tensor]:
    """Run forward and backward of `micro_batches` micro-batches of one step. Returns the index in the log at which each
    forward ends, and the last loss, whose graph keeps its tensors as long as the loss is alive.

    `in_closures` are the blocks that the graph of the step before keeps besides what the program says.

    `batch` is the batch of the first micro-batch; the program gives the others. Each loss, and what its graph keeps,
    stays until the next loss takes its place.
    """
    memory, hooks = run.memory, run.hooks
    with Autocast(memory, autocast):
        left_behind = [*program.left_behind(run), *program.leaves_left_behind(run)]
    left_behind += [new_tensor(memory, row.shape, row.dtype, f"left behind: {row.label}") for row in in_closures]
    memory.streamed.clear()
    memory.work.clear()  # these belong to the step before
    ends: list[int] = []
    copied: list[Copied] = []
    loss: Any = None
    for i in range(micro_batches):
        if i:
            memory.enter("", None)
            batch = program.give(run)
        if program.offloads_activations:
            run.offloading = memory.offloading = offloading(run)
        loss = forward(program, run, autocast, batch)
        left_behind.clear()  # freed with the loss of the step before
        memory.relabel(loss.storage, (), "buffers", "loss", None)  # now the caller's
        ends.append(len(memory.log))
        memory.enter("backward", None)
        backward(loss, None if hooks is None else hooks.after_backward)
        if hooks is not None:
            hooks.backward_is_over()
        run.frame_tensors.clear()
        if memory.offloading is not None:
            copied = memory.offloading.close()
            memory.offloading = None
    run.copied = copied
    return tuple(ends), loss


def forward(program: Program, run: Run, autocast: DType | None, batch: Sequence[Tensor]) -> Tensor:
    """Run the forward of a micro-batch. Returns its loss."""
    memory, hooks = run.memory, run.hooks
    with Autocast(memory, autocast):
        memory.enter("forward", None)
        if hooks is not None:
            hooks.before_forward()
        loss: Tensor = program.forward(run, *batch)
        if hooks is not None:
            loss = hooks.after_forward(loss)
        if program.context_parallel is not None:
            loss = program.context_parallel.loss(run, loss)
    return loss


def offloading(run: Run) -> Offloading:
    """Return what moves the saved tensors of a micro-batch to the host."""
    from memcalc.core.offloading import Offloading

    return Offloading(run.memory, {weight.storage for weight in run.weights.values()})
