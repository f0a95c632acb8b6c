"""PipeDream: the bytes of older versions of the weights."""

from __future__ import annotations

from typing import Final

from memcalc.explanation.topics.pipedream import OLDER, TOPIC
from memcalc.explanation.words import Words
from memcalc.quiz.numbers import OF_32_LAYERS, Draw, Setup, gigabytes
from memcalc.quiz.of_cases import by_rule, exactly
from memcalc.quiz.of_rules import Put, Room, fits, letters_of

_ASKS: Final = Words(
    "how many bytes do the older versions of the weights take on the first stage under PipeDream, in 16 bits, besides the "
    "newest version? Every stage has one GPU.",
    "使用 PipeDream，第一个阶段除最新版本外的旧版本权重（16 位）占多少字节？每个阶段一张 GPU。",
)


def stages(draw: Draw) -> Setup:
    """Return a model over some stages of one GPU each."""
    pp = draw.one_of((2, 4, 8))
    return Setup(model=draw.one_of(OF_32_LAYERS), options={"gpus": pp, "pp": pp, "global_batch_size": 2 * pp})


def _older_in_a_gpu(draw: Draw) -> Room:
    setup = stages(draw)
    put = Put(OLDER, letters_of((OLDER,), str(setup.model), **setup.options))
    gb = gigabytes(draw, round(put.rule.value(put.numbers)))
    return Room(put, gb * 10**9, {"gb": gb})


KINDS: Final = (
    by_rule(TOPIC, OLDER, _ASKS, stages),
    fits(
        TOPIC,
        "older versions in a GPU",
        Words(
            "do the older versions of the weights (16 bits) of PipeDream's first stage alone fit a GPU of {gb} GB (10^9 bytes "
            "each)? Every stage has one GPU.",
            "PipeDream 第一个阶段的旧版本权重（16 位）单独能放进 {gb} GB（每 GB 10^9 字节）的 GPU 吗？每个阶段一张 GPU。",
        ),
        _older_in_a_gpu,
    ),
    exactly(TOPIC, OLDER, _ASKS, stages),
)
