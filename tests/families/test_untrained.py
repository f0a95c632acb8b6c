"""Which weights get no gradient, against transformers' own backward on real tensors."""

from __future__ import annotations

from collections import Counter
from copy import deepcopy
from typing import Any

import oracle
import paper
import pytest
import torch
from cases import Case, step_cases
from records import on_record

from memcalc.families import FAMILIES

CASES = [
    case
    for family in FAMILIES
    for i, case in enumerate(step_cases(family))
    if i == 0 or paper.program_of(case.fields).untrained
]


@on_record
def without_a_gradient(fields: dict[str, Any], attention: str) -> set[str]:
    with oracle.balanced_routing():
        model = oracle.build(deepcopy(fields), attention, torch.float32)
        model(**oracle.batch_for(model.config, 1, 8, torch.float32)).loss.backward()
    return {name for name, weight in model.named_parameters() if weight.grad is None}


@pytest.mark.parametrize("case", CASES, ids=[case.id for case in CASES])
def test_weights_without_a_gradient(case: Case) -> None:
    program = paper.program_of(case.fields)
    without = without_a_gradient(case.fields, program.attention_kinds[-1])
    kinds = ((w.name, w.shape) for w in program.weights() if w.name.replace("*", str(w.layer)) in without)
    assert Counter(kinds) == program.idle
