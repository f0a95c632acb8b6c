"""The key/value cache: its bytes, and the whole of inference by a rule."""

from __future__ import annotations

from typing import Final

from memcalc.explanation.topics.kv_cache import ALL, GROUPED, TOPIC, WIDE
from memcalc.explanation.words import Words
from memcalc.quiz.numbers import GROUPED as GROUPED_MODELS
from memcalc.quiz.numbers import SMALL_LLAMAS, Draw, Setup, batch_of, plain_models
from memcalc.quiz.of_cases import by_rule, exactly
from memcalc.quiz.of_rules import Put, Two, letters_of, times

_OLD: Final = ("llama-7b", "llama-13b", "llama-30b", "llama-65b", "llama-2-7b")
"""Models that have as many heads of keys and values as of queries."""
_CACHED: Final = Words(
    "how many bytes do the keys and values of all tokens take in a cache in 16 bits?",
    "所有 token 的键和值在 16 位缓存中共占多少字节？",
)
_AS_WIDE: Final = Words(
    "how many bytes do the keys and values of all tokens take in a cache in 16 bits, each as wide as the hidden size?",
    "键和值都与隐藏维度同宽时，所有 token 的键和值在 16 位缓存中共占多少字节？",
)
_ALL: Final = Words(
    "how many bytes does inference with 16-bit weights take, everything included?",
    "使用 16 位权重的推理总共占多少字节？",
)


def _wide(draw: Draw) -> Setup:
    return Setup(model=draw.one_of(_OLD), options=batch_of(draw))


def _grouped(draw: Draw) -> Setup:
    return Setup(model=draw.one_of(GROUPED_MODELS), options=batch_of(draw))


def _small(draw: Draw) -> Setup:
    return Setup(model=draw.one_of(SMALL_LLAMAS), options=batch_of(draw))


def _wide_and_grouped(draw: Draw) -> Two:
    numbers = letters_of((WIDE, GROUPED), draw.one_of(GROUPED_MODELS), **batch_of(draw))
    return Two(Put(WIDE, numbers), Put(GROUPED, numbers))


KINDS: Final = (
    by_rule(TOPIC, WIDE, _AS_WIDE, _wide),
    by_rule(TOPIC, GROUPED, _CACHED, _grouped),
    by_rule(TOPIC, ALL, _ALL, plain_models),
    times(
        TOPIC,
        "a head for each query over grouped heads",
        Words(
            "how many times as many bytes would the cache take if keys and values had the hidden size, as with a key-value "
            "head for every query head, as it takes with this model's key-value heads?",
            "若键和值都是隐藏维度大小（每个查询头各有一个 KV 头），缓存是该模型分组 KV 头时的多少倍？",
        ),
        _wide_and_grouped,
    ),
    exactly(
        TOPIC,
        WIDE,
        Words(
            "how many bytes does the bf16 cache take after the prefill of one micro-batch of prompts?",
            "对一个微批次的提示做完预填充之后，bf16 缓存占多少字节？",
        ),
        _small,
    ),
)
