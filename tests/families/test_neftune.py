"""`--neftune-alpha` against transformers' own hook: every number of a step, to the byte."""

from __future__ import annotations

from typing import Any

import pytest
from cases import step_cases
from tasks.trl_oracle import import_trl
from validate.test_fake import LLAMA, same

import memcalc
from memcalc.errors import InputError
from memcalc.families import FAMILIES
from memcalc.tasks.neftune_checks import NOT_NOISY
from memcalc.validate import run

BF16: dict[str, Any] = {"precision": "bf16"}
ALBERT = {
    "model_type": "albert", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 72,
    "vocab_size": 70, "embedding_size": 16, "architectures": ["AlbertForMaskedLM"],
}  # fmt: skip
"""A type that is traced."""


def step(model: dict[str, Any], **options: Any) -> None:
    import_trl()
    same(run.validate(model, neftune_alpha=5, **options))


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        BF16,
        {"precision": "bf16-autocast"},
        BF16 | {"recompute": "full", "seq_len": 600},
        BF16 | {"lora_rank": 4, "recompute": "full"},
        BF16 | {"lora_rank": 4, "task": "sft"},
        {"engine": "fsdp2", "gpus": 2},
        {"engine": "fsdp2", "gpus": 2, "lora_rank": 4, "recompute": "full"},
        {"engine": "deepspeed", "gpus": 2, "zero": 2},
        {"engine": "deepspeed", "gpus": 2, "zero": 3},
        {"engine": "deepspeed", "gpus": 2, "zero": 3, "lora_rank": 4, "recompute": "full"},
        BF16 | {"engine": "ddp", "gpus": 2},
    ],
    ids=str,
)
def test_a_step(options: dict[str, Any]) -> None:
    step(LLAMA, **{"micro_batch_size": 2, "seq_len": 32} | options)


@pytest.mark.slow
@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in NOT_NOISY])
def test_families(family: str) -> None:
    case = step_cases(family)[0]
    step(case.fields, micro_batch_size=case.batch, seq_len=case.seq, **BF16)


def test_embeddings_noise_and_sum_are_alive_at_once() -> None:
    """With one layer recomputed and a small vocabulary, and no loss of its own, nothing of forward is larger than three of them
    before the first layer; the sum is what the first layer's input is."""
    options: dict[str, Any] = BF16 | {"seq_len": 64, "recompute": "full"}
    plain, noisy = (memcalc.estimate(LLAMA, neftune_alpha=alpha, **options) for alpha in (None, 5.0))
    assert noisy.total("saved_activations") == plain.total("saved_activations")
    assert noisy.phases["step"] == plain.phases["step"]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"neftune_alpha": 0}, "--neftune-alpha 0: allowed: a number above 0"),
        ({"neftune_alpha": 5, "task": "dpo"}, "--neftune-alpha 5: with --task dpo"),
        ({"neftune_alpha": 5, "model": ALBERT}, "--neftune-alpha 5: for a albert"),
        ({"neftune_alpha": 5, "model": "resnet-50"}, "--neftune-alpha 5: for a resnet"),
        ({"neftune_alpha": 5, "engine": "megatron"}, "--neftune-alpha 5: with engine megatron"),
    ],
)
def test_what_is_refused(options: dict[str, Any], why: str) -> None:
    with pytest.raises(InputError) as refused:
        memcalc.estimate(**{"model": "llama-7b"} | options)
    assert why in str(refused.value)
