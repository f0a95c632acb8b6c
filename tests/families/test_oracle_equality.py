"""Each family on paper against transformers' own code: saved bytes and both peaks, to the byte."""

from __future__ import annotations

import gc
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import oracle
import paper
import pytest
import torch
from cases import Case, step_cases

from memcalc.dtypes import DType, bf16, fp32
from memcalc.families import FAMILIES

if TYPE_CHECKING:
    from collections.abc import Iterator

CASES = [case for family in FAMILIES for case in step_cases(family)]
RECOMPUTES = {False: "none", True: "full"}
DTYPES: dict[str, tuple[DType, torch.dtype]] = {"bf16": (bf16, torch.bfloat16), "fp32": (fp32, torch.float32)}


def choices(case: Case) -> Iterator[tuple[str, bool]]:
    """Attention kinds and whether to recompute, as far as transformers offers them."""
    program = paper.program_of(case.fields)
    for attention in program.attention_kinds:
        yield attention, False
        if program.recomputes:
            yield attention, True


RUNS = [
    pytest.param(case, dtype, attention, recompute, id=f"{case.id}-{dtype}-{attention}-{RECOMPUTES[recompute]}")
    for case in CASES
    for dtype in case.dtypes
    for attention, recompute in choices(case)
]


@pytest.fixture(scope="module", autouse=True)
def little_garbage() -> Iterator[None]:
    """The oracle collects garbage before each step; half a run would go into walking what torch has imported."""
    oracle.training_step(deepcopy(CASES[0].fields), micro_batch_size=1, seq_len=4)
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def bytes_above_start(step: paper.PaperStep | oracle.Step, start: int) -> tuple[int, int, int]:
    return step.saved, step.forward - start, step.backward - start


@pytest.mark.parametrize(("case", "dtype", "attention", "recompute"), RUNS)
def test_a_step_on_paper_is_the_real_one(case: Case, dtype: str, attention: str, recompute: bool) -> None:
    workload: dict[str, Any] = {"micro_batch_size": case.batch, "seq_len": case.seq}
    ours, theirs = DTYPES[dtype]
    on_paper = paper.paper_step(case.fields, dtype=ours, attention=attention, recompute=recompute, **workload)
    # torch has no fp32 grouped_mm for fake tensors; real ones are as small here.
    real = case.model_type == "mixtral" and dtype == "fp32"
    oracle_step = oracle.training_step(
        deepcopy(case.fields), dtype=theirs, attention=attention, recompute=recompute, real=real, **workload
    )
    assert bytes_above_start(on_paper, on_paper.start) == bytes_above_start(oracle_step, oracle_step.resident)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_two_cases(family: str) -> None:
    assert len({(case.batch, case.seq) for case in step_cases(family)}) >= 2
