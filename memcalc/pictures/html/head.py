"""The head of the page: what was asked, the answer, and the totals."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcalc.pictures.html.markup import Markup, element, joined, size
from memcalc.report.answer import answer_lines
from memcalc.report.title import title_words

if TYPE_CHECKING:
    from memcalc.estimation.report import Report


def head(report: Report) -> Markup:
    name, parts = title_words(report)
    headline, *reasons = answer_lines(report)
    if report.verdict is None and ": " in headline:
        headline, *reasons = headline.split(": ", 1)
    verdict = element(
        "div",
        element("p", headline, class_="headline"),
        *(element("p", reason) for reason in reasons),
        class_=f"answer {_kind(report)}",
        role="note",
        aria_label="the answer",
    )
    setup = element("ul", *(element("li", part) for part in parts), class_="setup")
    return element("header", element("h1", name), setup, verdict, _totals(report))


def _kind(report: Report) -> str:
    """Return the word for the answer's colour and sign."""
    if report.verdict is None:
        return "needs"
    return {True: "fits", False: "too-large", None: "open"}[report.verdict.fits]


def _totals(report: Report) -> Markup:
    rank = f" of pipeline rank {report.rank.number}" if report.setup.pp > 1 else ""
    told = [
        ("peak", report.peak, f"tensors{rank}, in {report.peak_phase}"),
        ("allocated", report.allocated, "torch.cuda.max_memory_allocated"),
        ("reserved", report.reserved, "torch.cuda.max_memory_reserved"),
        ("device", report.device, "nvidia-smi"),
    ]
    if report.gpu is not None:
        told.append(("capacity", report.gpu.capacity, report.gpu.full_name))
    return element(
        "dl",
        *(
            element(
                "div",
                element("dt", name),
                element("dd", size(nbytes), element("span", _breakable(note), class_="remark")),
            )
            for name, nbytes, note in told
        ),
        class_="totals",
    )


def _breakable(words: str) -> Markup:
    """Return words that may break after a dot in them."""
    return joined(words.split("."), Markup(".<wbr>"))
