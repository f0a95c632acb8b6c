"""QLoRA over shards: bytes of codes and scales, and what ZeRO-3's graphs keep."""

from __future__ import annotations

from typing import Final

from memcalc.explanation.topics.qlora import CODES, KEPT, SCALES, TOPIC
from memcalc.explanation.words import Words
from memcalc.quiz.numbers import LLAMAS, SMALL_LLAMAS, Draw, Setup
from memcalc.quiz.of_cases import by_rule, exactly
from memcalc.quiz.of_rules import Put, Two, both, letters_of

_CODES: Final = Words(
    "how many bytes of 4-bit codes does each GPU hold between steps, if FSDP shards them? Take every parameter of the base as "
    "quantised.",
    "若由 FSDP 切分，两步之间每张 GPU 持有多少字节的 4 位编码？视底座的每个参数都已量化。",
)
_SCALES: Final = Words(
    "how many bytes of fp32 scales, one for every 64 parameters, does each GPU hold? Nothing shards them. Take every parameter "
    "of the base as quantised.",
    "每 64 个参数有一个 fp32 缩放系数，且不被切分。每张 GPU 持有多少字节的缩放系数？视底座的每个参数都已量化。",
)
_KEPT: Final = Words(
    "how many bytes of 4-bit codes do the graphs of two steps keep on each GPU when ZeRO-3's forward ends, if the loop holds "
    "the loss until there is a new one? Take every parameter of the base as quantised.",
    "若训练循环在新损失出现之前一直持有旧损失，ZeRO-3 前向结束时，两步的计算图在每张 GPU 上共保留多少字节的 4 位编码？"
    "视底座的每个参数都已量化。",
)


def _any(draw: Draw) -> Setup:
    return Setup(model=draw.one_of(LLAMAS), options={"gpus": draw.one_of((2, 4, 8, 16, 32))})


def _small(draw: Draw) -> Setup:
    return Setup(model=draw.one_of(SMALL_LLAMAS), options={"gpus": draw.one_of((2, 4, 8, 16))})


def _codes_and_scales(draw: Draw) -> Two:
    options = {"engine": "fsdp2", "zero": 3, "gpus": draw.one_of((2, 4, 8)), "quantize": "nf4", "lora_rank": 16}
    numbers = letters_of((CODES, SCALES), draw.one_of(LLAMAS), **options)
    return Two(Put(CODES, numbers), Put(SCALES, numbers))


KINDS: Final = (
    by_rule(TOPIC, CODES, _CODES, _any),
    by_rule(TOPIC, SCALES, _SCALES, _any),
    by_rule(TOPIC, KEPT, _KEPT, _any),
    both(
        TOPIC,
        "codes and scales",
        Words(
            "how many bytes do a GPU's part of the 4-bit codes and all fp32 scales, one for every 64 parameters, take together "
            "between steps with FSDP? Take every parameter of the base as quantised.",
            "使用 FSDP 时，两步之间一张 GPU 上的 4 位编码分片与全部 fp32 缩放系数（每 64 个参数一个）共占多少字节？"
            "视底座的每个参数都已量化。",
        ),
        _codes_and_scales,
    ),
    exactly(
        TOPIC,
        SCALES,
        Words(
            "how many bytes do the scales of the base in nf4 and its tables of 16 codes, one for each quantised weight, take on "
            "each GPU? Embeddings, head and norms are not quantised.",
            "nf4 底座的缩放系数，加上每个量化权重的 16 项编码表，在每张 GPU 上共占多少字节？词嵌入、输出层和归一化层不量化。",
        ),
        _small,
    ),
)
