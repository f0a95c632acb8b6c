"""Packed rows: masks of sdpa, and what the collator gives."""

from __future__ import annotations

from typing import Final

from memcalc.explanation.topics.packing import GIVEN, MASKS, TOPIC
from memcalc.explanation.words import Words
from memcalc.quiz.numbers import SMALL_LLAMAS, Draw, Setup, gigabytes
from memcalc.quiz.of_cases import by_rule, exactly
from memcalc.quiz.of_rules import Put, Room, fits, letters_of

_MASKS: Final = Words(
    "how many bytes do the additive masks take that all layers save for backward, where sequences are packed without "
    "flash-attn (sdpa), in bf16?",
    "不用 flash-attn（使用 sdpa）打包序列，bf16，所有层为反向保存的加性掩码共占多少字节？",
)
_GIVEN: Final = Words(
    "how many bytes does TRL's collator give for packed rows, besides tokens and labels? Leave out where sequences begin.",
    "打包时 TRL 的整理器除 token 和标签外还提供多少字节？不计各序列的起点。",
)


def packed(draw: Draw) -> Setup:
    """Return a model with a batch of packed rows."""
    options = {"micro_batch_size": draw.one_of((1, 2, 4)), "seq_len": draw.one_of((512, 1024, 2048))}
    return Setup(model=draw.one_of(SMALL_LLAMAS), options=options)


def _masks_in_a_gpu(draw: Draw) -> Room:
    setup = packed(draw)
    put = Put(MASKS, letters_of((MASKS,), str(setup.model), **setup.options))
    gb = gigabytes(draw, round(put.rule.value(put.numbers)))
    return Room(put, gb * 10**9, {"gb": gb})


KINDS: Final = (
    by_rule(TOPIC, MASKS, _MASKS, packed),
    by_rule(TOPIC, GIVEN, _GIVEN, packed),
    fits(
        TOPIC,
        "masks in a GPU",
        Words(
            "do the additive masks (bf16) that all layers save for backward alone fit a GPU of {gb} GB (10^9 bytes each), where "
            "sequences are packed without flash-attn (sdpa)?",
            "不用 flash-attn（使用 sdpa）打包序列时，所有层为反向保存的加性掩码（bf16）单独能放进 {gb} GB（每 GB 10^9 字节）的 "
            "GPU 吗？",
        ),
        _masks_in_a_gpu,
    ),
    exactly(TOPIC, MASKS, _MASKS, packed),
)
