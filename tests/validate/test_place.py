"""What nvidia-smi prints; the place without a GPU, and with one that answers as CUDA's does."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import memcalc
from memcalc.validate import place as places
from memcalc.validate.place import Shown, nvidia_smi, place, shown_of

UUID = "1f1c5a9e-0000-1111-2222-333344445555"
SHOWN = f"GPU-{UUID}, 4, 580.159.04\nGPU-aa, 1024, 580.159.04\nGPU-bb, [N/A], 580.159.04\n\n"


def test_of_each_gpu() -> None:
    assert shown_of(SHOWN, UUID) == Shown(4 * 2**20, "580.159.04")
    assert shown_of(SHOWN, "aa") == shown_of(SHOWN, "GPU-aa") == Shown(2**30, "580.159.04")
    assert shown_of(SHOWN, "bb") == Shown(None, "580.159.04")
    for lines in ("Failed to initialize NVML: Unknown Error\n", "", "GPU-cc, 4\n", SHOWN):
        assert shown_of(lines, "cc") == Shown(None, "unknown")


def raising(error: Exception) -> Callable[..., Any]:
    def run(*_: Any, **__: Any) -> Any:
        raise error

    return run


@pytest.mark.parametrize(
    "error", [FileNotFoundError(), subprocess.CalledProcessError(9, "nvidia-smi"), subprocess.TimeoutExpired("", 60)]
)
def test_a_command_that_fails_shows_nothing(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    monkeypatch.setattr(subprocess, "run", raising(error))
    assert nvidia_smi() == ""


def test_there_is_no_gpu() -> None:
    with pytest.raises(memcalc.InputError, match="--backend cuda: torch sees no CUDA device; allowed: fake"):
        place()


@pytest.mark.parametrize(
    ("shown", "context", "used"),
    [
        ([4, 530, 2000], 526, 1996),
        (["[N/A]", "[N/A]", "[N/A]"], None, None),
        ([None, 530, 2000], None, None),
        ([4, None, None], None, None),
    ],
)
def test_what_the_device_counts(
    monkeypatch: pytest.MonkeyPatch, shown: list[Any], context: int | None, used: int | None
) -> None:
    """Before there is a context, with it, and after a step; None if one of them is not known."""
    lines = iter("" if size is None else f"GPU-{UUID}, {size}, 580.1\n" for size in shown)
    properties = SimpleNamespace(name="NVIDIA H200", major=9, minor=0, uuid=UUID, total_memory=150 * 10**9)
    monkeypatch.setattr(places, "nvidia_smi", lambda: next(lines))
    for name, answer in {"is_available": True, "device_count": 1, "get_device_properties": properties}.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    for name in ("set_device", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    here = place.__wrapped__()
    assert here.context == (None if context is None else context * 2**20)
    assert here.used() == (None if used is None else used * 2**20)
    environment = here.environment()
    assert environment["driver"] == ("580.1" if shown[1] is not None else "unknown")
    assert (environment["gpu"], environment["compute_capability"]) == ("NVIDIA H200", "9.0")
    assert {"torch", "transformers", "cuda", "allocator", "memory"} <= environment.keys()
