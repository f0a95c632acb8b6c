"""Sections of what a rank sends in an optimizer step: payload by collective, bytes on the wire, and the textbook's count."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from memcalc.explanation.folding import sources_of
from memcalc.explanation.step import Section, Step
from memcalc.explanation.words import Words
from memcalc.units import show_bytes

if TYPE_CHECKING:
    from memcalc.estimation.report import Report
    from memcalc.layout.collectives import Collective

AXES: Final = {
    "dp": Words("data parallelism", "数据并行"),
    "tp": Words("tensor parallelism", "张量并行"),
    "pp": Words("pipeline parallelism", "流水线并行"),
    "cp": Words("context parallelism", "上下文并行"),
    "ep": Words("expert parallelism", "专家并行"),
}
WHY: Final = {
    "dp": Words(
        "Each rank has other sequences, so their gradients are added up; sharded weights are gathered where they are used.",
        "各 rank 处理不同的序列，因此要把梯度相加；被切分的权重在使用处收集。",
    ),
    "tp": Words(
        "A product that is split along the dim that it sums over leaves a partial sum on each rank; these are added up.",
        "沿求和维切分的矩阵乘法在每个 rank 上只得到部分和，需要相加。",
    ),
    "pp": Words(
        "A stage needs the hidden states of the one before it, and in backward the gradient of the one after it.",
        "每个阶段前向需要上一阶段的隐藏状态，反向需要下一阶段的梯度。",
    ),
    "cp": Words(
        "A token attends to tokens that other ranks have, so keys and values travel.",
        "token 要关注其他 rank 上的 token，因此 K、V 需要传递。",
    ),
    "ep": Words(
        "A token's experts are on other ranks, so its row goes there and the result comes back.",
        "token 的专家在其他 rank 上，因此该行要发过去，结果再传回来。",
    ),
}
TITLE: Final = Words("Communication of {axis}: payload per step", "{axis}的通信：每步的有效数据量 (payload)")
ON_THE_WIRE: Final = Words("What this GPU sends for it (wire)", "本 GPU 实际发送的字节 (wire)")
TEXTBOOK: Final = Words("The same step as the papers count it (payload)", "论文中的算法 (payload)")
TEXTBOOK_SAYS: Final = Words(
    "On the wire the textbook has {textbook}; the engine sends {engine} over the same axis.",
    "按论文计算，发送 {textbook}；该引擎在同一轴上实际发送 {engine}。",
)
PER_LAYER: Final = Words(
    "A layer, on average: payload {payload}, wire {wire}.", "平均每层：payload {payload}，wire {wire}。"
)
WHAT: Final = Words("{collective}, {phase}: {name}", "{collective}，{phase}：{name}")
REST: Final = Words("{rows} smaller collectives", "其余 {rows} 种较小的集合通信")
CALLS: Final = Words("Calls: {calls}; GPUs of the group: {ranks}.", "调用次数：{calls}；通信组 GPU 数：{ranks}。")
PHASES: Final = {
    "forward": Words("forward", "前向"),
    "backward": Words("backward", "反向"),
    "step": Words("optimizer step", "优化器更新"),
}
_FACTORS: Final = {
    "all_reduce": Words(
        "A ring all-reduce is a reduce-scatter and an all-gather: 2(n-1)/n of the payload.",
        "环形 all-reduce 等于一次 reduce-scatter 加一次 all-gather：payload 的 2(n-1)/n。",
    ),
    "all_gather": Words("A ring sends n-1 of n parts.", "环形算法发送 n 份中的 n-1 份。"),
    "reduce_scatter": Words("A ring sends n-1 of n parts.", "环形算法发送 n 份中的 n-1 份。"),
    "all_to_all": Words("A rank keeps 1/n of it.", "每个 rank 自己留下 1/n。"),
    "send": Words("A send is sent once.", "点对点发送一次。"),
    "broadcast": Words("A broadcast passes the payload on once.", "广播把 payload 转发一次。"),
    "reduce": Words("A reduce passes the payload on once.", "reduce 把 payload 转发一次。"),
}
_WIRE: Final = {
    "all_reduce": ("2·(n-1)/n·payload", "2·({n}-1)/{n}·{payload}"),
    "all_gather": ("(n-1)/n·payload", "({n}-1)/{n}·{payload}"),
    "reduce_scatter": ("(n-1)/n·payload", "({n}-1)/{n}·{payload}"),
    "all_to_all": ("(n-1)/n·payload", "({n}-1)/{n}·{payload}"),
}
_LEAST: Final = 0.001
"""Collectives whose share of an axis is below this are shown together, in one step."""


class _Alike(NamedTuple):
    """The key of collectives that differ only in their names."""

    phase: str
    collective: str
    group_size: int
    formula: str
    payload: int
    source: str


class _Sent(NamedTuple):
    """The key of collectives of one kind and group size, whose bytes on the wire are added up."""

    axis: str
    collective: str
    group_size: int


def communication_sections(report: Report, language: str) -> tuple[Section, ...]:
    """Return sections of the payload of each axis, the bytes on the wire, and the textbook's payload if it differs; () if
    nothing is sent."""
    by_axis: dict[str, list[Collective]] = defaultdict(list)
    for collective in report.collectives:
        by_axis[collective.axis].append(collective)
    if not by_axis:
        return ()
    sections = [_payload(axis, own, language) for axis, own in by_axis.items()]
    sections.append(_wire(report, language))
    if report.textbook:
        sections.append(_textbook(report, language))
    return tuple(sections)


def _payload(axis: str, own: Sequence[Collective], language: str) -> Section:
    title = TITLE.said(language, axis=f"{AXES[axis].said(language)} ({axis})")
    return Section(title, tuple(_payloads(own, language)), (WHY[axis].said(language),))


def _payloads(own: Sequence[Collective], language: str) -> Iterable[Step]:
    whole = sum(c.payload for c in own)
    small = [c for c in own if c.payload < _LEAST * whole]
    small = small if len(small) > 1 else []
    alike: dict[_Alike, list[Collective]] = defaultdict(list)
    for c in own:
        if c not in small:
            alike[_Alike(c.phase, c.collective, c.group_size, c.formula, c.payload, c.source)].append(c)
    for of, equal in alike.items():
        formula, _, numbers = of.formula.partition(" = ")
        if len(equal) > 1:
            formula, numbers = (f"{len(equal)}·({words})" if words else "" for words in (formula, numbers))
        names = "; ".join(c.name for c in equal)
        what = WHAT.said(language, collective=of.collective, phase=PHASES[of.phase].said(language), name=names)
        why = CALLS.said(language, calls=sum(c.calls for c in equal), ranks=of.group_size)
        yield Step(what, formula, numbers, sum(c.payload for c in equal), "bytes", why, of.source)
    if small:
        numbers = " + ".join(str(c.payload) for c in small)
        sources = sources_of(c.source for c in small)
        yield Step(
            REST.said(language, rows=len(small)), "", numbers, sum(c.payload for c in small), "bytes", "", sources
        )


def _wire(report: Report, language: str) -> Section:
    kinds: dict[_Sent, list[Collective]] = defaultdict(list)
    for c in report.collectives:
        kinds[_Sent(c.axis, c.collective, c.group_size)].append(c)
    payload, wire = report.per_layer()
    text = (PER_LAYER.said(language, payload=show_bytes(payload), wire=show_bytes(wire)),) if payload else ()
    return Section(ON_THE_WIRE.said(language), tuple(_sent(of, own, language) for of, own in kinds.items()), text)


def _sent(of: _Sent, own: Sequence[Collective], language: str) -> Step:
    formula, numbers = _WIRE.get(of.collective, ("payload", "{payload}"))
    values = {"n": of.group_size, "payload": sum(c.payload for c in own)}
    wire = sum(c.wire for c in own)
    why = _FACTORS[of.collective].said(language)
    return Step(f"{of.axis} {of.collective}", formula, numbers.format(**values), wire, "bytes", why)


def _textbook(report: Report, language: str) -> Section:
    axes = {c.axis for c in report.textbook}
    engine = sum(c.wire for c in report.collectives if c.axis in axes)
    textbook = sum(c.wire for c in report.textbook)
    text = TEXTBOOK_SAYS.said(language, textbook=show_bytes(textbook), engine=show_bytes(engine))
    return Section(TEXTBOOK.said(language), tuple(_payloads(report.textbook, language)), (text,))
