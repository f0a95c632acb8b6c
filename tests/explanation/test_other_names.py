"""Other words that people type for a topic, in `memcalc explain` and in the quiz."""

from __future__ import annotations

import pytest
from command import here

from memcalc.explanation.topics import OTHER_NAMES, TOPICS, topic_named
from memcalc.inputs.model import model_names
from memcalc.quiz.dealt import kinds_of


def test_each_means_a_topic_and_is_no_name_of_another_thing() -> None:
    assert set(OTHER_NAMES.values()) <= set(TOPICS)
    assert not set(OTHER_NAMES) & (set(TOPICS) | set(model_names()))
    assert topic_named("MiCS") == "zero-plus-plus"
    assert topic_named("something else") == "something else"


@pytest.mark.parametrize(("word", "topic"), [("serving", "paged-attention"), ("tp-dims", "tensor-parallel-dims")])
def test_they_are_explained(word: str, topic: str, capsys: pytest.CaptureFixture[str]) -> None:
    ran = here(capsys, "explain", word, "--lang", "en")
    assert ran.status == 0
    assert ran.stdout.startswith(f"{topic}: ")


def test_they_are_asked_about() -> None:
    assert kinds_of("powersgd", 1) == kinds_of("gradient-compression", 1)
