"""Batch norms: parameters, and the bytes of shared statistics."""

from __future__ import annotations

from typing import Final

from memcalc.explanation.topics.batch_norm import PARAMETERS, SENT, TOPIC
from memcalc.explanation.words import Words
from memcalc.quiz.numbers import Draw, Setup
from memcalc.quiz.of_cases import exactly
from memcalc.quiz.of_rules import Put, Two, one, times

_MORE: Final = Words("over more GPUs", "GPU 更多时")
_FEWER: Final = Words("over fewer GPUs", "GPU 更少时")


def _channels(draw: Draw) -> Put:
    return Put(PARAMETERS, {"C": draw.one_of((16, 64, 128, 256, 512, 2048))})


def _sent(draw: Draw) -> Put:
    return Put(SENT, {"C": draw.one_of((64, 128, 256, 512)), "n": draw.one_of((2, 4, 8, 16, 64))})


def _ranks(draw: Draw) -> Setup:
    return Setup(options={"gpus": draw.one_of((2, 4, 8, 16, 32))})


def _more_and_fewer(draw: Draw) -> Two:
    channels, fewer = draw.one_of((64, 128, 256)), draw.one_of((2, 4, 8))
    more = fewer * draw.one_of((2, 4, 8))
    of_more, of_fewer = ({"C": channels, "n": n} for n in (more, fewer))
    return Two(Put(SENT, of_more, _MORE), Put(SENT, of_fewer, _FEWER), {"more": more, "fewer": fewer})


KINDS: Final = (
    one(TOPIC, PARAMETERS, Words("how many parameters has a batch norm?", "批归一化层有多少个参数？"), _channels),
    one(
        TOPIC,
        SENT,
        Words(
            "how many bytes do the gather of forward and the sum of backward of one SyncBatchNorm hold? Statistics are fp32; "
            "the gather counts what all ranks give.",
            "一个 SyncBatchNorm 的前向收集与反向求和共有多少字节？统计量为 fp32，收集计入所有进程给出的内容。",
        ),
        _sent,
    ),
    exactly(
        TOPIC,
        SENT,
        Words(
            "how many bytes do the collectives of all batch norms of a step hold, gathers by what all ranks give? The network "
            "has one SyncBatchNorm, over 64 channels. DDP's own collectives do not count.",
            "一步中所有批归一化的通信共有多少字节（收集计入所有进程给出的内容）？网络有一个 64 通道的 SyncBatchNorm。"
            "不计 DDP 自己的通信。",
        ),
        _ranks,
    ),
    times(
        TOPIC,
        "shared statistics of more ranks",
        Words(
            "how many times as many bytes do the gather and the sum of one SyncBatchNorm hold over {more} GPUs as over {fewer}?",
            "{more} 张 GPU 时一个 SyncBatchNorm 的收集与求和的字节数是 {fewer} 张 GPU 时的多少倍？",
        ),
        _more_and_fewer,
    ),
)
