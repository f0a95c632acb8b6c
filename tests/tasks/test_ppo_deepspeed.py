"""An iteration of PPO under DeepSpeed's ZeRO 0 to 2 against DeepSpeed's own engines: the peak of each phase on the ranks that
can be the worst, weights and states, to the byte."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
from tasks.ppo_deepspeed_oracle import measured
from validate.test_fake import GPT2, LLAMA, QWEN3

import memcalc

SIZES: dict[str, Any] = {
    "task": "ppo", "engine": "deepspeed", "gpus": 4, "precision": "bf16-mixed", "micro_batch_size": 2, "seq_len": 24,
    "completion_len": 6, "num_iterations": 2,
}  # fmt: skip


def check(model: dict[str, Any], options: dict[str, Any], *of: Any) -> None:
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is not installed")
    if options["zero"]:
        options = {"reduce_bucket_size": 20_000, **options}
    report = memcalc.estimate(model, **SIZES | options)
    ranks = measured(report, *of)
    assert report.rollout is not None
    worst = {phase: max(one.peaks[phase] for one in ranks) for phase in ranks[0].peaks}
    assert {**report.rollout.peaks, **report.phases} == worst
    trained = sum(
        item.nbytes for item in report.items if item.component == "parameters" and " model: " not in item.name
    )
    assert trained == ranks[0].parameters
    assert report.total("optimizer_states") == max(one.states for one in ranks)


def test_an_iteration() -> None:
    check(LLAMA, {"zero": 2, "gpus": 2, "completion_len": 2, "num_iterations": 1})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "options"),
    [
        (LLAMA, {"zero": 0}),
        (LLAMA, {"zero": 1}),
        (LLAMA, {"zero": 2, "global_batch_size": 16}),
        (LLAMA, {"zero": 2, "reduce_bucket_size": 500_000_000}),
        (LLAMA, {"zero": 2, "global_batch_size": 24, "num_mini_batches": 3}),
        (LLAMA, {"zero": 1, "global_batch_size": 24, "rollout_batch_size": 4}),
        (LLAMA, {"zero": 0, "global_batch_size": 24, "rollout_batch_size": 4}),
        (LLAMA, {"zero": 2, "precision": "fp32"}),
        (LLAMA, {"zero": 2, "gpus": 1}),
        (LLAMA, {"zero": 2, "gpus": 3, "micro_batch_size": 1, "optimizer": "adam"}),
        (GPT2, {"zero": 2}),
        (GPT2, {"zero": 1, "precision": "fp32", "global_batch_size": 16, "num_mini_batches": 2, "completion_len": 1}),
        (QWEN3, {"zero": 1, "completion_len": 20, "num_iterations": 1}),
        (LLAMA, {"zero": 2, "recompute": "full", "global_batch_size": 16}),
        (LLAMA, {"zero": 2, "clip_grad_norm": True}),
        (LLAMA, {"zero": 0, "clip_grad_norm": True}),
        (LLAMA, {"zero": 2, "overlap_comm": True, "global_batch_size": 16}),
        (LLAMA, {"zero": 2, "lora_rank": 4}),
        (LLAMA, {"zero": 1, "lora_rank": 4, "recompute": "full"}),
        (LLAMA, {"zero": 0, "lora_rank": 4, "global_batch_size": 16}),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if "model_type" not in value else value["model_type"],
)
def test_more_iterations(model: dict[str, Any], options: dict[str, Any]) -> None:
    check(model, options)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"zero": 2, "global_batch_size": 16, "num_mini_batches": 2},
        {"zero": 0, "global_batch_size": 24, "rollout_batch_size": 4},
        {"zero": 1, "lora_rank": 4},
    ],
    ids=str,
)
def test_the_trainer_of_trl(options: dict[str, Any]) -> None:
    """TRL's own `PPOTrainer.train`, where it is installed, around the same engines."""
    from tasks.ppo_of_trl import import_ppo, iterations_of_trl, wrapper_of_trl

    try:
        import_ppo()
    except ImportError:
        pytest.skip("this TRL has no PPOTrainer")
    check(LLAMA, options, iterations_of_trl, wrapper_of_trl)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"zero": 3}, "--zero 3"),
        ({"engine": "fsdp2", "zero": 2}, "--task ppo: with engine fsdp2"),
        ({"zero": 2, "offload_optimizer": "cpu"}, "--offload-optimizer cpu"),
    ],
)
def test_what_is_refused(options: dict[str, Any], named: str) -> None:
    with pytest.raises(memcalc.InputError, match=named):
        memcalc.estimate(LLAMA, **SIZES | options)
