"""Every pipeline rank side by side: each line is the estimate of that rank alone."""

from __future__ import annotations

import io
from typing import Any

import pytest
from command import check_refused, here

import memcalc
from memcalc.report.table import print_report
from memcalc.units import show_bytes

SETUPS: list[dict[str, Any]] = [
    {"gpus": 8, "tp": 2, "pp": 4, "global_batch_size": 8},
    {"gpus": 4, "pp": 2, "global_batch_size": 8, "schedule": "interleaved", "virtual_stages": 2, "gpu": "h100-80gb"},
    {"gpus": 4, "pp": 4, "global_batch_size": 2, "schedule": "gpipe", "zero": 0},
    {"gpus": 8, "zero": 3},
]
COMPONENTS = ("parameters", "gradients", "optimizer_states", "saved_activations", "buffers")
setups = pytest.mark.parametrize("options", SETUPS)


@setups
def test_a_rank_is_the_estimate_of_that_rank(options: dict[str, Any]) -> None:
    memory = memcalc.estimate("gpt2", **options).to_dict()["memory"]
    assert [rank["pp"] for rank in memory["ranks"]] == list(range(options.get("pp", 1)))
    for rank in memory["ranks"]:
        alone = memcalc.estimate("gpt2", **options, pp_rank=rank["pp"]).to_dict()
        assert {name: rank[name] for name in (*COMPONENTS, "phases", "peak_phase", "peak", "device")} == {
            name: alone["memory"][name] for name in (*COMPONENTS, "phases", "peak_phase", "peak", "device")
        }
        assert rank["communication"] == alone["communication"]["per_step"]
        assert alone["memory"]["ranks"] == [rank]
    assert max(rank["peak"] for rank in memory["ranks"]) == memory["peak"]


@setups
def test_the_ranks_are_the_whole_model(options: dict[str, Any]) -> None:
    ranks = memcalc.estimate("gpt2", **options).to_dict()["memory"]["ranks"]
    assert sum(rank["layers"] for rank in ranks) == 12


@pytest.mark.parametrize(
    ("schedule", "chunks", "in_flight"),
    [("1f1b", 1, [4, 3, 2, 1]), ("gpipe", 1, [8, 8, 8, 8]), ("interleaved", 2, [11, 9, 7, 5])],
)
def test_what_is_in_flight(schedule: str, chunks: int, in_flight: list[int]) -> None:
    """p - r, m, and 2(p - r - 1) + (v - 1)p + 1 chunks."""
    model = {
        "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 8,
        "num_attention_heads": 4, "vocab_size": 100, "max_position_embeddings": 64,
    }  # fmt: skip
    report = memcalc.estimate(model, gpus=4, pp=4, schedule=schedule, virtual_stages=chunks, global_batch_size=8)
    assert [rank["in_flight"] for rank in report.to_dict()["memory"]["ranks"]] == in_flight


@setups
def test_the_table_has_every_number(options: dict[str, Any]) -> None:
    report = memcalc.estimate("gpt2", **options)
    file = io.StringIO()
    print_report(report, rows=False, all_ranks=True, file=file)
    lines = file.getvalue().split("Pipeline ranks")[1].splitlines()
    for rank in report.to_dict()["memory"]["ranks"]:
        start = [str(rank["pp"]), str(rank["layers"]), str(rank["in_flight"])]
        (line,) = [line for line in lines if line.split()[:3] == start]
        sizes = [show_bytes(rank[name]) for name in (*COMPONENTS, "peak")]
        assert " ".join([*sizes, show_bytes(rank["communication"]["wire"])]) in " ".join(line.split())


def test_the_option(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("estimate", "-m", "gpt2", "--gpus", "4", "--pp", "4")
    assert "Pipeline ranks" not in here(capsys, *arguments).stdout
    assert "Pipeline ranks" in here(capsys, *arguments, "--all-ranks").stdout
    check_refused(here(capsys, *arguments, "--all-ranks", "--pp-rank", "1"), "--all-ranks", "--pp-rank 1")


@pytest.mark.parametrize("width", [60, 80, 100])
def test_no_number_is_cut_at_any_width(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERM", "dumb")
    report = memcalc.estimate("gpt2", **SETUPS[1])
    file = io.StringIO()
    file.isatty = lambda: True  # type: ignore[method-assign]
    print_report(report, rows=False, all_ranks=True, file=file)
    lines = file.getvalue().split("Pipeline ranks")[1].splitlines()
    shown = " ".join(" ".join(lines[:4]).split())
    for rank in report.to_dict()["memory"]["ranks"]:
        assert show_bytes(rank["peak"]) in shown
        assert show_bytes(rank["saved_activations"]) in shown
