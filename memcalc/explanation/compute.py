"""The section of a step's FLOPs: products of matrices, by phase and place."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Final, NamedTuple

from memcalc.explanation.folding import sources_of
from memcalc.explanation.places import place_of
from memcalc.explanation.step import Section, Step
from memcalc.explanation.words import Words
from memcalc.units import show_flops

if TYPE_CHECKING:
    from memcalc.estimation.compute import Computed
    from memcalc.estimation.report import Report

TITLE: Final = Words("Matrix products of a step on this GPU", "本 GPU 一步的矩阵乘法运算量")
TOTAL: Final = Words("Total: {shown}.", "合计：{shown}。")
PER_TOKEN: Final = Words(
    "That is {each:.2f} FLOP for each parameter and token; the rule of thumb has 6, or 8 with full recomputation.",
    "即每个参数每个 token {each:.2f} FLOP；经验法则是 6，完全重计算时是 8。",
)
WHAT: Final = Words("{phase}, {place}", "{phase}，{place}")
PHASES: Final = {
    "forward": Words("forward", "前向"),
    "backward": Words("backward", "反向"),
    "recomputation": Words("recomputation", "重计算"),
}
WHY: Final = {
    "forward": Words(
        "A product of m·k and k·n is n·m·k multiplications and as many additions.",
        "(m, k) 与 (k, n) 的矩阵乘法有 m·n·k 次乘法和同样多次加法。",
    ),
    "backward": Words(
        "A product has two in backward: the gradients of its input and of its weight.",
        "每个乘法在反向中对应两个：输入的梯度和权重的梯度。",
    ),
    "recomputation": Words("Forward again, as far as backward needs it.", "再做一遍前向，直到反向所需为止。"),
}
_MOST: Final = 3
"""The most products of a step whose formulas are shown."""


class _Key(NamedTuple):
    """The key of products that are shown in one step."""

    phase: str
    place: str


def compute_section(report: Report, language: str) -> Section | None:
    """Return the section of matrix products by phase and place, in FLOP; None for a bare number of parameters."""
    if not report.computed:
        return None
    found: dict[_Key, list[Computed]] = defaultdict(list)
    for item in report.computed:
        place = place_of(item.name).called.said(language)
        found[_Key(PHASES[item.phase].said(language), place)].append(item)
    text = (TOTAL.said(language, shown=show_flops(report.flops["total"])), *_per_token(report, language))
    return Section(TITLE.said(language), tuple(_step(of, own, language) for of, own in found.items()), text)


def _per_token(report: Report, language: str) -> tuple[str, ...]:
    """Return a sentence on the FLOP per parameter and token, if the rank has all parameters and tokens; else none."""
    setup = report.setup
    if setup.gpus != setup.dp or not report.model.program.has_sequence:
        return ()
    tokens = setup.micro_batches * setup.micro_batch_size * setup.tokens_per_part
    return (PER_TOKEN.said(language, each=report.flops["total"] / (report.model.num_parameters * tokens)),)


def _step(of: _Key, own: list[Computed], language: str) -> Step:
    own = sorted(own, key=lambda item: -item.flops)
    parts = [item.formula.partition(" = ") for item in own[:_MOST]]
    formula = " + ".join(formula for formula, _, _ in parts)
    numbers = " + ".join(number.removesuffix(" FLOP") for _, _, number in parts)
    if len(own) > _MOST:
        formula, numbers = f"{formula} + …", f"{numbers} + {sum(item.flops for item in own[_MOST:])}"
    what = WHAT.said(language, phase=of.phase, place=of.place)
    why = WHY[own[0].phase].said(language)
    return Step(what, formula, numbers, sum(item.flops for item in own), "flop", why, sources_of(i.source for i in own))
