"""Whole steps with the optimizers of other packages, by `memcalc validate`: every row is what the real step has."""

from __future__ import annotations

from typing import Any

import pytest
from optimizers.validated_oracle import validated

import memcalc
from memcalc.errors import InputError
from memcalc.report.notes import notes
from memcalc.timing.step import StepTime
from memcalc.validate.comparison import Comparison
from memcalc.validate.optimizers import BITSANDBYTES

LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 512, "intermediate_size": 400, "num_hidden_layers": 2, "vocab_size": 700,
    "num_attention_heads": 8, "num_key_value_heads": 2,
}  # fmt: skip
"""Matrices of 65536 elements, of 204800 and of 358400; norms of 512."""


def same(comparison: Comparison) -> None:
    rows = comparison.memory + comparison.communication
    assert [(row.name, row.predicted) for row in rows] == [(row.name, row.measured) for row in rows]


@pytest.mark.parametrize("optimizer", BITSANDBYTES)
@pytest.mark.parametrize(
    "options",
    [
        {"precision": "bf16"},
        {"precision": "bf16-mixed", "global_batch_size": 2},
        {"gpus": 2, "engine": "ddp", "precision": "bf16"},
        {"gpus": 2, "engine": "deepspeed", "zero": 2},
        {"gpus": 2, "engine": "deepspeed", "zero": 3},
        {"gpus": 2, "engine": "deepspeed", "zero": 1, "precision": "fp32"},
        {"precision": "bf16", "lora_rank": 8},
    ],
    ids=str,
)
def test_bitsandbytes(optimizer: str, options: dict[str, Any]) -> None:
    same(validated(LLAMA, seq_len=4, optimizer=optimizer, **options))


@pytest.mark.parametrize(
    "options",
    [
        {"precision": "bf16"},
        {"precision": "fp32", "recompute": "full"},
        {"precision": "bf16-mixed", "global_batch_size": 2},
        {"precision": "fp16", "freeze": "embeddings,first:1"},
        {"precision": "bf16-autocast"},
        {"precision": "bf16", "clip_grad_norm": True},
        {"gpus": 2, "engine": "ddp"},
    ],
    ids=str,
)
@pytest.mark.parametrize("optimizer", ["apollo-adamw", "galore-adamw"])
def test_optimizers_of_low_rank(optimizer: str, options: dict[str, Any]) -> None:
    same(validated(LLAMA, seq_len=4, optimizer=optimizer, **options))


@pytest.mark.parametrize("optimizer", ["apollo-adamw", "galore-adamw"])
@pytest.mark.parametrize("engine", ["fsdp2", "deepspeed", "megatron"])
def test_they_are_refused_where_no_matrix_is_whole(engine: str, optimizer: str) -> None:
    with pytest.raises(InputError, match=f"--optimizer {optimizer}: "):
        memcalc.estimate(dict(LLAMA), optimizer=optimizer, engine=engine, gpus=2)


@pytest.mark.parametrize("optimizer", ["apollo-adamw", "galore-adamw"])
def test_they_find_no_layer_in_a_model_of_conv1d(optimizer: str) -> None:
    with pytest.raises(
        InputError, match=f"--optimizer {optimizer}: takes nn.Linear alone, and the layers of a gpt2 are"
    ):
        memcalc.estimate("gpt2", optimizer=optimizer, seq_len=8)


def test_galore_keeps_what_its_rank_says() -> None:
    """Of a matrix: two moments of 128 numbers for each unit of the longer side, a projection of 128 for each of the shorter one.
    With fp32 gradients the projection is a view of all singular vectors of the shorter side."""
    options: dict[str, Any] = {"optimizer": "galore-adamw", "gpu": "h100-80gb"}
    report = memcalc.estimate("llama-7b", precision="bf16", **options)
    low = 4 * 32 * 2 * 128 * 4096 + 3 * 32 * 2 * 128 * 11008
    rest = 2 * (2 * 32000 * 4096 + 65 * 4096)
    assert report.total("optimizer_states") == 2 * (low + 7 * 32 * 128 * 4096 + rest)
    assert isinstance(report.time, StepTime)
    whole = memcalc.estimate("llama-7b", precision="fp32", **options)
    assert whole.total("optimizer_states") == 4 * (low + 7 * 32 * 4096 * 4096 + rest)


def test_apollo_keeps_what_its_rank_says() -> None:
    """Of a matrix: two moments of 128 numbers for each unit of the longer side, a projection of 128 for each of the shorter one,
    and a norm."""
    report = memcalc.estimate("llama-7b", optimizer="apollo-adamw", precision="bf16", gpu="h100-80gb")
    square, wide = 4 * 32 * (3 * 128 * 4096 + 1), 3 * 32 * (2 * 128 * 11008 + 128 * 4096 + 1)
    rest = 2 * (2 * 32000 * 4096 + 65 * 4096)
    assert report.total("optimizer_states") == 2 * (square + wide + rest)
    assert isinstance(report.time, StepTime)


@pytest.mark.parametrize("optimizer", BITSANDBYTES)
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"engine": "fsdp2", "gpus": 2}, "over fsdp2's shards is not modelled"),
        ({"engine": "megatron", "gpus": 2}, "with engine megatron is not modelled"),
        ({"engine": "deepspeed", "gpus": 2, "zero": 0}, "with DeepSpeed's stage 0 is not modelled"),
    ],
    ids=str,
)
def test_engines_that_are_refused(optimizer: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=f"--optimizer {optimizer}: {words}"):
        memcalc.estimate(dict(LLAMA), optimizer=optimizer, **options)


def test_paged_states_are_never_left_out() -> None:
    """They count as on the GPU, so no setup fits with them that does not fit without pages."""
    for plain, paged in (("adamw-8bit", "paged-adamw-8bit"), ("lion-8bit", "paged-lion-8bit")):
        of = [
            memcalc.estimate("llama-7b", optimizer=name, precision="bf16", gpu="a100-80gb") for name in (plain, paged)
        ]
        assert of[0].device == of[1].device
        assert of[0].total("optimizer_states") == of[1].total("optimizer_states")
        assert not any("managed memory" in note for note in notes(of[0]))
        assert any(note.startswith("paged states: ") and "counted as on the GPU" in note for note in notes(of[1]))
    small = memcalc.estimate(dict(LLAMA), optimizer="paged-adamw", precision="bf16")
    large = 8 * (2 * 3 * 512 * 400 + 2 * 2 * 512 * 512 + 2 * 700 * 512)
    assert sum(item.nbytes for item in small.items if "managed memory" in item.life) == large


def test_the_time_of_states_in_eight_bits() -> None:
    times = [
        memcalc.estimate("llama-7b", optimizer=name, precision="bf16", gpu="a100-80gb").time for name in BITSANDBYTES
    ]
    assert all(isinstance(time, StepTime) for time in times)
