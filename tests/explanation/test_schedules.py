"""The schedules of a pipeline side by side."""

from __future__ import annotations

import pytest

import memcalc
from memcalc.explanation.schedules import in_flight
from memcalc.explanation.topic import sections_of
from memcalc.explanation.topics import TOPICS


@pytest.mark.parametrize(
    ("schedule", "pp", "most"),
    [
        ("gpipe", 4, 16),  # all of a step
        ("1f1b", 4, 4),  # p
        ("naive", 4, 1),
        ("chimera", 4, 4),  # Li and Hoefler 2021, table 2: up to p
        ("dualpipe", 4, 5),  # the README's table: p + 1
        ("dualpipev", 4, 4.5),  # p + 1 of p stages that each rank has two halves of: (2p + 1) / 2
        ("zbv", 4, 4),  # as 1F1B
    ],
)
def test_the_micro_batches_in_flight(schedule: str, pp: int, most: float) -> None:
    setup = memcalc.estimate(
        "llama-7b",
        engine="fsdp2",
        zero=2,
        gpus=pp,
        pp=pp,
        schedule=schedule,
        global_batch_size=16,
        seq_len=64,
        pp_rank=0,
    ).setup
    assert in_flight(setup) == most


def test_what_does_not_go_says_why() -> None:
    words = " ".join(
        sections_of(TOPICS["bubble"], "llama-7b", None, {"pp": 3, "gpus": 3, "global_batch_size": 3}, "en")[-1].text
    )
    assert "--schedule dualpipe" in words
