"""The schedules of a pipeline side by side: the bubble and the memory of each, in one setup."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from memcalc.errors import InputError
from memcalc.explanation.step import Section, Step
from memcalc.explanation.words import Words

if TYPE_CHECKING:
    from memcalc.estimation.report import Report
    from memcalc.explanation.topic import Asked

_BUBBLE: Final = Words("{schedule}: bubble over the ideal time", "{schedule}：气泡与理想时间之比")
_PEAK: Final = Words("{schedule}: peak of the fullest rank", "{schedule}：显存最多的 rank 的峰值")
_SETUP: Final = Words(
    "Schedules side by side are the same setup with --engine fsdp2 --zero {zero}, whose stages all of them can run. A bubble "
    "is read from the order of "
    "work as it is played, with equal stages and a backward twice as long as a forward.",
    "并列的各调度：同一设置，使用 --engine fsdp2 --zero {zero}，其阶段可运行所有这些调度。气泡由实际播放的执行顺序得出，"
    "假定各阶段耗时相同，反向耗时为前向的两倍。",
)
_NOT_HERE: Final = Words("Not for this setup: {error}", "不适用于该设置：{error}")
_SCHEDULES: Final = (
    "naive", "gpipe", "1f1b", "dapple", "dapple-b", "pipedream", "pipedream-2bw", "interleaved", "zero-bubble", "zbv",
    "chimera", "dualpipe", "dualpipev",
)  # fmt: skip


def side_by_side(asked: Asked) -> Section:
    """Return the bubble and the highest peak of every schedule that goes with the setup, and why the others do not."""
    from memcalc.pipelining.idle import idle_share

    language, steps, text = asked.language, list[Step](), list[str]()
    zero = 2 if asked.report.setup.zero < 2 else asked.report.setup.zero
    for schedule in _SCHEDULES:
        try:
            report = _with(asked, schedule, zero)
        except InputError as error:
            text.append(_NOT_HERE.said(language, error=str(error)))
            continue
        share = idle_share(report.setup)
        steps.append(Step(_BUBBLE.said(language, schedule=schedule), "", "", share, "ratio"))
        peak = max(report.rank_peaks.values())
        steps.append(Step(_PEAK.said(language, schedule=schedule), "", "", peak, "bytes"))
    return Section("", tuple(steps), (_SETUP.said(language, zero=zero), *text))


def _with(asked: Asked, schedule: str, zero: int) -> Report:
    chunks: dict[str, Any] = {"virtual_stages": 2 if schedule == "interleaved" else 1}
    return asked.again(engine="fsdp2", zero=zero, schedule=schedule, pp_rank=None, **chunks)
