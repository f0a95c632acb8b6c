"""Whoever gives a job's file is asked for no GPU where the machine has one."""

from __future__ import annotations

from typing import Any

import pytest

from memcalc import InputError
from memcalc.formats.given import with_files
from memcalc.inputs import local_gpu

DEEPSPEED = {"train_micro_batch_size_per_gpu": 1}
SMALL = {"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 4}


def options_of(**options: Any) -> dict[str, Any]:
    return with_files(SMALL, options)[1]


def test_a_setup_from_a_file_is_judged_for_the_gpu_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_gpu, "local_gpu", lambda: "a100-80gb")
    assert options_of(deepspeed=DEEPSPEED)["gpu"] == "a100-80gb"
    assert options_of(deepspeed=DEEPSPEED, gpu="t4")["gpu"] == "t4"
    assert "gpu" not in options_of(gpus=2)


def test_a_machine_without_a_gpu_is_asked_in_vain(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> str:
        raise InputError("--gpu auto: nvidia-smi cannot be run")

    monkeypatch.setattr(local_gpu, "local_gpu", fails)
    assert "gpu" not in options_of(deepspeed=DEEPSPEED)


def test_without_a_file_nothing_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_gpu, "local_gpu", lambda: pytest.fail("asked"))
    assert options_of(gpus=2, deepspeed=None) == {"gpus": 2}
