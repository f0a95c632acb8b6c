"""An iteration of PPO against transformers' modules in the order of TRL's calls, and against TRL's own trainer where it is
installed: the peak of each phase, weights and states, to the byte."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
from cases import step_cases
from tasks.ppo_oracle import measured
from validate.test_fake import GPT2, LLAMA, QWEN3

import memcalc
from memcalc.tasks.ppo import TYPES

SIZES: dict[str, Any] = {
    "task": "ppo", "precision": "bf16", "micro_batch_size": 2, "seq_len": 24, "completion_len": 6, "num_iterations": 2,
}  # fmt: skip
FULL: dict[str, Any] = {"recompute": "full"}
WORDS: dict[str, Any] = GPT2 | {"vocab_size": 8}
"""A model of few words: its caches are more than its logits."""


def named(value: Any) -> str:
    return "-".join(map(str, value.values())) if "model_type" not in value else value["model_type"]


def check(model: dict[str, Any], options: dict[str, Any]) -> None:
    report = memcalc.estimate(model, **SIZES | options)
    real = measured(report)
    assert report.rollout is not None
    assert {**report.rollout.peaks, **report.phases} == real.peaks
    trained = sum(
        item.nbytes for item in report.items if item.component == "parameters" and " model: " not in item.name
    )
    assert (trained, report.total("optimizer_states")) == (real.parameters, real.states)


@pytest.mark.parametrize(
    ("model", "options"),
    [(LLAMA, {}), pytest.param(GPT2, {"precision": "fp32", "micro_batch_size": 1}, marks=pytest.mark.slow)],
    ids=named,
)
def test_an_iteration(model: dict[str, Any], options: dict[str, Any]) -> None:
    check(model, options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "options"),
    [
        (LLAMA, {"precision": "fp32", "global_batch_size": 6, "rollout_batch_size": 4}),
        (LLAMA, {"precision": "bf16-autocast", "global_batch_size": 4}),
        (LLAMA, {"recompute": "full"}),
        (LLAMA, {"recompute": "full", "global_batch_size": 6, "micro_batch_size": 1}),
        (LLAMA, {"global_batch_size": 8, "num_mini_batches": 2}),
        (LLAMA, {"global_batch_size": 8, "num_mini_batches": 4, "rollout_batch_size": 3}),
        (LLAMA, {"seq_len": 200, "completion_len": 180, "global_batch_size": 4}),
        (LLAMA, {"seq_len": 20, "completion_len": 1}),
        (LLAMA, {"completion_len": 1, "global_batch_size": 6, "rollout_batch_size": 2}),
        (
            LLAMA,
            {
                "seq_len": 60,
                "completion_len": 50,
                "global_batch_size": 14,
                "rollout_batch_size": 4,
                "num_iterations": 1,
            },
        ),
        (LLAMA, {"attention": "eager"}),
        (LLAMA | {"vocab_size": 9000}, {"seq_len": 9, "completion_len": 1, "optimizer": "sgd"}),
        (LLAMA, {"seq_len": 2, "completion_len": 1, "micro_batch_size": 1, "precision": "fp32", "attention": "eager"}),
        (LLAMA | {"tie_word_embeddings": True, "attention_bias": True}, {}),
        (QWEN3, {"completion_len": 20}),
        (GPT2, {"optimizer": "sgd", "global_batch_size": 4, "completion_len": 20}),
        (GPT2, {"optimizer": "sgd", "global_batch_size": 8, "completion_len": 20}),
        (GPT2, {"precision": "bf16-autocast", "recompute": "full", "global_batch_size": 4}),
        (WORDS, {"global_batch_size": 4, "seq_len": 120, "completion_len": 100, "rollout_batch_size": 1}),
        (WORDS, {"global_batch_size": 4, "seq_len": 120, "completion_len": 117, "optimizer": "sgd"}),
        (LLAMA, {"engine": "ddp", "gpus": 4}),
        (LLAMA, {"engine": "ddp", "gpus": 2, "global_batch_size": 12, "precision": "fp32"}),
    ],
    ids=named,
)
def test_more_iterations(model: dict[str, Any], options: dict[str, Any]) -> None:
    check(model, options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "options"),
    [
        (LLAMA, {}),
        (LLAMA, {"precision": "bf16-autocast"}),
        (LLAMA, FULL | {"global_batch_size": 6, "rollout_batch_size": 3}),
        (GPT2, FULL | {"global_batch_size": 4}),
    ],
    ids=named,
)
def test_adapters(model: dict[str, Any], options: dict[str, Any]) -> None:
    pytest.importorskip("peft")
    check(model, {"lora_rank": 4} | options)


@pytest.mark.slow
@pytest.mark.parametrize("family", TYPES)
def test_types(family: str) -> None:
    for case in step_cases(family)[:2]:
        windows = memcalc.load_model(case.fields).program.cache_windows().values()
        seq = min([case.seq, *(window - 1 for window in windows)])
        check(case.fields, {"micro_batch_size": case.batch, "seq_len": seq, "completion_len": seq // 2})


@pytest.mark.filterwarnings("ignore:You are importing from")
@pytest.mark.parametrize(
    ("model", "options"),
    [
        (LLAMA, {}),
        (LLAMA, {"precision": "fp32", "global_batch_size": 6, "rollout_batch_size": 4}),
        (GPT2, {"precision": "bf16-autocast", "global_batch_size": 8, "num_mini_batches": 2}),
        (LLAMA, FULL | {"lora_rank": 4, "global_batch_size": 4}),
    ],
    ids=named,
)
def test_trl_itself(model: dict[str, Any], options: dict[str, Any]) -> None:
    """TRL 1.12's own trainer has the same bytes in each phase as the calls that stand in for it."""
    if importlib.util.find_spec("trl.experimental.ppo") is None:
        pytest.skip("this version of TRL has no PPOTrainer")
    from tasks.ppo_of_trl import iterations_of_trl, wrapper_of_trl

    report = memcalc.estimate(model, **SIZES | options)
    assert measured(report, iterations_of_trl, wrapper_of_trl).peaks == measured(report).peaks


