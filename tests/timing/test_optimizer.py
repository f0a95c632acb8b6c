"""The time of the optimizer's step: the tensors that torch's own code reads and writes."""

from __future__ import annotations

from typing import Any

import pytest

import memcalc
from memcalc.hardware.speed import speed_of
from memcalc.timing.kernels import Rates, Unknown
from memcalc.timing.optimizer import optimizer

GPT: dict[str, Any] = {
    "model_type": "gpt2", "n_embd": 256, "n_layer": 6, "n_head": 8, "n_positions": 512, "vocab_size": 51200,
}  # fmt: skip


def nbytes(**options: Any) -> float:
    """The bytes that the rows move, from their seconds."""
    report = memcalc.estimate(GPT, gpu="h100-80gb", **options)
    assert report.gpu is not None
    rates = Rates(report.gpu, speed_of("h100-80gb"), "")
    rows = optimizer(report, rates)
    assert not isinstance(rows, Unknown)
    assert rates.bytes_per_second is not None
    return sum(row.seconds - row.calls * 2e-6 for row in rows) * rates.bytes_per_second


N = memcalc.load_model(GPT).num_parameters


@pytest.mark.parametrize(
    ("options", "each"),
    [
        ({"precision": "fp32", "optimizer_implementation": "fused"}, 28),  # p, m, v twice, the gradient once, 4 B each
        ({"precision": "fp32"}, 80),  # 20 tensors
        ({"precision": "bf16"}, 40),
        ({"precision": "fp32", "optimizer": "sgd"}, 12),
        ({"precision": "fp32", "optimizer": "adam"}, 72),  # torch's default has no weight decay: no mul_ of the weight
        ({"precision": "fp32", "optimizer": "lion"}, 76),  # mul_, clone, mul_, add, sign_, add_, mul_, add_
        ({"precision": "fp32", "optimizer": "adamw-8bit"}, 16),  # 4 + 4 + 4, and two states of one byte twice
        ({"precision": "bf16", "optimizer": "adamw-8bit"}, 10),
        ({"precision": "bf16-mixed"}, 86),  # and the 16-bit weights from the fp32 copy
        ({"gpus": 8, "zero": 1}, (28 + 6 + 2) / 8),  # the norm of 16-bit gradients
    ],
    ids=str,
)
def test_bytes_by_hand(options: dict[str, Any], each: float) -> None:
    assert nbytes(**options) == pytest.approx(each * N, rel=0.001)


def test_eager_adamw_as_measured() -> None:
    """46.6 ms over 8.03e9 parameters in bf16 on a B200, ml-engineering, training/performance: 0.86 of 8 TB/s.

    The data sheet of the list's B200 has 7.7 TB/s."""
    report = memcalc.estimate("llama-3.1-8b", precision="bf16", gpu="b200")
    assert report.gpu is not None
    rows = optimizer(report, Rates(report.gpu, speed_of("b200").given(None, None, 0.86 * 8 / 7.7), ""))
    assert not isinstance(rows, Unknown)
    assert sum(row.seconds for row in rows) == pytest.approx(46.6e-3, rel=0.01)


@pytest.mark.parametrize("name", ["muon", "adafactor"])
def test_what_is_not_modelled_is_not_known(name: str) -> None:
    report = memcalc.estimate(GPT, gpu="h100-80gb", optimizer=name)
    assert isinstance(report.time, Unknown)
    assert name in report.time.missing
    assert report.to_dict()["time"] is None
