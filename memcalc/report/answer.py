"""The first lines of a report, which answer the question: does it fit, or how much does a GPU need."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

from memcalc.report.folding import Folded
from memcalc.report.verdict import verdict_text
from memcalc.units import show_bytes

if TYPE_CHECKING:
    from rich.console import RenderableType

    from memcalc.estimation.report import Report


def answer(report: Report) -> list[RenderableType]:
    """Return the verdict and its reasons; without --gpu, the bytes that a GPU needs, as nvidia-smi would show."""
    return [Folded(_text(report))]


def answer_lines(report: Report) -> list[str]:
    """Return the answer as lines of plain text, for other formats."""
    return _text(report).plain.splitlines()


def _text(report: Report) -> Text:
    verdict = verdict_text(report)
    return verdict if verdict is not None else _need(report)


def _need(report: Report) -> Text:
    """Return the sentence for a report without --gpu."""
    who = "one GPU" if report.setup.gpus == 1 else "each GPU" if report.setup.pp == 1 else "the fullest GPU"
    if report.states_only:
        words = f"model states take {show_bytes(report.peak)} of {who}; activations are not known without a model"
        return Text(words, style="bold")
    text = Text(f"{who} needs {show_bytes(report.device)}", style="bold")
    text.append(
        f": {show_bytes(report.peak)} of tensors at the peak, in {report.peak_phase}; --gpu tells whether it fits",
        "not bold",
    )
    return text