def estimate(**options: Any) -> memcalc.Report:
    return memcalc.estimate(LLAMA, **SIZES | options)


def test_the_models_have_rows() -> None:
    """The policy, a value model without its head and with a score, a reference like the policy, a reward model like the value
    model."""
    report = estimate()
    head, score = 700 * 96, 96
    rows = [item for item in report.items if item.component == "parameters"]

    def of(name: str) -> int:
        return sum(item.nbytes for item in rows if item.name.startswith(name)) // 2

    policy = memcalc.load_model(LLAMA).num_parameters
    assert of("value_model.") == of("reward model: ") == policy - head + score
    assert of("reference model: ") == policy
    assert report.total("gradients") == 2 * (2 * policy - head + score)
    assert report.total("optimizer_states") == 2 * report.total("gradients")


def test_adapters_have_no_reference_and_a_whole_value_model() -> None:
    report = estimate(lora_rank=4)
    assert not any("reference model" in item.name for item in report.items)
    policy = memcalc.load_model(LLAMA).num_parameters
    assert report.model.trainable_parameters > policy - 700 * 96


def test_the_document() -> None:
    memory = estimate(seq_len=64, completion_len=60, global_batch_size=8).to_dict()["memory"]
    assert set(memory["phases"]) == {"forward", "backward", "step"}
    assert [phase["name"] for phase in memory["rollout"]["phases"]] == ["generate", "score"]
    rollout = memory["rollout"]
    assert rollout["peak"] == rollout["held"] + sum(item["nbytes"] for item in rollout["items"])
    assert sum(memory["at_peak"].values()) == memory["peak"]
    assert sum(item["at_peak"] for item in memory["items"]) == memory["peak"]


def test_all_logits_of_responses_stay() -> None:
    report = estimate(global_batch_size=8)
    (row,) = (item for item in report.items if item.name == "batch: logits of all responses' tokens")
    assert row.nbytes == 8 * 6 * 700 * 4


def test_defaults_are_those_of_trl() -> None:
    setup = memcalc.estimate("llama-7b", task="ppo", micro_batch_size=8, global_batch_size=16).setup
    assert (setup.completion_len, setup.num_iterations, setup.num_mini_batches, setup.rollout_batch_size) == (
        53,
        4,
        1,
        16,
    )
    assert memcalc.estimate("llama-7b", task="ppo", global_batch_size=100).setup.rollout_batch_size == 64
    assert setup.cross_entropy == "eager" and setup.beta is None


