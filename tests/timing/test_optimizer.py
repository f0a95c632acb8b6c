"""The time of the optimizer's step: the tensors that torch's own code reads and writes."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest

import memcalc
from memcalc.core.dims import numel
from memcalc.core.dtypes import fp32
from memcalc.engines.base.holdings import parameter_classes
from memcalc.hardware.speed import speed_of
from memcalc.timing.kernels import Rates, Unknown
from memcalc.timing.optimizer import kernels_of, optimizer

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
        ({"precision": "bf16", "optimizer": "lion"}, 38),
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


@pytest.mark.parametrize(("precision", "itemsize"), [("fp32", 4), ("bf16", 2)])
def test_eight_bits_by_hand(precision: str, itemsize: int) -> None:
    """The weight twice and its gradient; two states twice: a byte each, a scale for 256 of them, and two tables of codes for a
    tensor. Small tensors have states of four bytes."""
    sizes = [prod(shape) for _, shape, _ in memcalc.load_model(GPT).weights()]
    large, small = (sum(n for n in sizes if (n >= 4096) is kind) for kind in (True, False))
    scales = sum(-(-n // 256) for n in sizes if n >= 4096)
    tables = sum(2 * 256 * 4 for n in sizes if n >= 4096)
    expected = large * (3 * itemsize + 4) + scales * 4 * 4 + tables + small * (3 * itemsize + 16)
    assert nbytes(precision=precision, optimizer="adamw-8bit") == pytest.approx(expected)


@pytest.mark.parametrize(("implementation", "of_matrices", "of_vectors"), [("for-loop", 17, 19), ("foreach", 19, 21)])
def test_adafactor_by_hand(implementation: str, of_matrices: int, of_vectors: int) -> None:
    """Norms read one tensor; clamp, rsqrt, div, the clone and the square two; lerp, mul and add three. foreach multiplies the
    update by the rate first. Rows and columns: a mean is written, squared and divided (5 of them), lerp reads and writes two
    variances and reads the mean, and the estimate reads the variance; the mean of the rows reads it once more."""
    shapes = [shape for _, shape, _ in memcalc.load_model(GPT).weights()]
    matrices = sum(prod(shape) for shape in shapes if len(shape) > 1) * of_matrices
    rows, columns = (sum(shape[i] for shape in shapes if len(shape) > 1) for i in (0, 1))
    vectors = sum(prod(shape) for shape in shapes if len(shape) == 1) * of_vectors
    given = {"precision": "fp32", "optimizer": "adafactor", "optimizer_implementation": implementation}
    assert nbytes(**given) == pytest.approx(4 * (matrices + vectors + 10 * rows + 9 * columns))


def test_adafactor_over_flat_partitions_keeps_no_rows() -> None:
    assert nbytes(gpus=8, zero=1, optimizer="adafactor") == pytest.approx((19 * 4 + 6 + 2) / 8 * N, rel=0.001)


def test_muon_multiplies_each_matrix_fifteen_times() -> None:
    """Five Newton-Schulz iterations (torch/optim/_muon.py): with r the shorter side and c the longer one, r·r·c, r·r·r and
    r·r·c products."""
    report = memcalc.estimate(GPT, gpu="h100-80gb", optimizer="muon", precision="fp32")
    assert report.gpu is not None
    rows = optimizer(report, Rates(report.gpu, speed_of("h100-80gb"), ""))
    assert not isinstance(rows, Unknown)
    products = [row for row in rows if "FLOP" in row.formula or "gram" in row.name or "ortho" in row.name]
    assert sum(row.calls for row in products) == 15 * 4 * 6
    kernels = kernels_of("muon", "foreach", parameter_classes(report.model), fp32)
    shapes = [shape for name, shape, _ in memcalc.load_model(GPT).weights() if ".h." in f".{name}" and len(shape) == 2]
    sides = [(min(shape), max(shape)) for shape in shapes]
    expected = sum(5 * 2 * (r * r * c + r**3 + r * r * c) for r, c in sides)
    assert sum(2 * numel(work.factors)[0] * calls for work, calls in kernels.products) == expected


def test_muon_needs_a_rate_for_bf16() -> None:
    """Its iterations run in bf16 whatever the weights' dtype is; the data sheet of a T4 has no rate for that."""
    report = memcalc.estimate(GPT, gpu="t4", optimizer="muon", precision="fp16")
    assert isinstance(report.time, Unknown)
    assert report.time.missing == "t4 has no known rate for bf16"
    assert report.to_dict()["time"] is None


def test_a_for_loop_starts_its_kernels_for_every_tensor() -> None:
    kernels = kernels_of("adamw", "for-loop", parameter_classes(memcalc.load_model(GPT)), fp32)
    assert kernels.calls == 8 * len(memcalc.load_model(GPT).weights())
    assert kernels_of("adamw", "foreach", parameter_classes(memcalc.load_model(GPT)), fp32).calls == 8
