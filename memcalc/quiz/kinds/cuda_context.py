"""The CUDA context: what it takes, and what it leaves."""

from __future__ import annotations

from typing import Final

from memcalc.explanation.step import Step
from memcalc.explanation.topics.cuda_context import CONTEXT, TOPIC
from memcalc.explanation.words import Words
from memcalc.quiz.numbers import Draw
from memcalc.quiz.of_rules import Put, question
from memcalc.quiz.question import Kind, Question
from memcalc.units import to_bytes

_SHARE: Final = Words(
    "a CUDA context takes 1343 MiB (2^20 bytes each) of a V100 with {room} GiB (2^30 bytes each). How many bytes "
    "does it leave for torch and everything else?",
    "在有 {room} GiB（1 GiB = 2^30 字节）显存的 V100 上，CUDA 上下文占 1343 MiB（1 MiB = 2^20 字节）。还剩多少字节"
    "给 torch 和其他部分？",
)
_NAME: Final = "memory that the context leaves"
_MEMORY: Final = Words("memory of the GPU", "GPU 显存")
_LEFT: Final = Words("left", "剩余")


def _left(draw: Draw, language: str) -> Question:
    room = draw.one_of((16, 32))
    context = Put(CONTEXT, {}).step(language)
    memory = Step(_MEMORY.said(language), "", "", to_bytes(room, "GiB"), "bytes")
    left = Step(
        _LEFT.said(language), "a - b", f"{memory.result} - {context.result}", memory.result - context.result, "bytes"
    )
    asks = _SHARE.said(language, room=room)
    return question(TOPIC, _NAME, asks, (Put(CONTEXT, {}),), (memory, context, left), left.result, "bytes", language)


KINDS: Final = (Kind(TOPIC.name, 2, _NAME, _left),)
