"""Paged attention: the bytes of a sequence's cache, by the rule and in blocks, and what a reservation wastes."""

from __future__ import annotations

from typing import Final

from memcalc.explanation.topics.paged_attention import CACHED, TOPIC
from memcalc.explanation.words import Words
from memcalc.quiz.numbers import Draw, Setup
from memcalc.quiz.of_cases import by_rule, exactly
from memcalc.quiz.of_rules import Put, Two, less, letters_of

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
_RESERVED: Final = Words("reserved", "预留")
_USED: Final = Words("used", "已用")


def _wide(draw: Draw) -> Setup:
    return Setup(model=draw.one_of(_WIDE), options={"seq_len": draw.one_of(_LENGTHS)})


def _any(draw: Draw) -> Setup:
    return Setup(model=draw.one_of(_ANY), options={"seq_len": draw.one_of(_LENGTHS)})


def _reserved_and_used(draw: Draw) -> Two:
    whole, used = draw.one_of((2048, 4096)), draw.one_of((100, 256, 500, 1000))
    dims = letters_of((CACHED,), draw.one_of(_WIDE), seq_len=whole)
    reserved, filled = Put(CACHED, dims, _RESERVED), Put(CACHED, {**dims, "s": used}, _USED)
    return Two(reserved, filled, {"whole": whole, "used": used})


KINDS: Final = (
    by_rule(TOPIC, CACHED, _RULE, _wide),
    less(
        TOPIC,
        "reserved less used",
        Words(
            "without blocks, a serving engine reserves the 16-bit cache of a sequence at its greatest length of {whole} tokens. "
            "How many bytes of that stay unused by a sequence of {used} tokens?",
            "不分块时，推理引擎按最大长度 {whole} 个 token 为每个序列预留 16 位缓存。一个 {used} 个 token 的序列"
            "有多少字节未用到？",
        ),
        _reserved_and_used,
    ),
    exactly(TOPIC, CACHED, _BLOCKS, _any),
)
