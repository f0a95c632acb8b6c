"""Other tools' configuration files on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command import LLAMA, check_refused, here, write_config

DS = {
    "train_micro_batch_size_per_gpu": "auto",
    "bf16": {"enabled": "auto"},
    "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"},
}


@pytest.fixture
def small(tmp_path: Path) -> str:
    return write_config(tmp_path, LLAMA)


@pytest.fixture
def ds(tmp_path: Path) -> str:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(DS))
    return str(path)


def test_a_file_decides_what_no_option_does(small: str, ds: str, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("estimate", small, "--deepspeed", ds, "--gpus", "4", "--zero", "2", "--json")
    setup = json.loads(here(capsys, *asked).stdout)["setup"]
    assert (setup["engine"], setup["zero"], setup["reduce_bucket_size"]) == (
        "deepspeed",
        2,
        json.loads(Path(small).read_text())["hidden_size"] ** 2,
    )


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_a_setup_is_explained(
    columns: int, small: str, ds: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    asked = ("estimate", small, "--deepspeed", ds, "--gpus", "4", "--explain-setup")
    ran = here(capsys, *asked)
    assert (ran.status, ran.stderr) == (0, "")
    words = " ".join(ran.stdout.split())
    assert "--zero 3 ds.json: zero_optimization.stage" in words
    assert '--precision bf16-mixed ds.json: bf16.enabled "auto"' in words
    assert "--gpus 4 option" in words
    assert "Defaults: " in words
    document = json.loads(here(capsys, *asked, "--json").stdout)
    assert document["origins"]["zero"] == "ds.json: zero_optimization.stage"
    assert document["origins"]["gpus"] == "option"
    assert document["origins"]["optimizer"] == "default"
    assert document["setup"].keys() == document["origins"].keys()


def test_setups_are_compared_by_file(small: str, ds: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other.json"
    other.write_text(json.dumps({**DS, "zero_optimization": {"stage": 1}}))
    ran = here(capsys, "compare", small, "--gpus", "4", "--deepspeed", f"{ds},{other}")
    assert ran.status == 0
    assert "other.json" in ran.stdout
    ran = here(capsys, "compare", small, "--gpus", "2,4", "--deepspeed", ds)
    assert "ds.json" in ran.stdout


def test_bad_files_are_refused(small: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = tmp_path / "bad.json"
    bad.write_text('{"zero_optimization": {"stage": "ZERO_STAGE"}}')
    check_refused(here(capsys, "estimate", small, "--deepspeed", str(bad)), "bad.json", "stage", "ZERO_STAGE", "0 to 3")
    check_refused(here(capsys, "estimate", small, "--deepspeed", "nowhere.json"), "nowhere.json")
    check_refused(here(capsys, "plan", "--deepspeed", "nowhere.json", "--gpu", "t4"), "nowhere.json")
