"""A topic's own options beside those that are given."""

from __future__ import annotations

from typing import Any

import pytest

from memcalc.explanation.defaults import completed

TENSOR = {"gpus": 8, "tp": 8}
PIPELINE = {"gpus": 4, "pp": 4}


@pytest.mark.parametrize(
    ("own", "given", "found"),
    [
        (TENSOR, {}, {"gpus": 8, "tp": 8}),
        (TENSOR, {"gpus": 2}, {"gpus": 2, "tp": 2}),
        (TENSOR, {"gpus": 16}, {"gpus": 16, "tp": 8}),
        (TENSOR, {"gpus": 3}, {"gpus": 3, "tp": 3}),
        (TENSOR, {"tp": 16}, {"gpus": 16, "tp": 16}),
        (TENSOR, {"tp": 4}, {"gpus": 8, "tp": 4}),
        (TENSOR, {"pp": 2}, {"gpus": 16, "tp": 8, "pp": 2}),
        (PIPELINE, {"gpus": 8, "tp": 2}, {"gpus": 8, "tp": 2, "pp": 4}),
        ({"gpus": 3072, "tp": 8, "pp": 64}, {"gpus": 64}, {"gpus": 64, "tp": 8, "pp": 8}),
        ({"gpus": 8, "ep": 8}, {"gpus": 4}, {"gpus": 4, "ep": 4}),
        (TENSOR, {"gpus": "x"}, {"gpus": "x", "tp": 8}),
    ],
)
def test_degrees_and_gpus_go_together(own: dict[str, Any], given: dict[str, Any], found: dict[str, Any]) -> None:
    assert completed(own, given) == found


@pytest.mark.parametrize(
    ("given", "batch"),
    [({}, 8), ({"gpus": 8}, 16), ({"micro_batch_size": 2}, 16), ({"global_batch_size": 5}, 5), ({"tp": 2}, 8)],
)
def test_each_rank_has_the_topics_micro_batches(given: dict[str, Any], batch: int) -> None:
    assert completed(PIPELINE, given, 8)["global_batch_size"] == batch
