"""Packed rows against transformers' and TRL's own code: every number of a step, to the byte."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cases import step_cases
from kernels.packed_oracle import validate
from validate.test_fake import LLAMA, QWEN3, same

import memcalc
from memcalc.errors import InputError
from memcalc.inputs.lengths import lengths_of
from memcalc.tasks.packing_checks import CHECKED

BF16: dict[str, Any] = {"precision": "bf16"}


def step(model: dict[str, Any], options: dict[str, Any]) -> None:
    same(validate(model, **{"micro_batch_size": 2, "seq_len": 32} | options))


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        BF16,
        BF16 | {"micro_batch_size": 1},
        {"precision": "bf16-mixed", "global_batch_size": 6},
        {"precision": "bf16-autocast"},
        BF16 | {"recompute": "full"},
        BF16 | {"attention": "sdpa"},
        {"precision": "fp32", "attention": "sdpa", "micro_batch_size": 1},
        BF16 | {"attention": "sdpa", "recompute": "full", "micro_batch_size": 3},
    ],
    ids=str,
)
@pytest.mark.parametrize("task", ["pretrain", "sft"])
def test_a_step(task: str, options: dict[str, Any]) -> None:
    step(LLAMA, {"task": task} | options)


@pytest.mark.slow
@pytest.mark.parametrize("family", CHECKED)
def test_families(family: str) -> None:
    """Sizes as the tests of families have them: heads that are no multiple of 8 are copied."""
    case = step_cases(family)[0]
    same(validate(case.fields, micro_batch_size=case.batch, seq_len=case.seq, **BF16))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mistral", "olmo3", "qwen2", "gemma"])
def test_masks_of_families(family: str) -> None:
    """Layers with a window have a mask of their own."""
    for case in step_cases(family)[:2]:
        same(validate(case.fields, micro_batch_size=case.batch, seq_len=case.seq, attention="sdpa", **BF16))


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        BF16 | {"lora_rank": 4},
        BF16 | {"lora_rank": 4, "quantize": "nf4", "task": "sft", "recompute": "full"},
        BF16 | {"engine": "ddp", "gpus": 2},
        {"engine": "fsdp2", "gpus": 2},
        {"engine": "fsdp2", "gpus": 2, "recompute": "full", "attention": "sdpa"},
        {"engine": "deepspeed", "gpus": 2, "zero": 2, "task": "sft"},
        {"engine": "deepspeed", "gpus": 2, "zero": 3},
    ],
    ids=str,
)
def test_engines_and_adapters(options: dict[str, Any]) -> None:
    step(LLAMA, options)


def test_grouped_heads() -> None:
    step(QWEN3, BF16)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"task": "sft"}, {"task": "sft", "recompute": "full"}], ids=str)
@pytest.mark.parametrize("length", [8, 16])
def test_several_sequences_in_a_row(length: int, options: dict[str, Any]) -> None:
    step(LLAMA, BF16 | {"lengths": f"{length}:1"} | options)


def test_scores_are_those_of_each_sequence() -> None:
    """Of a token in a sequence of 8 or 24, which are as many, 20 keys in the mean over tokens: (8² + 24²)/(8 + 24)."""

    def attention(**options: Any) -> int:
        report = memcalc.estimate(LLAMA, packing=True, seq_len=32, **BF16 | options)
        return sum(one.flops for one in report.computed if one.kind == "attention" and one.phase == "forward")

    assert attention() == 3 * 2 * 2 * 6 * 32 * 32 * 24
    assert attention(lengths="8:1,24:1") == 3 * 2 * 2 * 6 * 32 * 20 * 24


def test_lengths_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "lengths.txt").write_text("8\n24\n24\n", encoding="utf-8")
    assert lengths_of(str(tmp_path / "lengths.txt")) == lengths_of("8:1,24:2") == lengths_of("8:0.5+24:1")


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"precision": "fp32"}, "--packing on: flash-attn takes 16 bits"),
        ({"attention": "eager"}, "--attention eager: with --packing"),
        ({"padded": True}, "--padded on: packed rows have no padding"),
        ({"task": "dpo"}, "--packing on: TRL's trainer of dpo packs nothing"),
        ({"engine": "fsdp2", "gpus": 2, "tp": 2}, "--packing on: with --tp 2"),
        ({"lengths": "4096:1"}, "--lengths 4096:1: a sequence of 4096 tokens is longer than a row"),
        ({"lengths": "8:1", "attention": "sdpa"}, "--lengths 8:1: with sdpa"),
        ({"lengths": "8:1", "packing": False}, "--lengths 8:1: without --packing"),
        *(
            ({"lengths": text}, f"--lengths {text}: allowed: ")
            for text in ("8", "8:0", "0:1", "8:x", "8:1:1", "8:nan", "-8:1")
        ),
    ],
)
def test_what_is_refused(options: dict[str, Any], why: str) -> None:
    with pytest.raises(InputError) as refused:
        memcalc.estimate("llama-7b", **{"packing": True, "seq_len": 2048} | options)
    assert why in str(refused.value)
