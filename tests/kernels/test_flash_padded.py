"""flash-attn over a padded batch: transformers' own unpadding around the kernel's tensors, to the byte."""

from __future__ import annotations

from typing import Any

import pytest
from cases import step_cases
from validate.test_fake import LLAMA, MIXTRAL, QWEN3, same

import memcalc
from memcalc.kernels.flash_checks import CHECKED
from memcalc.validate.with_flash import validate

PADDED: dict[str, Any] = {
    "attention": "flash",
    "padded": True,
    "precision": "bf16",
    "micro_batch_size": 2,
    "seq_len": 32,
}
ENGINES: dict[str, dict[str, Any]] = {
    "ddp": {"engine": "ddp", "gpus": 2, "global_batch_size": 8},
    "fsdp2 and tp": {"engine": "fsdp2", "gpus": 2, "zero": 3, "precision": "bf16-mixed", "tp": 2},
    "deepspeed": {"engine": "deepspeed", "gpus": 2, "zero": 3, "precision": "bf16-mixed", "recompute": "full"},
}
MORE: dict[str, dict[str, Any]] = {
    "autocast": {"precision": "bf16-autocast"},
    "checkpoints": {"recompute": "full"},
    "per op": {"recompute": "op"},
    "adapters": {"lora_rank": 4, "recompute": "full"},
    "codes": {"lora_rank": 4, "quantize": "nf4"},
    "sft": {"task": "sft"},
    "dpo": {"task": "dpo", "lora_rank": 4},
    "kto": {"task": "kto"},
}


@pytest.mark.parametrize("model", [LLAMA, LLAMA | {"head_dim": 20}], ids=["aligned", "not aligned"])
def test_a_step(model: dict[str, Any]) -> None:
    same(validate(model, **PADDED))


@pytest.mark.slow
@pytest.mark.parametrize("engine", sorted(ENGINES))
def test_engines(engine: str) -> None:
    if engine == "deepspeed":
        pytest.importorskip("deepspeed")
    same(validate(MIXTRAL if engine == "ddp" else LLAMA if "tp" in engine else QWEN3, **PADDED | ENGINES[engine]))


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(MORE))
def test_more(name: str) -> None:
    for option, package in (("lora_rank", "peft"), ("quantize", "bitsandbytes"), ("task", "trl")):
        if option in MORE[name]:
            pytest.importorskip(package)
    if "task" in MORE[name]:
        from tasks.grpo_oracle import import_grpo

        import_grpo()
    same(validate(LLAMA, **PADDED | MORE[name]))


@pytest.mark.slow
@pytest.mark.parametrize("family", CHECKED)
def test_families(family: str) -> None:
    for case in step_cases(family)[:2]:
        workload = {"micro_batch_size": case.batch, "seq_len": case.seq}
        same(validate(dict(case.fields), **PADDED | workload))


def test_a_layer_keeps_copies_of_the_tokens_and_their_places() -> None:
    """Copies take the places of queries, keys, values and output. 8 bytes a token say where they are, 4 where each sequence
    begins; the model's mask stays, with no backward that needs it."""
    options: dict[str, Any] = {"attention": "flash", "micro_batch_size": 2, "seq_len": 128, "precision": "bf16"}
    padded, whole = (memcalc.estimate(LLAMA, padded=is_padded, **options) for is_padded in (True, False))
    layers, tokens, width = 3, 2 * 128, 6 * 24
    more = padded.total("saved_activations") - whole.total("saved_activations")
    assert more == layers * (
        8 * tokens + 4 * (2 + 1) + 2 * tokens * width
    )  # and the output between zeros, which o_proj takes


def test_the_report_says_that_all_tokens_are_counted() -> None:
    report = memcalc.estimate("llama-7b", attention="flash", padded=True, precision="bf16")
    assert any("flash-attn drops padding" in note for note in report.to_dict()["notes"])