def test_dropout_in_modules_is_switched_off() -> None:
    assert memcalc.estimate("gpt2", task="ppo", seq_len=64).rollout is not None


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "zero 3": ({"gpus": 2, "zero": 3, "precision": "bf16-mixed"}, "--task ppo: with --zero 3"),
    "fsdp2": ({"gpus": 2, "engine": "fsdp2"}, "--task ppo: with engine fsdp2"),
    "tensor parallelism": (
        {"gpus": 2, "tp": 2, "engine": "megatron", "precision": "bf16-mixed"},
        "--task ppo: with engine megatron",
    ),
    "adapters with DDP": ({"gpus": 2, "lora_rank": 4}, "--lora-rank 4: with --task ppo on several GPUs"),
    "beta": ({"beta": 0.1}, "--beta 0.1: with --task ppo a reference model is always there"),
    "generations": ({"num_generations": 8}, "--num-generations 8: with --task ppo each prompt has one completion"),
    "steps": ({"steps_per_generation": 2}, "--steps-per-generation 2: with --task ppo all micro-batches"),
    "mini-batches": ({"num_mini_batches": 3}, "--num-mini-batches 3: allowed: a divisor of the 2 sequences"),
    "cut micro-batches": ({"num_mini_batches": 2}, "--num-mini-batches 2: parts of 1 sequences"),
    "reward model": ({"reward_model": "llama-7b"}, "--reward-model llama-7b: "),
    "padded": ({"padded": True}, "--padded on: with --task ppo"),
    "clipping": ({"clip_grad_norm": True}, "--clip-grad-norm on: with --task ppo"),
    "freeze": ({"freeze": "embeddings"}, "--freeze embeddings: with --task ppo"),
    "quantised": ({"lora_rank": 4, "quantize": "nf4"}, "--quantize nf4: with --task ppo"),
    "loss": ({"cross_entropy": "chunked"}, "--cross-entropy chunked: PPO's loss takes the logits"),
    "fp16": ({"precision": "fp16"}, "--precision fp16: with --task ppo"),
    "completion": ({"completion_len": 24}, "--completion-len 24: with --seq-len 24"),
    "short": ({"seq_len": 1, "completion_len": None}, "--seq-len 1: "),
    "options of ppo": ({"task": "grpo", "num_mini_batches": 2}, "--num-mini-batches 2: is an option of --task ppo"),
    "options of ppo alone": (
        {"task": "sft", "completion_len": None, "num_iterations": None, "rollout_batch_size": 2},
        "--rollout-batch-size 2: is an option of --task ppo",
    ),
    "dora": ({"lora_rank": 4, "dora": True}, "--dora on: with --task ppo"),
    "offload": (
        {"gpus": 2, "zero": 2, "offload_optimizer": "cpu", "precision": "bf16-mixed"},
        "--offload-optimizer cpu: with --task ppo",
    ),
    "recompute op": ({"recompute": "op"}, "--recompute op: with --task ppo"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    options, message = REFUSED[name]
    with pytest.raises(memcalc.InputError) as refused:
        estimate(**options)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("bloom-7b1", "--task ppo: for a bloom is not modelled"),
        ("mixtral-8x7b", "--task ppo: for a mixtral is not modelled"),
        (LLAMA | {"attention_dropout": 0.1}, "--task ppo: for a llama whose attention_dropout is not 0"),
        (LLAMA | {"use_cache": False}, "--task ppo: for a configuration whose use_cache is off"),
        (
            LLAMA | {"model_type": "mistral", "sliding_window": 16},
            "--seq-len 24: with --task ppo for a mistral with a sliding",
        ),
    ],
)
def test_refused_models(model: Any, message: str) -> None:
    with pytest.raises(memcalc.InputError) as refused:
        memcalc.estimate(model, **SIZES)
    assert message in str(refused.value)


def test_a_plan_is_refused() -> None:
    with pytest.raises(memcalc.InputError, match="--task ppo: with memcalc plan"):
        memcalc.plan(LLAMA, gpu="h100-80gb", gpus=8, task="ppo", global_batch_size=64)
