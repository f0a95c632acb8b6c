"""Several versions of a stage's weights: when a rank needs which of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcalc.pipelining.actions import Action
from memcalc.pipelining.placement import place, stages
from memcalc.pipelining.schedules import schedule_of

if TYPE_CHECKING:
    from collections.abc import Sequence


def with_versions(actions: Sequence[Action], schedule: str, rank: int, ranks: int, micro_batches: int) -> list[Action]:
    """Return a rank's forwards and backwards with what comes between them: sends, the gathers and frees of the version of
    the weights that is needed next, and the reductions of gradients with the updates behind them.

    No engine has this order. Weights are gathered and freed as torch's runtime would do it, a version at a time.
    `micro_batches`: those of a step, after which PipeDream-2BW updates; `actions` can have those of several steps.
    """
    own = schedule_of(schedule)
    assert own.version is not None and own.update_every is not None
    stage, last = place(own.placement, rank, ranks, 0).stage, stages(own.placement, ranks, 1) - 1
    every = own.update_every(micro_batches)
    gathered: int | None = None
    backwards = 0
    out: list[Action] = []
    for action in actions:
        assert action.micro_batch is not None
        needed = own.version(action.micro_batch, rank, ranks, micro_batches)
        if gathered is not None and gathered != needed:
            out.append(Action("reshard", 0, None))
        if gathered != needed:
            out.append(Action("unshard", 0, None))
        gathered = needed
        out.append(action)
        if action.kind == "forward" and stage != last:
            out.append(action._replace(kind="send forward"))
        if action.kind == "backward":
            out += [action._replace(kind="send backward")] if stage else []
            backwards += 1
            if backwards % every == 0:
                out += [Action("reduce", 0, None), Action("update", 0, None)]
                gathered = None  # a reduction frees the weights
    return [*out, *([] if gathered is None else [Action("reshard", 0, None)])]
