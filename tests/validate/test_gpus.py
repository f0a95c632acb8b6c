"""What memcalc calls the GPU of a run, and what is said where an estimate is of another one."""

from __future__ import annotations

import pytest

import memcalc
from memcalc.validate.gpus import another_gpu, known


@pytest.mark.parametrize(
    ("torchs", "ours"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100-80gb"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("Tesla T4", "t4"),
        ("NVIDIA Nothing 9000", None),
    ],
)
def test_a_gpu_is_known_by_torchs_name(torchs: str, ours: str | None) -> None:
    assert known(torchs) == ours


@pytest.mark.parametrize(
    ("named", "there", "words"),
    [
        ("h200", "NVIDIA H200", ""),
        ("a100-80gb", "NVIDIA H200", "estimated for a100-80gb, measured on NVIDIA H200"),
        ("a100-80gb", "NVIDIA Nothing 9000", "estimated for a100-80gb, measured on NVIDIA Nothing 9000"),
        (None, "NVIDIA Nothing 9000", "memcalc does not know NVIDIA Nothing 9000"),
        (None, None, ""),
    ],
)
def test_an_estimate_of_another_gpu_is_said(named: str | None, there: str | None, words: str) -> None:
    said = another_gpu(memcalc.estimate(params="1B", gpu=named), {} if there is None else {"gpu": there})
    assert said.startswith(words)
    assert bool(said) == bool(words)
