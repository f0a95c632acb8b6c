"""Checkpoints that re-enter, as trainers' files ask for them and as trainers decide whatever the files say."""

from __future__ import annotations

from typing import Any

import pytest

import memcalc
from memcalc.estimation.emitted import emit

LLAMA = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 4,
         "vocab_size": 100}  # fmt: skip
ARGS: dict[str, Any] = {"per_device_train_batch_size": 1, "bf16": True, "gradient_checkpointing": True}
AXOLOTL: dict[str, Any] = {
    "base_model": "meta-llama/Llama-2-7b-hf", "micro_batch_size": 1, "sequence_len": 64, "gradient_checkpointing": True,
    "datasets": [{"path": "some/data", "type": "alpaca"}], "adapter": "lora", "lora_r": 8, "lora_target_linear": True,
    "bf16": True,
}  # fmt: skip
FACTORY: dict[str, Any] = {"stage": "sft", "finetuning_type": "lora", "lora_rank": 8, "cutoff_len": 64, "bf16": True,
                           "template": "llama2", "dataset": "alpaca"}  # fmt: skip
TRL: dict[str, Any] = {**ARGS, "max_length": 64, "packing": False, "use_peft": True, "lora_r": 8, "dtype": "bfloat16"}
ZERO_3 = {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}


def reenters(content: dict[str, Any], **options: Any) -> bool:
    report = memcalc.estimate(LLAMA, **{"seq_len": 64, "training_args": content} | options)
    return report.to_dict()["setup"]["reentrant_checkpoints"]


def kwargs(**values: Any) -> dict[str, Any]:
    return {"gradient_checkpointing_kwargs": values}


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (ARGS, False),
        (ARGS | kwargs(use_reentrant=True), True),
        (ARGS | kwargs(use_reentrant=False), False),
        (ARGS | {"gradient_checkpointing_kwargs": '{"use_reentrant": true}'}, True),
        (ARGS | {"gradient_checkpointing_kwargs": {}}, False),  # as good as none (transformers/trainer.py)
        (ARGS | kwargs(every_n_layers=1), False),
        (ARGS | kwargs(preserve_rng_state=False), True),  # torch's own default
        (ARGS | kwargs(use_reentrant=True) | {"gradient_checkpointing": False}, False),
        (TRL, False),
        (AXOLOTL, True),
        (AXOLOTL | kwargs(use_reentrant=False), False),
        (AXOLOTL | {"gradient_checkpointing": False}, False),
        (AXOLOTL | {"rl": "dpo"}, False),
        (FACTORY, True),
        (FACTORY | {"use_reentrant_gc": False}, False),
        (FACTORY | {"disable_gradient_checkpointing": True}, False),
    ],
)
def test_files(content: dict[str, Any], expected: bool) -> None:
    assert reenters(content) is expected


def test_trl_has_them_with_adapters_under_zero_3() -> None:
    """trl/trainer/sft_trainer.py: is_peft_model, zero_stage == 3 and gradient_checkpointing."""
    sharded: dict[str, Any] = {"deepspeed": ZERO_3, "gpus": 2, "engine": "deepspeed"}
    for given in ({}, kwargs(use_reentrant=False)):
        report = memcalc.estimate(LLAMA, training_args=TRL | given, seq_len=64, **sharded)
        assert report.setup.reentrant_checkpoints
        assert any("TRL's trainers let checkpoints of adapters" in note for note in report.to_dict()["notes"])
    assert not reenters(TRL | {"use_peft": False}, **sharded)
    assert not reenters(TRL | {"gradient_checkpointing": False}, **sharded)
    assert not reenters(TRL, **sharded | {"deepspeed": ZERO_3 | {"zero_optimization": {"stage": 2}}})
    assert not reenters(TRL, reentrant_checkpoints=False, **sharded)
    assert not reenters(ARGS | {"lora_r": 8, "use_peft": True}, **sharded)  # the Trainer's own


def test_llama_factory_has_none_with_fsdp2() -> None:
    assert not reenters(FACTORY, engine="fsdp2", gpus=2)


def test_what_is_given_wins() -> None:
    file = ARGS | kwargs(use_reentrant=True)
    assert not reenters(file, reentrant_checkpoints=False)
    assert not reenters(file, recompute="none")


def test_where_they_are_not_modelled_a_note_says_so() -> None:
    file = ARGS | kwargs(use_reentrant=True)
    report = memcalc.estimate(
        LLAMA, training_args=file | {"max_grad_norm": 0}, seq_len=64, gpus=2, tp=2, engine="fsdp2"
    )
    assert not report.setup.reentrant_checkpoints
    assert any(
        "use_reentrant: checkpoints are counted as those that do not re-enter" in note
        for note in report.to_dict()["notes"]
    )


def test_training_arguments_say_them() -> None:
    options: dict[str, Any] = {"recompute": "full", "reentrant_checkpoints": True, "precision": "bf16-autocast"}
    written = emit("training-args", LLAMA, seq_len=64, **options)
    assert "use_reentrant: true" in written.text and "reentrant_checkpoints" not in written.unsaid
    sharded = emit(
        "training-args", LLAMA, seq_len=64, **options | {"precision": "bf16-mixed", "engine": "fsdp2", "gpus": 2}
    )
    assert "reentrant_checkpoints" in sharded.unsaid  # FSDP's own recomputation does not re-enter
