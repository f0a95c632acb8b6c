"""The rollout in a report: the largest peak over all phases, its rows, and what it is made of."""

from __future__ import annotations

from typing import Any

import pytest

import memcalc
from memcalc.errors import InputError
from memcalc.report.notes import notes

LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "vocab_size": 100,
    "num_attention_heads": 4, "num_key_value_heads": 4,
}  # fmt: skip
GRPO: dict[str, Any] = {
    "task": "grpo",
    "precision": "bf16",
    "micro_batch_size": 8,
    "seq_len": 128,
    "completion_len": 64,
}
HIGH = GRPO | {"steps_per_generation": 64, "recompute": "full"}


def estimate(**options: Any) -> memcalc.Report:
    return memcalc.estimate(LLAMA, **options)


def test_a_rollout_can_be_the_peak() -> None:
    report = estimate(**HIGH)
    assert report.rollout is not None
    assert report.peak_phase == "rollout"
    assert report.peak == report.rollout.peak == max(report.rollout.peaks.values()) > max(report.phases.values())
    assert sum(item.at_peak for item in report.items) == report.peak


def test_a_step_can_be_the_peak() -> None:
    report = estimate(**GRPO)
    assert report.rollout is not None
    assert report.peak == max(report.phases.values()) >= report.rollout.peak
    assert sum(item.at_peak for item in report.items) == report.peak


def test_the_document() -> None:
    memory = estimate(**HIGH, beta=0.1).to_dict()["memory"]
    rollout = memory["rollout"]
    assert set(memory["phases"]) == {"forward", "backward", "step"}
    assert [phase["name"] for phase in rollout["phases"]] == [
        "generate",
        "old log-probabilities",
        "reference log-probabilities",
    ]
    assert memory["peak"] == rollout["peak"] == rollout["held"] + sum(item["nbytes"] for item in rollout["items"])
    assert sum(memory["at_peak"].values()) == memory["peak"]
    assert memory["peak"] < memory["allocated"] <= memory["reserved"]
    assert estimate(seq_len=128).to_dict()["memory"]["rollout"] is None


def test_the_cache_has_prompt_and_completion() -> None:
    """2 tensors of 4 layers, in bf16; the last token of a completion is never in the cache."""
    report = estimate(**HIGH)
    assert report.rollout is not None
    cache = [row for row in report.rollout.highest.rows if row.name.startswith("KV cache")]
    whole = 2 * 4 * 512 * 127 * 64 * 2
    one = whole // 8
    assert abs(sum(row.nbytes for row in cache) - whole) <= one


def test_a_reference_is_resident() -> None:
    alone, beside, adapters = estimate(**GRPO), estimate(**GRPO, beta=0.1), estimate(**GRPO, beta=0.1, lora_rank=4)
    assert beside.total("parameters") == 2 * alone.total("parameters")
    assert not any("reference" in item.name and item.component == "parameters" for item in adapters.items)


def test_gradients_are_alive_where_a_generation_is_within_a_step() -> None:
    once = estimate(**GRPO, global_batch_size=32)
    each = estimate(**GRPO, global_batch_size=32, steps_per_generation=1)
    assert once.rollout is not None and each.rollout is not None
    gradients = once.total("gradients")
    batches = once.rollout.base - sum(row.bytes_at(8, 128) for row in once.rank.holdings.always)
    assert batches == 0
    assert each.rollout.base - sum(row.bytes_at(8, 128) for row in each.rank.holdings.always) == gradients


def test_old_log_probabilities_are_kept_where_completions_grow_old() -> None:
    assert "old log-probabilities" not in estimate(**GRPO).rollout.peaks  # type: ignore[union-attr]
    assert "old log-probabilities" in estimate(**GRPO, num_iterations=2).rollout.peaks  # type: ignore[union-attr]
    half = estimate(**GRPO, global_batch_size=32, steps_per_generation=2)
    assert "old log-probabilities" not in half.rollout.peaks  # type: ignore[union-attr]


def test_defaults_are_those_of_trl() -> None:
    setup = memcalc.estimate("llama-7b", task="grpo", micro_batch_size=8).setup
    assert (setup.completion_len, setup.num_generations, setup.num_iterations, setup.beta) == (512, 8, 1, 0.0)
    assert estimate(task="grpo", seq_len=128).setup.completion_len == 64


def test_it_is_said() -> None:
    assert any("the highest phase is generate" in note for note in notes(estimate(**HIGH)))
    assert any("TRL wants 8 completions of each prompt" in note for note in notes(estimate(task="grpo", seq_len=128)))


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"task": "sft", "beta": 0.1}, "--beta 0.1: is an option of --task grpo or ppo"),
        ({"num_generations": 8}, "--num-generations 8: is an option of --task grpo"),
        ({**GRPO, "padded": True}, "--padded on: with --task grpo"),
        ({**GRPO, "completion_len": 128}, "--completion-len 128: with --seq-len 128"),
        ({**GRPO, "num_generations": 3}, "--num-generations 3: does not divide the 8 completions"),
        ({**GRPO, "num_generations": 1}, "--num-generations 1: allowed: a whole number from 2"),
        ({**GRPO, "beta": -1}, "--beta -1: allowed: a number from 0 up"),
        ({**GRPO, "engine": "fsdp2", "gpus": 2}, "--task grpo: with engine fsdp2"),
        ({"task": "grpo", "seq_len": 64, "zero": 3, "gpus": 2}, "--task grpo: with --zero 3"),
        ({**GRPO, "lora_rank": 4, "lora_dropout": 0.1}, "--lora-dropout 0.1: with --task grpo"),
        ({**GRPO, "lora_rank": 4, "quantize": "nf4"}, "--quantize nf4: with --task grpo"),
        ({"task": "grpo", "seq_len": 1}, "--seq-len 1: --task grpo needs a prompt and a completion"),
    ],
)
def test_what_is_refused(options: dict[str, Any], why: str) -> None:
    with pytest.raises(InputError) as refused:
        estimate(**options)
    assert why in str(refused.value)


def test_dropout_is_refused() -> None:
    with pytest.raises(InputError, match="pdrop is not 0, as the model generates in training mode"):
        memcalc.estimate("gpt2", task="grpo", seq_len=64)


def test_questions_about_many_setups_are_refused() -> None:
    with pytest.raises(InputError, match="--task grpo: with arrays of options"):
        memcalc.many(LLAMA, task="grpo", micro_batch_size=[8, 16])
    with pytest.raises(InputError, match="--task grpo: with memcalc plan"):
        memcalc.plan(LLAMA, gpu="h100-80gb", gpus=8, task="grpo", global_batch_size=64)
