"""Optimizers other than DeepSpeed's FusedAdam under its ZeRO: peaks and what is reserved, against its own engine."""

from __future__ import annotations

from typing import Any

import pytest
from deepspeed_cases import DEEP, GPT2, LLAMA, SMALL_SETS, rank_played
from deepspeed_events import played, recorded
from validated import measure

import memcalc
from memcalc.device.allocator import CachingAllocator
from memcalc.device.replay import replayed
from memcalc.device.shown import Workspaces

OPTIMIZERS = (
    {"optimizer": "sgd-momentum"},
    {"optimizer": "lion"},
    {"optimizer": "adafactor"},
    {"optimizer": "adafactor", "optimizer_implementation": "for-loop"},
    {"optimizer": "adamw", "optimizer_implementation": "foreach"},
    {"optimizer": "adam", "optimizer_implementation": "for-loop"},
)
CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (LLAMA, {"zero": 1, "gpus": 7, "reduce_bucket_size": 2 * 10**7}),
    (GPT2, {"zero": 2, "gpus": 2, "recompute": "full", "seq_len": 16}),
    (GPT2, {"zero": 2, "gpus": 8, "precision": "fp32", "global_batch_size": 16}),
    (DEEP, {"zero": 3, "gpus": 2, "recompute": "full", "seq_len": 16, **SMALL_SETS}),
    (LLAMA, {"zero": 3, "gpus": 3, "precision": "fp32"}),
]
"""In those of few tokens the step is the peak."""


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: "-".join(o.values()))
@pytest.mark.parametrize(("config", "options"), CASES, ids=str)
def test_peaks_and_what_is_reserved(config: Any, options: dict[str, Any], optimizer: dict[str, str]) -> None:
    report = memcalc.estimate(config, engine="deepspeed", **{"seq_len": 512, **options, **optimizer})
    real = measure(report)
    assert report.phases == {"forward": real.forward, "backward": real.backward, "step": real.step}
    assert report.total("optimizer_states") == real.optimizer_states
    run = replayed(report.rank, report.setup, CachingAllocator(), Workspaces((), ()))
    assert run is not None and run.steady
    assert run.reserved == played(recorded(report, rank_played(report), run.steps)).most_reserved
