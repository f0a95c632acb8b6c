"""The verdict's words, at every width, and its colour."""

from __future__ import annotations

import io
import re
from functools import cache
from typing import Any

import pytest

import memcalc
from memcalc.device.verdict import verdict_of
from memcalc.report.table import print_report
from memcalc.report.verdict import headline, why
from memcalc.units import show_bytes

LARGE = "gpt2-large"
PAGES = "expandable_segments:True"
ANSWERS: list[tuple[str, dict[str, Any], str, tuple[str, ...]]] = [
    (LARGE, {"micro_batch_size": 1}, "fits", ("to spare", "too low (its stated error)")),
    (LARGE, {"micro_batch_size": 3}, "tight", ("has to free cached memory", "a larger GPU would use", PAGES)),
    (LARGE, {"micro_batch_size": 4, "seq_len": 960}, "expandable",
     ("does not fit", f"fits with PYTORCH_CUDA_ALLOC_CONF={PAGES}")),
    (LARGE, {"micro_batch_size": 16}, "no", ("too much",)),
]  # fmt: skip


@cache
def report_of(case: int) -> memcalc.Report:
    model, options, *_ = ANSWERS[case]
    return memcalc.estimate(model, **options, gpu="rtx4090")


@pytest.mark.parametrize("case", range(len(ANSWERS)), ids=[answer for *_, answer, _ in ANSWERS])
@pytest.mark.parametrize("columns", [40, 80, 200])
def test_words(case: int, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    report, (*_, answer, texts) = report_of(case), ANSWERS[case]
    assert report.verdict is not None
    assert report.verdict.answer == answer
    file = io.StringIO()
    print_report(report, rows=False, file=file)
    shown = re.sub(r"\s", "", file.getvalue())
    for text in (headline(report, report.verdict), *texts, *why(report)):
        assert re.sub(r"\s", "", text) in shown


def test_a_larger_gpu_is_told_of_only_where_the_run_would_take_more() -> None:
    """In a memory between what the run takes with room and that with its error, nothing is freed if the estimate is right."""
    report = memcalc.estimate(LARGE, micro_batch_size=4, seq_len=960, gpu="rtx4090")
    told: list[bool] = []
    for share in range(90, 106):
        verdict = verdict_of([report], report.device * share // 100)
        if verdict.answer == "tight":
            words = headline(report, verdict)
            told.append("has to free cached memory" in words)
            assert told[-1] == (report.device > verdict.capacity), share
            assert told[-1] or f"{show_bytes(verdict.capacity - report.device)} to spare" in words
    assert False in told


def test_the_document_says_the_same() -> None:
    report = memcalc.estimate(LARGE, micro_batch_size=3, gpu="rtx4090")
    fit = report.to_dict()["fit"]
    assert fit["answer"] == "tight"
    assert fit["fits"] is True
    assert fit["why"] == why(report)
    assert show_bytes(report.device) in fit["why"][0]
