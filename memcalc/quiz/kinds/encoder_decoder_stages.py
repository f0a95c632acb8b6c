"""Encoder and decoder: how unequal their layers are."""

from __future__ import annotations

from typing import Final

from memcalc.explanation.topics.encoder_decoder_stages import ACTIVATIONS, TOPIC, WEIGHTS
from memcalc.explanation.words import Words
from memcalc.quiz.numbers import Draw, Setup
from memcalc.quiz.of_cases import by_rule
from memcalc.quiz.of_rules import Put, Two, times


def _t5(draw: Draw) -> Setup:
    return Setup(model=draw.one_of(("t5-small", "t5-base", "t5-large")))


def _activations_and_weights(_draw: Draw) -> Two:
    return Two(Put(ACTIVATIONS, {}), Put(WEIGHTS, {}))


KINDS: Final = (
    by_rule(
        TOPIC,
        WEIGHTS,
        Words(
            "how many times as many weights does a layer of a decoder with cross-attention have as a layer of the "
            "encoder? Each attention has four matrices of h × h, the MLP two, and is 4h wide.",
            "带交叉注意力的解码器层的权重是编码器层的多少倍？每个注意力有四个 h × h 的矩阵，MLP 有两个矩阵，宽度 4h。",
        ),
        _t5,
    ),
    by_rule(
        TOPIC,
        ACTIVATIONS,
        Words(
            "how many times as many activations does a layer of a decoder with cross-attention save as a layer of "
            "the encoder? In units of s·b·h bytes an attention saves 11, an MLP 19 and a norm 2; both have "
            "sequences of the same length, and no scores are saved.",
            "带交叉注意力的解码器层保存的激活值是编码器层的多少倍？以 s·b·h 字节为单位，注意力保存 11，MLP 保存 19，"
            "每个归一化 2；两者序列长度相同，不保存注意力分数。",
        ),
        _t5,
    ),
    times(
        TOPIC,
        "activations over weights",
        Words(
            "a decoder layer exceeds an encoder layer both in activations and in weights. What is the ratio "
            "(decoder over encoder) of the activations, divided by the ratio of the weights? Weights: attention "
            "4h², MLP 8h². Activations in units of s·b·h bytes: attention 11, MLP 19, a norm 2. A decoder layer has "
            "two attentions, three norms and one MLP.",
            "解码器层的激活值和权重都多于编码器层。激活值之比（解码器/编码器）除以权重之比等于多少？权重：注意力 "
            "4h²，MLP 8h²。激活值以 s·b·h 字节为单位：注意力 11，MLP 19，每个归一化 2。解码器层有两个注意力、三个归"
            "一化和一个 MLP。",
        ),
        _activations_and_weights,
    ),
)
