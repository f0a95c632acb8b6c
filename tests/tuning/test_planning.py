"""Bounds of the planner for models of which a part trains, over layouts that share layers and stages."""

from __future__ import annotations

from typing import Any

import pytest
from planning.test_search import SMALL, every_layout

from memcalc.planning.evaluation import Evaluator
from memcalc.planning.plan import base_of
from memcalc.planning.search import outside_of
from memcalc.tasks.tasked import tasked

QUESTION: dict[str, Any] = {
    "gpus": 4,
    "engine": "fsdp2",
    "global_batch_size": 16,
    "seq_len": 1024,
    "precision": "bf16-mixed",
}
TRAINED: list[dict[str, Any]] = [
    {"lora_rank": 8},
    {"freeze": "embeddings,first:4"},
    {"freeze": "last:4"},
    {"freeze": "all-but:head"},
]


@pytest.mark.slow
@pytest.mark.parametrize("trained", TRAINED, ids=str)
def test_no_bound_is_above_the_exact_number(trained: dict[str, Any]) -> None:
    found, layouts, fixed = every_layout(SMALL, QUESTION | trained)
    base = base_of(fixed, found.model)
    evaluator = Evaluator(tasked(found.model, base), base, fixed)
    valid = [layout for layout in layouts if not evaluator.refusal(layout)]
    assert any(layout.pp > 1 for layout in valid)
    assert any(layout.tp > 1 for layout in valid)
    for layout in valid[:: max(1, len(valid) // 25)]:
        exact = evaluator.exact(layout)
        if exact.why_not:
            continue
        for bound in (evaluator.floor(layout), evaluator.probed(layout), evaluator.sent(layout)):
            assert bound.nbytes + outside_of(layout) <= exact.nbytes, layout
            assert not exact.fits or bound.seconds <= exact.seconds, layout


def test_weights_beside_codes_have_16_bits_in_the_bound() -> None:
    """Embeddings and head of a quantised base are bf16, though FSDP2's shards of what trains are fp32."""
    question = {
        "gpus": 1,
        "engine": "fsdp2",
        "zero": 2,
        "global_batch_size": 1,
        "seq_len": 128,
        "precision": "bf16-mixed",
    }
    tuned = {"lora_rank": 8, "quantize": "nf4", "recompute": "full"}
    found, layouts, fixed = every_layout("llama-3-8b", question | tuned, "rtx3060")
    base = base_of(fixed, found.model)
    evaluator = Evaluator(tasked(found.model, base), base, fixed)
    (layout,) = [one for one in layouts if not evaluator.refusal(one)]
    exact = evaluator.exact(layout)
    assert exact.fits and evaluator.floor(layout).nbytes + outside_of(layout) <= exact.nbytes


@pytest.mark.parametrize(("trained", "itemsize"), [({"lora_rank": 8}, 2), ({"lora_rank": 8, "quantize": "nf4"}, 0.5)])
def test_the_bound_of_the_states_has_the_frozen_weights(trained: dict[str, Any], itemsize: float) -> None:
    """A rank of DDP has all of them, and one of ZeRO-3 its share; at the bottom of both is the size that is stored."""
    found, layouts, fixed = every_layout("llama-7b", {"gpus": 4, "global_batch_size": 16, "seq_len": 1024} | trained)
    base = base_of(fixed, found.model)
    evaluator = Evaluator(tasked(found.model, base), base, fixed)
    linear = 32 * (4 * 4096**2 + 3 * 4096 * 11008)
    seen: set[str] = set()
    for layout in layouts:
        if (
            layout.dp == 4
            and (layout.engine, layout.zero) in (("ddp", 0), ("deepspeed", 3))
            and not evaluator.refusal(layout)
        ):
            least = evaluator.floor(layout).nbytes
            assert least > itemsize * linear / (4 if layout.zero == 3 else 1)
            assert least + outside_of(layout) <= evaluator.exact(layout).nbytes
            seen.add(layout.engine)
    assert seen == {"ddp", "deepspeed"}
