"""Exact numbers of the topics on schedules and on packing, from the sizes of the model alone."""

from __future__ import annotations

from typing import Any

import pytest

from memcalc.errors import InputError
from memcalc.explanation.step import Step
from memcalc.explanation.topic import sections_of
from memcalc.explanation.topics import TOPICS

LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 8, "vocab_size": 100,
    "num_attention_heads": 4, "num_key_value_heads": 4, "tie_word_embeddings": False, "max_position_embeddings": 256,
}  # fmt: skip
LAYER = 4 * 64 * 64 + 3 * 64 * 96 + 2 * 64
TABLE = 100 * 64


def exact(topic: str, title: str, **options: Any) -> Step:
    sections = sections_of(TOPICS[topic], dict(LLAMA), None, options, "en")
    (found,) = (section for section in sections if section.title.startswith(title))
    return found.steps[-1]


def test_pipedream_keeps_older_versions() -> None:
    """Three more versions of two layers and the embedding, in 16 bits."""
    assert exact("pipedream", "The first stage").result == 3 * 2 * (2 * LAYER + TABLE)
    assert exact("pipedream", "The first stage", schedule="pipedream-2bw").result == 2 * (2 * LAYER + TABLE)
    with pytest.raises(InputError, match="--schedule 1f1b: keeps one version"):
        exact("pipedream", "The first stage", schedule="1f1b")


def test_chimera_has_two_stages() -> None:
    """The first and the last stage on the first GPU: four layers, both tables, the last norm."""
    assert exact("chimera", "A GPU has").result == 4 * LAYER + 2 * TABLE + 64


@pytest.mark.parametrize(("topic", "title", "stages", "most"), [
    ("dualpipe", "p+1 micro", 4, 5), ("dualpipe", "p+1 micro", 2, 3), ("zbv", "As many", 4, 4), ("zbv", "As many", 2, 2),
])  # fmt: skip
def test_micro_batches_in_flight(topic: str, title: str, stages: int, most: int) -> None:
    assert exact(topic, title, gpus=stages, pp=stages).result == most


def test_packed_rows() -> None:
    """Eight layers, each with a mask of all pairs of 2 · 64 tokens in 2 bytes; 12 bytes a token, and two starts twice."""
    options = {"micro_batch_size": 2, "seq_len": 64}
    assert exact("packing", "With sdpa", **options).result == 8 * 2 * 128**2
    assert exact("packing", "The collator", **options).result == 12 * 128 + 2 * 4 * 3
