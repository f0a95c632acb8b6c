"""`memcalc estimate --params`: its verdict, and what it refuses."""

from __future__ import annotations

import json

import pytest
from command import check_refused, here

FITTING = ("estimate", "--params", "7.5B", "--zero", "2", "--gpus", "64", "--gpu", "a100-80gb")
TOO_LARGE = ("estimate", "--params", "70B", "--gpu", "a100-80gb")


def test_states_that_have_room_are_no_fit(capsys: pytest.CaptureFixture[str]) -> None:
    ran = here(capsys, *FITTING)
    assert ran.status == 0
    words = " ".join(ran.stdout.split())
    assert "model states take 15.50 GiB of 79.35 GiB (NVIDIA A100 SXM4 80GB)" in words
    assert "activations are not known without a model" in words
    assert "fits" not in words
    assert "to spare" not in words


def test_states_that_are_too_large_do_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    ran = here(capsys, *TOO_LARGE)
    assert ran.status == 0
    words = " ".join(ran.stdout.split())
    assert "does not fit NVIDIA A100 SXM4 80GB (79.35 GiB)" in words
    assert "with the model states alone" in words


def test_a_fit_that_is_not_known_is_null(capsys: pytest.CaptureFixture[str]) -> None:
    fit = json.loads(here(capsys, *FITTING, "--json").stdout)["fit"]
    assert fit["gpu"] == "a100-80gb"
    assert (fit["fits"], fit["headroom"]) == (None, None)


def test_check_refuses_what_it_cannot_answer(capsys: pytest.CaptureFixture[str]) -> None:
    check_refused(here(capsys, *FITTING, "--check"), "--check", "--model", "15.50 GiB of 79.35 GiB")


def test_check_tells_what_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    ran = here(capsys, *TOO_LARGE, "--check")
    assert ran.status == 1
    assert ran.stderr == ""
    assert "does not fit" in ran.stdout


@pytest.mark.parametrize(
    "given",
    [
        ("-b", "1"), ("-s", "2048"), ("--recompute", "full"), ("--recompute", "none"), ("--attention", "sdpa"),
        ("--cross-entropy", "chunked"), ("--padded",), ("--kernels", "fused"), ("--expert-imbalance", "2"),
        ("--no-sequence-parallel",), ("--clip-grad-norm",), ("--per-layer",), ("--all-ranks",),
    ],
    ids=" ".join,
)  # fmt: skip
def test_what_a_size_does_not_depend_on(given: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    name = {"-b": "--micro-batch-size", "-s": "--seq-len"}.get(given[0], given[0].replace("--no-", "--"))
    check_refused(here(capsys, "estimate", "--params", "7B", *given), name, "--params", "--model")
