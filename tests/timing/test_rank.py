"""What compute hides of a rank's communication."""

from __future__ import annotations

from typing import Any

import pytest

import memcalc
from memcalc.engines.ddp import buckets, gradient_sizes
from memcalc.timing.step import StepTime

CONFIG: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 2048, "intermediate_size": 5504, "num_hidden_layers": 8,
    "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 32000, "max_position_embeddings": 4096,
}  # fmt: skip
SETUP: dict[str, Any] = {"gpus": 8, "gpu": "h100-80gb", "seq_len": 4096, "micro_batch_size": 4}


def reduced(**options: Any) -> tuple[memcalc.Report, Any]:
    """A report, and the row of time of its gradients' reduction."""
    report = memcalc.estimate(CONFIG, **SETUP, **options)
    time = report.time
    assert isinstance(time, StepTime)
    (row,) = (item for item in time.items if item.part == "communication" and "gradient" in item.name)
    return report, row


def test_the_last_bucket_of_ddp_is_exposed() -> None:
    report, row = reduced(engine="ddp")
    sizes = buckets(gradient_sizes(report.model, 2))
    assert sizes[-1] >= 32000 * 2048 * 2  # the embedding's gradient is the last one
    assert row.hidden == pytest.approx(row.seconds * (1 - sizes[-1] / sum(sizes)))


def test_gradients_that_the_last_micro_batch_reduces_hide_behind_it_alone() -> None:
    """On a slow network the reduction takes longer than one backward: the other micro-batches hide none of it."""
    slow = {"engine": "ddp", "gpus": 64, "network_gbps": 10, "global_batch_size": 1024}
    options = {name: value for name, value in SETUP.items() if name != "gpus"}
    found: dict[bool, Any] = {}
    for each in (False, True):
        time = memcalc.estimate(CONFIG, **{**options, **slow}, sync_each_micro_batch=each).time
        assert isinstance(time, StepTime)
        (row,) = (item for item in time.items if item.part == "communication" and "gradient" in item.name)
        backward = sum(item.seconds for item in time.items if item.part == "backward")
        found[each] = row.hidden, backward
    hidden, backward = found[False]
    assert hidden == pytest.approx(backward / 4)
    hidden, backward = found[True]
    assert hidden == pytest.approx(backward)
