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
        "tight": f"fits {gpu}, but the allocator has to free cached memory"
        if verdict.gives_back
        else f"fits {gpu}: {spare} to spare, which is less than the estimate's error",
        "expandable": f"does not fit {gpu} as it is, but fits with {EXPANDABLE}",
        "uncertain": f"may not fit {gpu}: {missing} more would be enough",
        "no": f"does not fit {gpu}: at least {missing} too much",
        "unknown": states_words(report, report.gpu),
    }[verdict.answer] + (", with the model states alone" if report.states_only and verdict.answer == "no" else "")


def states_words(report: Report, gpu: GPU) -> str:
    """Return a sentence on how much of the GPU is known to be taken, and on what is not known."""
    size = f"{show_bytes(gpu.capacity)} ({gpu.full_name})"
    if report.uncounted:
        return f"{show_bytes(report.device)} of {size} are counted; {report.uncounted} is not known, so whether it fits is open"
    return f"model states take {show_bytes(report.peak)} of {size}; activations are not known without a model"


def why(report: Report) -> list[str]:
    """Return sentences with the reasons for the answer, for the table and for JSON."""
    verdict = report.verdict
    assert verdict is not None
    one, device = verdict.report, verdict.report.device
    lines = _reasons(verdict)
    if one.played is None and verdict.answer not in ("no", "unknown"):
        lines.append(f"fragmentation {one.assumed(one.allocated).words}")
    if one is not report:
        lines.append(f"pipeline rank {one.rank.number} decides: it takes {show_bytes(device)}")
    if verdict.answer not in ("no", "unknown") and one.model.program.has_sequence:
        lines.append(
            f"assumes {one.setup.seq_len} tokens in every sequence; lengths that vary reserve more memory (not modelled)"
        )
    return lines


def _reasons(verdict: Verdict) -> list[str]:
    one = verdict.report
    if verdict.answer == "fits":
        return [f"fits even if the estimate is {show_bytes(one.margin)} too low (its stated error)"]
    if verdict.answer == "tight":
        if verdict.run is None or not verdict.gives_back:
            error = f"if the estimate is {show_bytes(one.margin)} too low (its stated error)"
            return [f"{error}, the allocator has to free cached memory, which takes time"]
        often = f"{verdict.run.retried} times in every step" if verdict.run.retried else "in the first steps"
        return [
            f"a larger GPU would use {show_bytes(one.device)}; here cached memory is freed {often}, which takes time",
            f"{EXPANDABLE} may avoid that",
        ]
    if verdict.answer == "expandable":
        least = f"it takes at least {show_bytes(verdict.needs)} with the estimate's error"
        return [f"as it is, {least}, and {show_bytes(one.device)} on a larger GPU"]
    if verdict.answer == "no" and not one.states_only:
        return [f"a large enough GPU would use {show_bytes(one.device)}"]
    if verdict.answer == "uncertain" and one.played is None:
        return [f"{show_bytes(one.allocated)} are allocated; whether it fits depends on fragmentation"]
    if verdict.answer == "uncertain":
        return ["the run goes on with all of the GPU's memory, but not for certain with a little less"]
    return []
