"""Paged attention: the bytes of a sequence's cache, by the rule and in blocks."""

from __future__ import annotations

from typing import Final

from memcalc.explanation.topics.paged_attention import CACHED, TOPIC
from memcalc.explanation.words import Words
from memcalc.quiz.numbers import Draw, Setup
from memcalc.quiz.of_cases import by_rule, exactly

_WIDE: Final = ("llama-7b", "llama-13b", "llama-2-7b")
"""Models that have as many heads of keys and values as of queries."""
_ANY: Final = (*_WIDE, "llama-3-8b", "mistral-7b", "qwen2.5-7b")
_LENGTHS: Final = (512, 1024, 2048)
_RULE: Final = Words(
    "how many bytes do the keys and values of one sequence take in a cache in 16 bits?",
    "一个序列的键和值在 16 位缓存中占多少字节？",
)
_BLOCKS: Final = Words(
    "how many bytes do the blocks of one such sequence take in vLLM, with a cache in 16 bits?",
    "在 vLLM 中，这样一个序列的块占多少字节（16 位缓存）？",
)


def _wide(draw: Draw) -> Setup:
    return Setup(model=draw.one_of(_WIDE), options={"seq_len": draw.one_of(_LENGTHS)})


def _any(draw: Draw) -> Setup:
    return Setup(model=draw.one_of(_ANY), options={"seq_len": draw.one_of(_LENGTHS)})


KINDS: Final = (by_rule(TOPIC, CACHED, _RULE, _wide), exactly(TOPIC, CACHED, _BLOCKS, _any))
