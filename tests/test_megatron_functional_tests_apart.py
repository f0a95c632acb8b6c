"""The reasons of Megatron-LM's records that are far from the estimate: where the job can be said, the estimate is close."""

from __future__ import annotations

from collections import defaultdict

import pytest
from megatron_functional_tests_apart import REASONS, RecordApart, records_apart

_OF_A_REASON: dict[str, list[RecordApart]] = defaultdict(list)
for _record in records_apart():
    _OF_A_REASON[_record.reason].append(_record)


@pytest.mark.parametrize("reason", REASONS)
def test_every_reason_is_that_of_records_apart(reason: str) -> None:
    assert all(abs(record.error()) > 0.05 for record in _OF_A_REASON[reason])
    assert _OF_A_REASON[reason]


@pytest.mark.parametrize("record", records_apart(), ids=lambda record: record.name)
def test_an_estimate_of_what_the_job_was(record: RecordApart) -> None:
    """Experts get other tokens in every run. One case's first run, without moments that are there twice, is 2.1 % off, too."""
    error = record.explained()
    if error is None:
        assert record.reason in (
            "another case", "loading", "CUDA graphs", "tokens", "older record", "offloading", "fused loss",
        )  # fmt: skip
    elif record.case.startswith("gpt/") and record.reason != "moments twice":
        assert abs(error) <= 0.0125
    else:
        assert abs(error) <= 0.03
