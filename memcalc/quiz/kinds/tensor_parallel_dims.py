"""Tensor parallelism in more dimensions: elements that a layer sends on a line, a square, squares and a cube."""

from __future__ import annotations

from typing import Final

from memcalc.explanation.topics.tensor_parallel_dims import CUBE, LINE, SQUARE, SQUARES, TOPIC
from memcalc.explanation.words import Words
from memcalc.quiz.numbers import Draw, Setup
from memcalc.quiz.of_cases import by_rule, exactly
from memcalc.quiz.of_rules import Put, Two, letters_of, times

_MODELS: Final = ("gpt2-medium", "gpt3-2.7b", "gpt3-6.7b")
"""GPTs whose heads and widths every grid here divides."""
_LINE: Final = Words(
    "how many elements does a GPU of t send for one layer and one micro-batch, forward and backward, if t GPUs cut each layer "
    "in one dimension and reduce over rings?",
    "t 张 GPU 按一维切分每层并用环形算法规约，每张 GPU 每层每个微批次（前向加反向）发送多少个元素？",
)
_SQUARE: Final = Words(
    "how many elements do the blocks have that a GPU broadcasts and reduces for one layer and one micro-batch, forward and "
    "backward, if q·q GPUs multiply by SUMMA? Each broadcast counts once. Biases and norms do not count.",
    "q·q 张 GPU 用 SUMMA 做矩阵乘法，每层每个微批次（前向加反向）广播与规约的块共有多少个元素？每次广播计一次，"
    "不计偏置和归一化。",
)
_SQUARES: Final = Words(
    "how many elements do the blocks have that a GPU broadcasts and reduces for one layer and one micro-batch, forward and "
    "backward, if D squares of q·q GPUs each multiply their part of the sequences by SUMMA? Each broadcast counts once. Biases "
    "and norms do not count.",
    "D 个 q·q 的方阵各自用 SUMMA 处理一部分序列，每层每个微批次（前向加反向）广播与规约的块共有多少个元素？"
    "每次广播计一次，不计偏置和归一化。",
)
_CUBE: Final = Words(
    "how many elements does a GPU send for one layer and one micro-batch, forward and backward, if q·q·q GPUs gather inputs "
    "and matrices and scatter outputs over rings? Biases and norms do not count.",
    "q·q·q 张 GPU 用环形算法 gather 输入和矩阵、scatter 输出，每张 GPU 每层每个微批次（前向加反向）发送多少个元素？"
    "不计偏置和归一化。",
)
_ALL: Final = Words(
    "how many elements does a GPU send over the tensor-parallel groups for one layer and one micro-batch, forward and "
    "backward? A broadcast or a reduction counts once, the others as rings.",
    "每张 GPU 每层每个微批次（前向加反向）在张量并行组上发送多少个元素？广播和 reduce 计一次，其余按环形算法。",
)


def _of(ranks: int, draw: Draw) -> Setup:
    batch = {"micro_batch_size": draw.one_of((4, 8)), "seq_len": draw.one_of((512, 1024))}
    return Setup(model=draw.one_of(_MODELS), options={"gpus": ranks, "tp": ranks, **batch})


def _four(draw: Draw) -> Setup:
    return _of(4, draw)


def _eight(draw: Draw) -> Setup:
    return _of(8, draw)


def _line_and_cube(draw: Draw) -> Two:
    batch = {"micro_batch_size": draw.one_of((16, 32)), "seq_len": draw.one_of((1024, 2048))}
    numbers = letters_of((LINE, CUBE), "gpt3-6.7b", **batch)
    return Two(Put(LINE, {**numbers, "t": 64}), Put(CUBE, {**numbers, "q": 4}))


KINDS: Final = (
    by_rule(TOPIC, LINE, _LINE, _eight),
    by_rule(TOPIC, SQUARE, _SQUARE, _four),
    by_rule(TOPIC, SQUARES, _SQUARES, _eight),
    by_rule(TOPIC, CUBE, _CUBE, _eight),
    times(
        TOPIC,
        "sent on a line over sent on a cube",
        Words(
            "how many times as many elements does a GPU send for a layer if 64 GPUs are a line as if they are a cube of 4·4·4? "
            "Rings; biases and norms do not count.",
            "64 张 GPU 排成一维时，每张 GPU 每层发送的元素数是 4·4·4 立方体时的多少倍？环形算法，不计偏置和归一化。",
        ),
        _line_and_cube,
    ),
    exactly(TOPIC, SQUARE, _ALL, _four),
    exactly(TOPIC, SQUARES, _ALL, _eight),
    exactly(TOPIC, CUBE, _ALL, _eight),
)
