"""The note on what a rollout leaves idle: the bytes of the rows."""

from __future__ import annotations

from typing import Any

import pytest

import memcalc
from memcalc.units import show_bytes

LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "vocab_size": 100,
}  # fmt: skip


def note(**options: Any) -> tuple[str, memcalc.Report]:
    report = memcalc.estimate(LLAMA, seq_len=64, completion_len=16, micro_batch_size=8, **options)
    (found,) = (one for one in report.to_dict()["notes"] if "idle while text is generated" in one)
    return found, report


@pytest.mark.parametrize("task", ["grpo", "ppo"])
def test_states_are_idle(task: str) -> None:
    mixed, report = note(task=task, precision="bf16-mixed")
    assert f"{task}: idle while text is generated and scored: optimizer states " in mixed
    assert f"{show_bytes(report.total('optimizer_states'))}, fp32 masters among them" in mixed
    whole, report = note(task=task, precision="fp32", optimizer="sgd")
    assert "optimizer states 0 B" in whole and "masters" not in whole


def test_models_that_score_are_idle_but_for_one_forward() -> None:
    parameters = memcalc.load_model(LLAMA).num_parameters
    without, _ = note(task="grpo", precision="bf16")
    assert "reference" not in without
    with_reference, report = note(task="grpo", precision="bf16", beta=0.1)
    buffers = sum(b.nbytes for b in report.items if b.component == "buffers" and b.name.startswith("reference model: "))
    assert f"the reference model {show_bytes(2 * parameters + buffers)}" in with_reference
    four, _ = note(task="ppo", precision="bf16")
    assert "the reference model " in four and "the reward model " in four


def test_the_value_model_is_idle_but_for_one_forward() -> None:
    four, report = note(task="ppo", precision="bf16")
    kept = [i for i in report.items if i.name.startswith("value_model.") and i.component in ("parameters", "buffers")]
    assert f"the value model {show_bytes(sum(i.nbytes for i in kept))}" in four
    assert "value model" not in note(task="grpo", precision="bf16", beta=0.1)[0]


def test_one_completion_is_one() -> None:
    report = memcalc.estimate(LLAMA, task="ppo", seq_len=64, completion_len=16, micro_batch_size=1, precision="bf16")
    assert any("a rank generates 1 completion of 16 tokens" in one for one in report.to_dict()["notes"])
