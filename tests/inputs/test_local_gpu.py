"""`--gpu auto` is the GPU that nvidia-smi lists."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from command import LLAMA

import memcalc
from memcalc.inputs.local_gpu import local_gpu


@pytest.fixture(autouse=True)
def asked_anew() -> None:
    local_gpu.cache_clear()


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program of that name that prints what a test writes beside it, and ends with the status that is there."""
    monkeypatch.setenv("PATH", str(tmp_path))
    program = tmp_path / "nvidia-smi"
    program.write_text(
        f'#!/bin/sh\nwhile read -r line; do echo "$line"; done < {tmp_path}/says\n[ ! -e {tmp_path}/fails ]\n'
    )
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return tmp_path


@pytest.mark.parametrize(
    ("says", "name"),
    [
        ("NVIDIA A100-SXM4-80GB, 81920\n" * 8, "a100-80gb"),
        ("NVIDIA GeForce RTX 4090, 24564\n", "rtx4090"),
        ("NVIDIA Something New 3000, 98304\n", "98304MiB"),
    ],
)
def test_the_gpu_of_this_machine(says: str, name: str, nvidia_smi: Path) -> None:
    (nvidia_smi / "says").write_text(says)
    report = memcalc.estimate(LLAMA, gpu="auto")
    assert report.setup.gpu == name
    assert report.to_dict() == memcalc.estimate(LLAMA, gpu=name).to_dict() | {"setup": report.to_dict()["setup"]}


@pytest.mark.parametrize(
    ("says", "words"),
    [
        ("", "lists no GPU"),
        ("NVIDIA A100-SXM4-80GB, 81920\nNVIDIA T4, 15360\n", "several kinds"),
        ("NVIDIA Something New 3000, [N/A]\n", "does not tell the memory of NVIDIA Something New 3000"),
    ],
)
def test_what_cannot_be_told_is_refused(says: str, words: str, nvidia_smi: Path) -> None:
    (nvidia_smi / "says").write_text(says)
    with pytest.raises(memcalc.InputError, match=f"^--gpu auto: .*{words}.*; name one of `memcalc gpus`"):
        memcalc.estimate(LLAMA, gpu="auto")


def test_a_failure_is_told_in_its_own_words(nvidia_smi: Path) -> None:
    (nvidia_smi / "says").write_text("Failed to initialize NVML\nDriver/library version mismatch\n")
    (nvidia_smi / "fails").touch()
    with pytest.raises(memcalc.InputError, match="Failed to initialize NVML Driver/library"):
        memcalc.estimate(LLAMA, gpu="auto")


def test_without_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(memcalc.InputError, match=r"^--gpu auto: nvidia-smi cannot be run \(No such file"):
        memcalc.estimate(LLAMA, gpu="auto")
