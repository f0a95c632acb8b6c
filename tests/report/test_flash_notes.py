"""Notes on flash-attn: AMD's build, and the blocks outside a window; and the workspaces of hipBLAS."""

from __future__ import annotations

from typing import Any

import pytest

import memcalc
from memcalc.device.shown import cublas_workspace
from memcalc.units import MIB

MISTRAL: dict[str, Any] = {
    "model_type": "mistral", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 100, "sliding_window": 32,
}  # fmt: skip


def notes(**options: Any) -> str:
    given: dict[str, Any] = {"seq_len": 64, "attention": "flash", "precision": "bf16", "gpu": "h100-80gb", **options}
    return "\n".join(memcalc.estimate(MISTRAL, **given).to_dict()["notes"])


def test_a_window_is_faster_than_its_time() -> None:
    assert "2 layers that see a window of 32" in notes()
    for other in ({"seq_len": 32}, {"attention": "eager"}, {"gpu": None}):
        assert "window of" not in notes(**other)


def test_amds_kernels_are_noted() -> None:
    assert "attention flash on an AMD GPU" in notes(gpu="mi300x")
    assert "AMD" not in notes() and "AMD" not in notes(gpu="mi300x", attention="sdpa")


@pytest.mark.parametrize(
    ("capability", "mib"),
    [
        ("gfx942", 128),
        ("gfx950", 128),
        ("gfx90a", 32),
        ("gfx1100", 32),
        ("9.0", 32),
        ("10.0", 32),
        ("12.0", 32),
        ("8.0", 8.125),
    ],
)
def test_the_rule_of_workspaces(capability: str, mib: float) -> None:
    """torch's CublasHandlePool.cpp, parseChosenWorkspaceSize: under USE_ROCM 128 MiB for gfx94 and gfx95, else 32 MiB."""
    assert cublas_workspace(capability) == mib * MIB


def test_workspaces_on_amd_are_assumed() -> None:
    report = memcalc.estimate(MISTRAL, seq_len=64, gpu="mi300x")
    (row,) = (item for item in report.overheads if item.name == "cuBLAS workspaces")
    assert (row.nbytes, row.basis) == (2 * 128 * MIB, "assumed") and "hipBLASLt" in row.source
