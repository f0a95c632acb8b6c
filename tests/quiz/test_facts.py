"""The facts of a question: everything that its answer depends on."""

from __future__ import annotations

import pytest

import memcalc
from memcalc.quiz.facts import given, setup_of


def test_letters_with_their_numbers() -> None:
    assert (
        given({"Φ": 7_000_000_000, "n": 8}, "en")
        == "Given: Φ = 7,000,000,000 (parameters), n = 8 (data-parallel GPUs)."
    )
    assert given({"n": 8}, "zh") == "已知：n = 8（数据并行的 GPU 数）。"
    assert given({}, "en") == ""


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {},
            ("llama-7b with 6,738,415,616 parameters", "32 layers", "width 11008", "a gated MLP", "head of its own", "1 GPU",
             "bf16-mixed", "attention sdpa"),
        ),
        ({"gpus": 8, "zero": 2}, ("8 GPUs", "data parallel 8", "DeepSpeed with ZeRO stage 2")),
        ({"gpus": 8, "engine": "fsdp2"}, ("FSDP2 (reshards after forward)",)),
        ({"gpus": 8, "engine": "megatron", "zero": 1}, ("distributed optimizer",)),
        ({"gpus": 8, "tp": 8}, ("tensor parallel 8", "with sequence parallelism")),
        (
            {"gpus": 4, "pp": 4, "schedule": "interleaved", "virtual_stages": 2, "global_batch_size": 8, "pp_rank": 0},
            ("pipeline stages 4", "schedule interleaved", "2 model chunks", "pipeline stage 1 of 4", "micro-batches a step: 8"),
        ),
        ({"recompute": "full", "micro_batch_size": 4, "optimizer": "sgd"}, ("recomputation full", "4 × 2048", "sgd")),
        ({"task": "ppo"}, ("llama-7b, as policy and value model together 13,345,763,328 parameters",)),
    ],
)  # fmt: skip
def test_a_setup(options: dict[str, object], words: tuple[str, ...]) -> None:
    report = memcalc.estimate("llama-7b", **options)
    text = setup_of(report, "en")
    for each in words:
        assert each in text
    assert "{" not in text + setup_of(report, "zh")


def test_experts_and_sizes() -> None:
    assert "shares the embedding" in setup_of(memcalc.estimate("gpt2"), "en")
    text = setup_of(memcalc.estimate("mixtral-8x7b"), "en")
    assert "8 experts of width 14336, 2 for a token" in text
    alone = setup_of(memcalc.estimate(params="7B", gpus=8, zero=3), "en")
    assert "a model of 7,000,000,000 parameters" in alone
    assert "tokens" not in alone
