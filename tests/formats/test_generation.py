"""TRL's GRPOConfig as a file: what it says of completions, read and written."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from formats.test_training_args import PLAIN, of, read, values

import memcalc
from memcalc.formats.training_args_writer import write

LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 100,
    "num_attention_heads": 4, "num_key_value_heads": 4,
}  # fmt: skip


def test_what_a_file_says() -> None:
    found = of(num_generations=4, max_completion_length=300, beta=0.04, num_iterations=2, steps_per_generation=3)
    assert found["task"] == "grpo"
    assert (found["num_generations"], found["completion_len"], found["beta"]) == (4, 300, 0.04)
    assert (found["num_iterations"], found["steps_per_generation"]) == (2, 3)
    assert "seq_len" not in found  # the data decides it


def test_an_older_file_has_a_length_of_prompts() -> None:
    assert of(num_generations=8, max_prompt_length=512, max_completion_length=256)["seq_len"] == 768
    assert of(num_generations=8, max_prompt_length=512)["seq_len"] == 1024


def test_vllm_is_noted() -> None:
    found = read("f.yaml", PLAIN | {"use_vllm": True, "num_generations": 8})
    assert values(found)["task"] == "grpo"
    assert any("vLLM" in note for note in found.notes)


def test_a_reward_model_is_noted() -> None:
    """It may be of a type that is not modelled, so a file's is named and not counted."""
    found = read("f.yaml", PLAIN | {"reward_model_name_or_path": "org/model", "num_generations": 8})
    assert "reward_model" not in values(found)
    assert any(
        "reward_model_name_or_path 'org/model': is not counted; with --reward-model" in note for note in found.notes
    )
    assert not any("reward_model" in note for note in read("f.yaml", PLAIN | {"num_generations": 8}).notes)


def test_ppo_is_another_trainer() -> None:
    with pytest.raises(
        memcalc.InputError, match=r"kl_coef 0\.05: is a key of PPO's or RLOO's trainer, whose files are not read"
    ):
        of(response_length=53, kl_coef=0.05)
    report = memcalc.estimate(LLAMA, seq_len=64, task="ppo", precision="bf16")
    with pytest.raises(memcalc.InputError, match="--task ppo: in a file of TrainingArguments"):
        write(report.setup, report.model)


def test_what_is_written_is_read() -> None:
    options: dict[str, Any] = {
        "task": "grpo", "micro_batch_size": 8, "completion_len": 20, "beta": 0.1, "num_iterations": 2, "precision": "bf16",
    }  # fmt: skip
    report = memcalc.estimate(LLAMA, seq_len=64, **options)
    keys = yaml.safe_load(write(report.setup, report.model).text)
    found = values(read("f.yaml", keys))
    again = {name: value for name, value in found.items() if name in options or name == "num_generations"}
    assert again == options | {"num_generations": 8}
