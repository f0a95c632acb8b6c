"""Liger's kernels by their parts, and its loss over logits: against Liger-Kernel's own Python, every number of a step to
the byte."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
from cases import step_cases
from kernels.liger_oracle import validate
from kernels.test_tuned import FAMILIES, FREEZE, LORA, WHOLE, WORKLOAD, named
from validate.test_fake import LLAMA, same

import memcalc
from memcalc.errors import InputError
from memcalc.kernels.liger_parts import parts_of
from memcalc.report.title import setup_line

PARTS = ("rope", "rms_norm", "swiglu")
BF16: dict[str, Any] = {"precision": "bf16"}


@pytest.mark.parametrize("parts", [one for count in (1, 2) for one in combinations(PARTS, count)], ids="+".join)
def test_parts(parts: tuple[str, ...]) -> None:
    same(validate(LLAMA, liger="+".join(parts), cross_entropy="eager", **BF16, **WORKLOAD))


@pytest.mark.parametrize(
    ("part", "options"),
    [
        ("rope", BF16),
        ("rms_norm", {"precision": "fp32", "recompute": "full"}),
        ("swiglu", BF16 | LORA),
        ("rms_norm", {"engine": "fsdp2", "gpus": 4}),
        ("swiglu", {"engine": "deepspeed", "gpus": 4, "zero": 3, "param_persistence_threshold": 100}),
    ],
)
def test_a_part_with_the_fused_loss(part: str, options: dict[str, Any]) -> None:
    same(validate(LLAMA, liger=part, **WORKLOAD, **options))


@pytest.mark.parametrize(("family", "part"), [(family, part) for family in FAMILIES for part in parts_of(family)])
def test_families(family: str, part: str) -> None:
    case = step_cases(family)[0]
    same(validate(case.fields, liger=part, micro_batch_size=case.batch, seq_len=case.seq, **BF16))


@pytest.mark.parametrize("tuned", [WHOLE, FREEZE, {"freeze": "head,norms"}, LORA], ids=named)
@pytest.mark.parametrize(
    "options",
    [BF16, {"precision": "fp32"}, BF16 | {"recompute": "full"}, BF16 | {"kernels": "fused"}, BF16 | {"padded": True}],
    ids=named,
)
def test_the_loss_over_logits(options: dict[str, Any], tuned: dict[str, Any]) -> None:
    same(validate(LLAMA, cross_entropy="liger", **WORKLOAD, **options, **tuned))


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "mistral"])
def test_the_loss_of_families(family: str) -> None:
    case = step_cases(family)[0]
    same(validate(case.fields, cross_entropy="liger", micro_batch_size=case.batch, seq_len=case.seq, **BF16))


@pytest.mark.parametrize(
    "engine",
    [
        {"engine": "ddp"},
        {"engine": "fsdp2"},
        {"engine": "deepspeed", "zero": 1, "precision": "fp16-mixed"},
        {"engine": "deepspeed", "zero": 2},
        {"engine": "deepspeed", "zero": 3, "param_persistence_threshold": 100},
    ],
    ids=named,
)
def test_the_loss_on_engines(engine: dict[str, Any]) -> None:
    same(validate(LLAMA, cross_entropy="liger", gpus=4, **WORKLOAD, **engine))


def test_what_the_loss_keeps() -> None:
    """The fp32 logits, whose gradient is written over them, where torch keeps them and their log-probabilities; torch keeps the
    labels, padded by one, and a weight besides."""
    tokens, vocab = 4096, 128256
    options: dict[str, Any] = {"precision": "bf16", "seq_len": tokens}
    eager, own = (memcalc.estimate("llama-3-8b", **options, cross_entropy=loss) for loss in ("eager", "liger"))
    kept = [report.total("saved_activations") for report in (eager, own)]
    assert kept[0] - kept[1] == 8 * (tokens + 1) + 4
    assert eager.phases["backward"] - own.phases["backward"] >= 4 * tokens * vocab


def test_all_parts_are_the_default() -> None:
    setups = [
        memcalc.estimate("llama-7b", seq_len=64, **options).setup
        for options in ({"kernels": "fused"}, {"liger": "swiglu,rope,rms-norm"}, {"liger": "rms_norm + rope+swiglu"})
    ]
    assert setups[0] == setups[1] == setups[2]
    assert setups[0].liger == "rope,rms_norm,swiglu"
    assert memcalc.estimate("llama-7b", seq_len=64).setup.liger is None


def test_the_title_names_parts_that_are_not_all() -> None:
    assert "fused kernels (rope)" in setup_line(memcalc.estimate("llama-7b", seq_len=64, liger="rope"))
    assert "fused kernels ·" in setup_line(memcalc.estimate("llama-7b", seq_len=64, kernels="fused"))


@pytest.mark.parametrize(
    ("model", "options", "why"),
    [
        ("llama-7b", {"liger": "rope,geglu"}, "llama has no part geglu; allowed: rope, rms_norm, swiglu"),
        ("llama-7b", {"liger": "rope,,swiglu"}, "llama has no part ''"),
        (
            "llama-7b",
            {"liger": "rope", "kernels": "hf"},
            "with kernels hf none of them runs; allowed: with --kernels fused",
        ),
        ("llama-7b", {"liger": "rope", "recompute": "op"}, "with kernels fused is not modelled"),
        ("llama-7b", {"liger": "rope", "engine": "megatron"}, "engine megatron has its own kernels"),
        ("gpt2", {"liger": "rope"}, "Liger-Kernel leaves gpt2 as it is"),
        ("mistral-7b", {"cross_entropy": "liger"}, "for mistral; allowed: eager, fused, chunked, flash"),
    ],
)
def test_what_is_refused(model: str, options: dict[str, Any], why: str) -> None:
    with pytest.raises(InputError, match=r"--(liger|kernels|cross-entropy|recompute)") as refused:
        memcalc.estimate(model, **options)
    assert why in str(refused.value)
