"""Rules that the pages of engines and axes state, against the estimates."""

from __future__ import annotations

from typing import Any

import pytest

import memcalc

SMALL = {
    "model_type": "llama", "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 16, "num_attention_heads": 8,
    "num_key_value_heads": 8, "vocab_size": 512, "max_position_embeddings": 128, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.mark.parametrize(
    ("options", "engine"),
    [
        ({}, "none"),
        ({"gpus": 8}, "ddp"),
        *(({"gpus": 8, "zero": zero}, "deepspeed") for zero in (1, 2, 3)),
        *(({"gpus": 8, axis: 2, "zero": zero}, "megatron") for axis in ("tp", "pp", "cp") for zero in (0, 1)),
        *(({"gpus": 8, axis: 2, "zero": zero}, "fsdp2") for axis in ("tp", "pp", "cp") for zero in (2, 3)),
    ],
)
def test_the_default_engine(options: dict[str, Any], engine: str) -> None:
    """docs/engines/index.md."""
    batch = {"global_batch_size": 16} if "pp" in options else {}
    assert memcalc.estimate(SMALL, **options, **batch).setup.engine == engine


@pytest.mark.parametrize("zero", range(4))
@pytest.mark.parametrize("ranks", [4, 64])
def test_model_states(zero: int, ranks: int) -> None:
    """docs/axes/data-parallel.md."""
    phi = 10**9
    stated = (16 * phi, 4 * phi + 12 * phi // ranks, 2 * phi + 14 * phi // ranks, 16 * phi // ranks)[zero]
    report = memcalc.estimate(params=phi, gpus=ranks, zero=zero, engine="deepspeed")
    assert sum(report.total(name) for name in ("parameters", "gradients", "optimizer_states")) == stated


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved"])
@pytest.mark.parametrize("micro_batches", [4, 8, 32])
def test_forwards_in_flight(schedule: str, micro_batches: int) -> None:
    """docs/axes/pipeline-parallel.md."""
    p, m, v = 4, micro_batches, 2 if schedule == "interleaved" else 1
    report = memcalc.estimate(SMALL, gpus=p, pp=p, schedule=schedule, virtual_stages=v, global_batch_size=m, seq_len=32)
    for r, rank in enumerate(report.each_rank()):
        stated = {
            "gpipe": m,
            "1f1b": min(m, p - r),
            "interleaved": min(v * m, 2 * (p - r - 1) + (v - 1) * p + 1),
        }[schedule]
        assert rank.in_flight == stated, r


def test_what_zero_sends() -> None:
    """docs/axes/data-parallel.md: in elements of Φ, the payload of a step; norms and flags are some bytes."""
    model = memcalc.load_model("llama-7b")
    phi = model.num_parameters

    def sent(**options: Any) -> float:
        report = memcalc.estimate(model, gpus=8, **options)
        of_weights = [c for c in report.collectives if c.payload > phi // 10]
        factor = {"all_reduce": 2}
        return sum(factor.get(c.collective, 1) * c.payload for c in of_weights) / (2 * phi)

    assert sent(zero=0) == pytest.approx(2, rel=0.01)
    assert sent(zero=0, engine="deepspeed") == pytest.approx(2, rel=0.01)
    assert sent(zero=1) == pytest.approx(3, rel=0.01)
    assert sent(zero=2) == pytest.approx(3, rel=0.01)
    nothing_kept = {"max_live_parameters": 0, "max_reuse_distance": 0, "param_persistence_threshold": 0}
    assert sent(zero=3, **nothing_kept) == pytest.approx(3, rel=0.01)


@pytest.mark.parametrize(
    ("options", "forward", "backward"),
    [
        ({"sequence_parallel": False}, {"all_reduce": 2}, {"all_reduce": 2}),
        ({}, {"all_gather": 2, "reduce_scatter": 2}, {"all_gather": 4, "reduce_scatter": 2}),
        ({"engine": "fsdp2", "zero": 3}, {"all_reduce": 2}, {"all_reduce": 5}),
        (
            {"engine": "fsdp2", "zero": 3, "sequence_parallel": True},
            {"all_gather": 2, "reduce_scatter": 2},
            {"all_gather": 2, "reduce_scatter": 2},
        ),
    ],
)
def test_what_a_layer_sends_over_tp(options: dict[str, Any], forward: dict[str, int], backward: dict[str, int]) -> None:
    """docs/axes/tensor-parallel.md: calls of a layer on a whole activation; each of 16 layers has as many."""
    report = memcalc.estimate(SMALL, gpus=4, tp=4, seq_len=128, **options)
    whole = 128 * 128 * 2
    for phase, stated in (("forward", forward), ("backward", backward)):
        calls: dict[str, int] = {}
        for c in report.collectives:
            if c.axis == "tp" and c.phase == phase and c.calls >= 16 and c.payload == c.calls * whole:
                calls[c.collective] = calls.get(c.collective, 0) + c.calls // 16
        assert calls == stated, phase
