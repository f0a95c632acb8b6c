"""The ring all-reduce: bytes sent, with and without a ring."""

from __future__ import annotations

from typing import Final

from memcalc.explanation.topics.ddp import ALL_REDUCE
from memcalc.explanation.topics.ring_allreduce import NAIVE, TOPIC
from memcalc.explanation.words import Words
from memcalc.quiz.numbers import SMALL_LLAMAS, Draw, Setup, parameters, sharded_models
from memcalc.quiz.of_cases import by_rule, exactly
from memcalc.quiz.of_rules import Put, Two, times

_MORE: Final = Words("over more GPUs", "GPU 更多时")
_FEWER: Final = Words("over fewer GPUs", "GPU 更少时")


def _naive_and_ring(draw: Draw) -> Two:
    numbers = {"Φ": parameters(draw), "n": draw.one_of((4, 8, 16, 32, 64, 128))}
    return Two(Put(NAIVE, numbers), Put(ALL_REDUCE, numbers))


def _more_and_fewer(draw: Draw) -> Two:
    phi, fewer, factor = parameters(draw), draw.one_of((2, 4, 8)), draw.one_of((8, 16, 64))
    more = fewer * factor
    said = {"more": more, "fewer": fewer}
    return Two(Put(ALL_REDUCE, {"Φ": phi, "n": more}, _MORE), Put(ALL_REDUCE, {"Φ": phi, "n": fewer}, _FEWER), said)


def _small(draw: Draw) -> Setup:
    return Setup(model=draw.one_of(SMALL_LLAMAS), options={"gpus": draw.one_of((2, 4, 8, 16, 64))})


KINDS: Final = (
    by_rule(
        TOPIC,
        ALL_REDUCE,
        Words(
            "how many bytes does each GPU send in a ring all-reduce of the 16-bit gradients of a model?",
            "对模型的 16 位梯度做一次环形 all-reduce，每张 GPU 发送多少字节？",
        ),
        sharded_models,
    ),
    by_rule(
        TOPIC,
        NAIVE,
        Words(
            "how many bytes does each GPU send without a ring, if it sends all of its 16-bit gradients to every "
            "other GPU?",
            "如果不用环，每张 GPU 把自己的全部 16 位梯度发给其他每张 GPU，每张 GPU 发送多少字节？",
        ),
        sharded_models,
    ),
    times(
        TOPIC,
        "without a ring over with one",
        Words(
            "how many times as many bytes does a GPU send if it sends its gradients to every other GPU as with a "
            "ring all-reduce?",
            "每张 GPU 把梯度发给其他每张 GPU 时的发送量，是环形 all-reduce 的多少倍？",
        ),
        _naive_and_ring,
    ),
    times(
        TOPIC,
        "more GPUs over fewer",
        Words(
            "how many times as many bytes does each GPU send in a ring all-reduce over {more} GPUs as over {fewer}? "
            "The gradients are the same.",
            "梯度相同，{more} 张 GPU 的环形 all-reduce 中每张 GPU 的发送量是 {fewer} 张 GPU 时的多少倍？",
        ),
        _more_and_fewer,
    ),
    exactly(
        TOPIC,
        ALL_REDUCE,
        Words(
            "how many bytes does each GPU send in a step, buffers of the modules included? Gradients are 16 bits, and "
            "all-reduces are rings.",
            "每张 GPU 每步发送多少字节（含模块的缓冲区）？梯度为 16 位，all-reduce 用环形算法。",
        ),
        _small,
    ),
)
