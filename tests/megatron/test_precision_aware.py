"""Megatron's precision-aware optimizer against Transformer Engine's own FusedAdam: its states, and the peak of its step."""

from __future__ import annotations

import importlib.metadata
import itertools
from typing import Any

import pytest

import memcalc
from memcalc.core.dims import Dim, numel
from memcalc.core.tensor import Memory
from memcalc.megatron.precision_aware import DTYPES, PrecisionAware
from memcalc.optimizers import Parameter

STATES = ("fp32", "bf16", "fp16", "fp8")
CASES = [
    {"dtype": dtype, "main_params": main, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    for dtype, main, exp_avg, exp_avg_sq in itertools.product(("bf16", "fp16"), ("fp32", "fp16"), STATES, STATES)
]


def ours(sizes: tuple[int, ...], how: dict[str, Any]) -> tuple[int, int]:
    of = (how["dtype"], how["main_params"], how["exp_avg"], how["exp_avg_sq"])
    optimizer = PrecisionAware("adam", ("fused",), *(DTYPES[name] for name in of))
    parameters = [Parameter(f"w{i}", (Dim("elements", n),), 1, False) for i, n in enumerate(sizes)]
    states = sum(
        numel(s.shape)[0] * s.dtype.itemsize * s.count for s in optimizer.states(parameters, DTYPES["fp32"], "fused")
    )
    memory = Memory()
    optimizer.step(memory, parameters, DTYPES[how["dtype"]], DTYPES["fp32"], "fused")
    live = most = 0
    for event in memory.log:
        row = memory.rows[event if event >= 0 else ~event]
        live += (1 if event >= 0 else -1) * numel(row.shape)[0] * row.dtype.itemsize
        most = max(most, live)
    return states, most


@pytest.mark.parametrize(
    "sizes", [(64, 4096, 300), *(pytest.param(s, marks=pytest.mark.slow) for s in ((1000,), (1000, 600)))]
)
@pytest.mark.parametrize("how", CASES, ids=lambda how: "-".join(how.values()))
def test_states_and_step(sizes: tuple[int, ...], how: dict[str, Any]) -> None:
    names = {one.metadata["Name"].lower().replace("_", "-") for one in importlib.metadata.distributions()}
    if "transformer-engine" not in names:
        pytest.skip("transformer-engine is not installed")
    from precision_aware_oracle import fused_adam

    found = fused_adam(sizes, **how)
    assert ours(sizes, how) == (found.states, found.step)


def test_megatrons_distributed_optimizer() -> None:
    """A llama-7b's shards divide by 4 ranks: 2 bytes of main weights and of each moment in bf16."""
    options: dict[str, Any] = {
        "engine": "megatron",
        "gpus": 4,
        "zero": 1,
        "seq_len": 64,
        "precision_aware_optimizer": True,
    }
    both = {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}
    plain = memcalc.estimate("llama-7b", **{**options, "precision_aware_optimizer": False})
    remains, halves = (memcalc.estimate("llama-7b", **options, **how) for how in ({}, both))
    scales = sum(item.nbytes for item in halves.items if item.name.endswith("scale"))
    assert remains.total("optimizer_states") * 12 == plain.total("optimizer_states") * 10
    assert (halves.total("optimizer_states") - scales) * 12 == plain.total("optimizer_states") * 6
    assert halves.phases["step"] > remains.phases["step"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"engine": "megatron"}, "--precision-aware-optimizer on: Megatron takes it with its distributed optimizer"),
        ({"engine": "ddp"}, "--precision-aware-optimizer on: is an option of Megatron"),
        (
            {"engine": "megatron", "zero": 1, "optimizer": "muon"},
            "--precision-aware-optimizer on: with optimizer muon Megatron refuses it; allowed: with --optimizer adamw, adam",
        ),
        ({"engine": "megatron", "zero": 1, "precision": "fp32"}, "--precision-aware-optimizer on: with precision fp32"),
    ],
)
def test_what_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(memcalc.InputError, match=f"^{message}"):
        memcalc.estimate("llama-7b", gpus=4, precision_aware_optimizer=True, **options)
    with pytest.raises(memcalc.InputError, match=r"^--exp-avg-dtype bf16: is of Megatron's precision-aware"):
        memcalc.estimate("llama-7b", gpus=4, exp_avg_dtype="bf16")
