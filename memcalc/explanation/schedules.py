"""The schedules of a pipeline side by side: the bubble and the micro-batches in flight of each, in one setup."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from memcalc.errors import InputError
from memcalc.explanation.step import Section, Step
from memcalc.explanation.words import Words

if TYPE_CHECKING:
    from memcalc.estimation.report import Report
    from memcalc.explanation.topic import Asked
    from memcalc.setup.setup import Setup

_TITLE: Final = Words("Schedules side by side", "各调度对比")
_BUBBLE: Final = Words("{schedule}: bubble over the ideal time", "{schedule}：气泡与理想时间之比")
_IN_FLIGHT: Final = Words(
    "{schedule}: most micro-batches in flight on a rank", "{schedule}：单个 rank 上同时在途的微批次最多数"
)
_SETUP: Final = Words(
    "All run the same setup with --engine fsdp2 --zero {zero}, whose stages take each of these schedules. A bubble is read "
    "from the order of work as it is played, with equal stages and a backward twice as long as a forward.",
    "各调度使用同一设置和 --engine fsdp2 --zero {zero}，其阶段可运行所有这些调度。气泡由实际执行顺序得出，"
    "假定各阶段耗时相同，反向耗时为前向的两倍。",
)
_NOT_HERE: Final = Words("Not for this setup: {error}", "不适用于该设置：{error}")
_SCHEDULES: Final = (
    "naive", "gpipe", "1f1b", "dapple", "dapple-b", "pipedream", "pipedream-2bw", "interleaved", "zero-bubble", "zbv",
    "chimera", "dualpipe", "dualpipev",
)  # fmt: skip


_LAYOUT: Final = (
    "gpus", "gpus_per_node", "tp", "pp", "cp", "ep", "micro_batch_size", "seq_len", "global_batch_size", "precision",
    "optimizer", "recompute",
)  # fmt: skip
"""The options that decide whether a schedule goes with a setup."""


def side_by_side(asked: Asked) -> Section:
    """Return the bubble and the micro-batches in flight of every schedule that goes with the setup, and why others do not."""
    from memcalc.pipelining.idle import idle_share

    language, steps, text = asked.language, list[Step](), list[str]()
    zero = 2 if asked.report.setup.zero < 2 else asked.report.setup.zero
    for schedule in _SCHEDULES:
        try:
            setup = _with(asked.report, schedule, zero)
        except InputError as error:
            text.append(_NOT_HERE.said(language, error=str(error)))
            continue
        steps.append(Step(_BUBBLE.said(language, schedule=schedule), "", "", idle_share(setup), "ratio"))
        steps.append(Step(_IN_FLIGHT.said(language, schedule=schedule), "", "", in_flight(setup), "ratio"))
    return Section(_TITLE.said(language), tuple(steps), (_SETUP.said(language, zero=zero), *text))


def _with(report: Report, schedule: str, zero: int) -> Setup:
    """Return the setup with another schedule. Raises InputError if they do not go together."""
    from memcalc.inputs.options import check_options
    from memcalc.setup.resolved import resolve

    layout = {name: getattr(report.setup, name) for name in _LAYOUT}
    chunks = 2 if schedule == "interleaved" else 1
    own = {"engine": "fsdp2", "zero": zero, "schedule": schedule, "virtual_stages": chunks}
    return resolve(check_options({**layout, **own}), report.model)


def in_flight(setup: Setup) -> float:
    """Return the most micro-batches whose activations a rank has at once. One in a chunk with half of a stage's layers is
    half of one; the two chunks of a schedule that runs both ways are whole stages."""
    from memcalc.pipelining.orders import most_in_flight, order
    from memcalc.pipelining.schedules import NAMES, placement_of, schedule_of

    chunks = schedule_of(setup.schedule).chunks if setup.schedule in NAMES else setup.virtual_stages
    of_a_stage = 1 if placement_of(setup.schedule) == "both ways" else chunks
    orders = (
        order(setup.schedule, rank, setup.pp, setup.micro_batches, setup.virtual_stages) for rank in range(setup.pp)
    )
    return max(map(most_in_flight, orders)) / of_a_stage
