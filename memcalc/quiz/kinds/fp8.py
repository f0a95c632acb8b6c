"""Products in fp8: copies of the weights, and the input that a layer keeps."""

from __future__ import annotations

from typing import Final

from memcalc.explanation.topics.fp8 import KEPT, TOPIC, WEIGHTS
from memcalc.explanation.words import Words
from memcalc.quiz.numbers import Draw, Setup, batch_of
from memcalc.quiz.of_cases import by_rule, exactly

_MODELS: Final = ("llama-7b", "llama-2-13b", "mistral-7b", "llama-3-8b")
_WEIGHTS: Final = Words(
    "how many bytes of weights in fp8 are beside those of 16 bits, if linear layers multiply in fp8 on a Hopper GPU, with one "
    "scale for each tensor?",
    "在 Hopper GPU 上线性层用 fp8 相乘、每个张量一个缩放因子时，16 位权重之外还有多少字节的 fp8 权重？",
)
_KEPT: Final = Words(
    "how many bytes of its input does one linear_qkv keep for backward, if it multiplies in fp8 with one scale for each tensor?",
    "一个 linear_qkv 用 fp8 相乘、每个张量一个缩放因子时，为反向传播保留多少字节的输入？",
)


def _model(draw: Draw) -> Setup:
    return Setup(model=draw.one_of(_MODELS), options=batch_of(draw))


KINDS: Final = (
    by_rule(TOPIC, WEIGHTS, _WEIGHTS, _model),
    by_rule(TOPIC, KEPT, _KEPT, _model),
    exactly(TOPIC, WEIGHTS, _WEIGHTS, _model),
    exactly(TOPIC, KEPT, _KEPT, _model),
)
