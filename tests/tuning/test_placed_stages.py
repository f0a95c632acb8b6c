"""Frozen weights and adapters where stages lie in a V or both ways, against torch's stages and peft: every phase's peak and
everything sent, byte for byte."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import placed_stages_oracle
import pytest
import torch
from pipelining.test_placed_stages import Case, both
from stages_compared import counted, phases, real_phases, said
from steps_compared import flops_of

import memcalc
from memcalc.pipelining.schedules import placement_of
from memcalc.setup.setup import Setup
from memcalc.validate.tuning import tune

LORA: dict[str, Any] = {"lora_rank": 4}
CASES: dict[str, tuple[Case, dict[str, Any]]] = {
    "zbv, first": (Case("zbv", 2, 0, 4), LORA),
    "zbv, last": (Case("zbv", 2, 1, 9), {"freeze": "all-but:norms"}),
    "dualpipev, last": (Case("dualpipev", 2, 1, 5), LORA | {"lora_targets": "all-linear"}),
    "dualpipev, first": (Case("dualpipev", 2, 0, 4), {"freeze": "embeddings,first:1"}),
    "dapple, first": (Case("dapple", 3, 0, 2, zero=3), {"freeze": "embeddings,first:1"}),
    "naive, last": (Case("naive", 2, 1, 5), LORA),
    "chimera, first": (Case("chimera", 2, 0, 4), {"freeze": "all-but:attention"}),
    "dualpipe, first": (Case("dualpipe", 2, 0, 4), LORA),
}


@pytest.mark.parametrize("name", [next(iter(CASES)), *(pytest.param(n, marks=pytest.mark.slow) for n in [*CASES][1:])])
def test_a_step(name: str) -> None:
    pytest.importorskip("peft")
    case, trained = CASES[name]
    build, estimates = placed_stages_oracle.build, list[memcalc.Report]()
    estimate = memcalc.estimate

    def estimated(*args: Any, **options: Any) -> memcalc.Report:
        estimates.append(estimate(*args, **options))
        return estimates[-1]

    def tuned(config: Any, attention: str, dtype: torch.dtype) -> Any:
        setup: Setup = estimates[-1].setup
        return tune(build(config, attention, dtype), setup, estimates[-1].model.program)

    with patch.object(memcalc, "estimate", estimated), patch.object(placed_stages_oracle, "build", tuned):
        report, real = both(case, **trained)
    assert phases(report) == real_phases(real)
    ours = said(report)
    if placement_of(case.schedule) == "both ways":  # the sum over both copies is not torch's
        ours = ours - type(ours)({key: n for key, n in ours.items() if key[1] == "all_reduce"})
    assert ours == counted(real)
    assert flops_of(report) == real.flops
