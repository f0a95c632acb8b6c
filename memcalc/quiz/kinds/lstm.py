"""LSTMs: parameters."""

from __future__ import annotations

from typing import Final

from memcalc.explanation.topics.lstm import PARAMETERS, TOPIC
from memcalc.explanation.words import Words
from memcalc.quiz.numbers import Draw, Setup
from memcalc.quiz.of_cases import exactly
from memcalc.quiz.of_rules import Put, Two, one, times

_WIDE: Final = Words("with more hidden units", "隐藏单元更多时")
_NARROW: Final = Words("with fewer hidden units", "隐藏单元更少时")


def _sizes(draw: Draw) -> Put:
    return Put(
        PARAMETERS, {"E": draw.one_of((64, 100, 128, 256, 300, 650)), "H": draw.one_of((64, 128, 200, 256, 512, 1024))}
    )


def _lengths(draw: Draw) -> Setup:
    """Draw the length of a sequence, which does not matter."""
    return Setup(options={"seq_len": draw.one_of((8, 16, 35))})


def _wide_and_narrow(draw: Draw) -> Two:
    features, hidden = draw.one_of((64, 128, 300)), draw.one_of((64, 128, 256))
    wide, narrow = ({"E": features, "H": h} for h in (2 * hidden, hidden))
    return Two(Put(PARAMETERS, wide, _WIDE), Put(PARAMETERS, narrow, _NARROW), {"wide": 2 * hidden, "narrow": hidden})


KINDS: Final = (
    one(
        TOPIC,
        PARAMETERS,
        Words(
            "how many parameters has an LSTM of one layer and one direction in torch, which has two biases for each gate?",
            "torch 中单层单向的 LSTM 有多少个参数？每个门有两个偏置。",
        ),
        _sizes,
    ),
    exactly(
        TOPIC,
        PARAMETERS,
        Words(
            "how many parameters has torch's LSTM of 256 hidden units in a language model that embeds tokens in 128 features?",
            "语言模型把 token 嵌入为 128 个特征，其中 torch 的 LSTM 有 256 个隐藏单元，这个 LSTM 有多少个参数？",
        ),
        _lengths,
    ),
    times(
        TOPIC,
        "twice the hidden units",
        Words(
            "how many times as many parameters has an LSTM of {wide} hidden units as one of {narrow}? Both read the same "
            "features, and have two biases for each gate.",
            "读取相同特征、每个门两个偏置时，{wide} 个隐藏单元的 LSTM 的参数量是 {narrow} 个隐藏单元的多少倍？",
        ),
        _wide_and_narrow,
    ),
)
