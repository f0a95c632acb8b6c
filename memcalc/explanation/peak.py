"""Sections of the peak of a step, and of the bytes from its tensors up to what nvidia-smi shows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from memcalc.core.rows import COMPONENTS
from memcalc.explanation.folding import summed, term_of
from memcalc.explanation.memory import TITLES
from memcalc.explanation.step import Section, Step
from memcalc.explanation.words import Words
from memcalc.units import show_bytes

if TYPE_CHECKING:
    from memcalc.core.rows import Item
    from memcalc.estimation.report import Report

TITLE: Final = Words("Peak: what is alive at once", "峰值：同一时刻存活的张量")
WHERE: Final = Words(
    "The most bytes are alive in the {phase}: forward {forward}, backward {backward}, optimizer step {step}.",
    "峰值出现在{phase}：前向 {forward}，反向 {backward}，优化器更新 {step}。",
)
PHASES: Final = {
    "forward": Words("forward", "前向"),
    "backward": Words("backward", "反向"),
    "step": Words("optimizer step", "优化器更新"),
    "rollout": Words("rollout before the step", "更新之前的生成阶段"),
}
PEAK: Final = Words("The peak is {nbytes:,} B = {shown}.", "峰值为 {nbytes:,} B = {shown}。")
ALL_OF_IT: Final = Words("All of it is alive at the peak.", "峰值时全部存活。")
PART_OF_IT: Final = Words(
    "Of the {total} above, {missing} are not alive: freed before this moment, or made after it.",
    "上面的 {total} 中有 {missing} 此刻不存活：此前已释放，或之后才产生。",
)
LARGEST: Final = Words("The largest: {names}.", "最大的几项：{names}。")

DEVICE: Final = Words(
    "From tensors to the GPU: allocated, reserved, device", "从张量到显存：allocated、reserved、device"
)
TENSORS: Final = Words("tensors at the peak", "峰值时刻的张量")
FROM_ABOVE: Final = Words("The peak of the section above.", "即上一节的峰值。")
ALLOCATED: Final = Words(
    "allocated {allocated} is what torch.cuda.max_memory_allocated counts, reserved {reserved} what the caching allocator "
    "holds, device {device} what nvidia-smi shows.",
    "allocated {allocated}：torch.cuda.max_memory_allocated 的值；reserved {reserved}：缓存分配器持有的显存；device {device}："
    "nvidia-smi 显示的值。",
)
CAPACITY: Final = Words("{gpu} has {capacity}: {answer}.", "{gpu} 有 {capacity}：{answer}。")
FITS: Final = {True: Words("it fits", "放得下"), False: Words("it does not fit", "放不下")}
_OVERHEADS: Final = {
    "allocator": Words("Part of allocated.", "计入 allocated。"),
    "reserved": Words(
        "Held by the allocator for later blocks, and free at the peak: part of reserved.",
        "分配器为后续分配保留、峰值时空闲的显存：计入 reserved。",
    ),
    "device": Words(
        "Outside torch's allocator: only nvidia-smi shows it.", "不在 torch 分配器之内：只有 nvidia-smi 能看到。"
    ),
}
_FEW: Final = 3


def peak_section(report: Report, language: str) -> Section:
    """Return a step for each component that is alive at the peak; they add up to the peak."""
    phases = {phase: show_bytes(size) for phase, size in report.phases.items()}
    where = WHERE.said(language, phase=PHASES[report.peak_phase].said(language), **phases)
    steps = (_alive(report, component, language) for component in COMPONENTS)
    peak = PEAK.said(language, nbytes=report.peak, shown=show_bytes(report.peak))
    return Section(TITLE.said(language), tuple(step for step in steps if step.result), (where, peak))


def _alive(report: Report, component: str, language: str) -> Step:
    items = [item for item in report.items if item.component == component and item.at_peak]
    items.sort(key=lambda item: -item.at_peak)
    alive = sum(item.at_peak for item in items)
    total = report.total(component)
    words = ALL_OF_IT if alive == total else PART_OF_IT
    why = words.said(language, missing=show_bytes(total - alive), total=show_bytes(total))
    if component == "temporaries" and items:
        why = LARGEST.said(language, names=", ".join(item.name for item in items[:_FEW]))
    formula, numbers = _few(report, items)
    return Step(TITLES[component].said(language), formula, numbers, alive, "bytes", why)


def _few(report: Report, items: list[Item]) -> tuple[str, str]:
    """Return the sum of the rows' bytes, by name and in numbers; '' if there are many rows."""
    if not 1 <= len(items) <= _FEW:
        return "", ""
    if len(items) == 1:
        return summed([term_of(items[0], items[0].at_peak, report.model.layers)])
    return " + ".join(item.name for item in items), " + ".join(str(item.at_peak) for item in items)


def device_section(report: Report, language: str) -> Section:
    """Return the rows between the peak's tensors and what nvidia-smi shows; with the peak they add up to `device`."""
    peak = Step(TENSORS.said(language), "", str(report.peak), report.peak, "bytes", FROM_ABOVE.said(language))
    rows = (_overhead(item, language) for item in report.overheads)
    shown = {name: show_bytes(getattr(report, name)) for name in ("allocated", "reserved", "device")}
    text = [ALLOCATED.said(language, **shown)]
    if report.gpu is not None and report.fits is not None:
        answer = FITS[report.fits].said(language)
        capacity = show_bytes(report.gpu.capacity)
        text.append(CAPACITY.said(language, gpu=report.gpu.name, capacity=capacity, answer=answer))
    return Section(DEVICE.said(language), (peak, *(row for row in rows if row.result)), tuple(text))


def _overhead(item: Item, language: str) -> Step:
    why = _OVERHEADS[item.component].said(language)
    return Step(item.name, item.formula, "", item.nbytes, "bytes", why, item.source)
