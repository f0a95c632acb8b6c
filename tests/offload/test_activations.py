"""`--offload-activations cpu` against TRL's own OffloadActivations: every number of a step, and every copy, to the byte."""

from __future__ import annotations

from typing import Any

import pytest
from cases import step_cases
from offload.activations_oracle import validate
from validate.test_fake import LLAMA, same

from memcalc.core.dims import numel
from memcalc.tasks.offload_activations_checks import MOVED

BF16: dict[str, Any] = {"precision": "bf16"}


def step(model: dict[str, Any], **options: Any) -> None:
    compared, copies = validate(model, **options)
    same(compared)
    copied = compared.report.rank.profiles[0].run.copied
    assert sorted((numel(c.shape)[0] * c.dtype.itemsize, c.back) for c in copied) == sorted(map(tuple, copies))


@pytest.mark.parametrize(
    "options",
    [
        BF16,
        {"precision": "fp32"},
        {"precision": "bf16-autocast"},
        BF16 | {"recompute": "full"},
        BF16 | {"attention": "eager"},
        BF16 | {"padded": True},
        BF16 | {"seq_len": 4, "micro_batch_size": 1},
        BF16 | {"seq_len": 300},
        BF16 | {"lora_rank": 4},
        BF16 | {"lora_rank": 4, "recompute": "full"},
        BF16 | {"task": "sft"},
        BF16 | {"task": "sft", "recompute": "full", "lora_rank": 4},
        BF16 | {"engine": "ddp", "gpus": 2, "global_batch_size": 8},
    ],
    ids=str,
)
def test_a_step(options: dict[str, Any]) -> None:
    step(LLAMA, **{"micro_batch_size": 2, "seq_len": 32} | options)


@pytest.mark.parametrize("family", MOVED)
def test_families(family: str) -> None:
    case = step_cases(family)[0]
    step(case.fields, micro_batch_size=case.batch, seq_len=4 * case.seq, **BF16)
