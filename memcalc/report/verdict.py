"""The verdict in words: whether the setup fits, and the reasons."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

from memcalc.units import show_bytes

if TYPE_CHECKING:
    from memcalc.device.verdict import Verdict
    from memcalc.estimation.report import Report
    from memcalc.inputs.gpu import GPU

EXPANDABLE = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"


def verdict_text(report: Report) -> Text | None:
    """Return a headline and a line for each reason; None without a GPU."""
    verdict = report.verdict
    if verdict is None:
        return None
    style = {True: "bold green", False: "bold red", None: "bold yellow"}[verdict.fits]
    text = Text(headline(report, verdict), style=style)
    for line in why(report):
        text.append("\n" + line, "not bold")
    return text


def verdict_lines(report: Report) -> list[str]:
    """Return the verdict as lines of plain text, for other formats; [] without a GPU."""
    verdict = verdict_text(report)
    return [] if verdict is None else verdict.plain.splitlines()


def headline(report: Report, verdict: Verdict) -> str:
    """Return the answer and its bytes in one line."""
    assert report.gpu is not None
    gpu = f"{report.gpu.full_name} ({show_bytes(verdict.capacity)})"
    spare, missing = show_bytes(max(verdict.headroom, 0)), show_bytes(max(-verdict.headroom, 0))
    return {
        "fits": f"fits {gpu}: {spare} to spare",
        "tight": f"fits {gpu}, if the allocator gives cached segments back"
        if verdict.gives_back
        else f"fits {gpu}: {spare} to spare, which is less than the estimate's error",
        "expandable": f"does not fit {gpu} as it is: fits with {EXPANDABLE}",
        "uncertain": f"may not fit {gpu}: {missing} short of being sure",
        "no": f"does not fit {gpu}: at least {missing} too much",
        "unknown": states_words(report, report.gpu),
    }[verdict.answer] + (", with the model states alone" if report.states_only and verdict.answer == "no" else "")


def states_words(report: Report, gpu: GPU) -> str:
    """Return a sentence on how much of the GPU the model states take, and on what is not known."""
    size = f"{show_bytes(gpu.capacity)} ({gpu.full_name})"
    return f"model states take {show_bytes(report.peak)} of {size}; activations are not known without a model"


def why(report: Report) -> list[str]:
    """Return sentences with the reasons for the answer, for the table and for JSON."""
    verdict = report.verdict
    assert verdict is not None
    one, device = verdict.report, verdict.report.device
    lines = _reasons(verdict)
    if one.played is None and verdict.answer not in ("no", "unknown"):
        lines.append(f"its fragmentation {one.assumed(one.allocated).words}")
    if one is not report:
        lines.append(f"on pipeline rank {one.rank.number}, whose device has {show_bytes(device)}")
    if verdict.answer not in ("no", "unknown") and one.model.program.has_sequence:
        length = f"{one.setup.seq_len} tokens"
        lines.append(
            f"if every sequence has {length}: batches whose lengths vary reserve more, how much is not modelled"
        )
    return lines


def _reasons(verdict: Verdict) -> list[str]:
    one = verdict.report
    if verdict.answer == "fits":
        return [f"it still fits if the estimate is too low by its stated error, {show_bytes(one.margin)}"]
    if verdict.answer == "tight":
        assert verdict.run is not None
        if not verdict.gives_back:
            error = f"where the estimate is too low by its stated error, {show_bytes(one.margin)}"
            return [f"{error}, the allocator has to give cached segments back, which takes time"]
        often = f"{verdict.run.retried} times in every step" if verdict.run.retried else "in the first steps"
        return [
            f"with room it would take {show_bytes(one.device)}; here segments are given back {often}, which takes time",
            f"{EXPANDABLE} may spare that",
        ]
    if verdict.answer == "expandable":
        least = f"it takes at least {show_bytes(verdict.needs)}, the estimate's error included"
        return [f"as it is {least}, and {show_bytes(one.device)} with room"]
    if verdict.answer == "no" and not one.states_only:
        return [f"with room the run would take {show_bytes(one.device)}"]
    if verdict.answer == "uncertain" and one.played is None:
        return [f"{show_bytes(one.allocated)} are allocated; what the allocator loses besides decides"]
    if verdict.answer == "uncertain":
        return ["it runs with some of the limits that the GPU may leave, and not with others"]
    return []
