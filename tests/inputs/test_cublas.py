"""CUBLAS_WORKSPACE_CONFIG, as torch reads it."""

from __future__ import annotations

import pytest

import memcalc
from memcalc.device.shown import HANDLES
from memcalc.inputs.cublas import workspace_config
from memcalc.units import KIB, MIB


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        (":4096:8", 32 * MIB),
        (":4096:2:16:8", 2 * 4 * MIB + 8 * 16 * KIB),
        (":16:8", 128 * KIB),
        (":0:0", 0),
        (" :4096:8 ", 32 * MIB),
        ("4096:8", None),
        (":4096", None),
        (":a:b", None),
        (":4096:8 :", None),
        ("", None),
        (":٤:٨", None),
    ],
)
def test_pairs_of_kib_and_a_number(text: str, nbytes: int | None) -> None:
    """The sum over the pairs (CublasHandlePool.cpp, parseChosenWorkspaceSize)."""
    assert workspace_config(text) == nbytes


@pytest.mark.parametrize("gpu", [None, "a100-80gb", "h100-80gb", "80GB"])
def test_the_workspaces_of_a_job_that_chooses_them(gpu: str | None) -> None:
    report = memcalc.estimate("gpt2", gpu=gpu, cublas_workspace_config=":4096:8")
    (row,) = (item for item in report.overheads if item.name == "cuBLAS workspaces")
    assert row.nbytes == HANDLES * 32 * MIB
    assert row.source.startswith("CUBLAS_WORKSPACE_CONFIG")


@pytest.mark.parametrize("text", ["4096:8", ":4096:8x", " "])
def test_another_text_is_refused(text: str) -> None:
    with pytest.raises(memcalc.InputError, match=r"--cublas-workspace-config .*allowed: pairs of KiB"):
        memcalc.estimate("gpt2", cublas_workspace_config=text)
