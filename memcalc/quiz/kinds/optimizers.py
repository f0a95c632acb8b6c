"""Optimizers: bytes that each keeps."""

from __future__ import annotations

from typing import Final

from memcalc.explanation.topics.adam import FP32
from memcalc.explanation.topics.optimizers import ADAFACTOR, EIGHT_BIT, MOMENTUM, SGD, TOPIC
from memcalc.explanation.words import Words
from memcalc.quiz.numbers import SMALL_LLAMAS, Draw, Setup, parameters, sizes
from memcalc.quiz.of_cases import by_rule, exactly
from memcalc.quiz.of_rules import Put, Two, less, times


def _asks(en: str, zh: str) -> Words:
    return Words(
        f"how many bytes do weights, gradients and optimizer states take with {en}, if weights and gradients are fp32? "
        "Activations do not count.",
        f"权重和梯度为 fp32，优化器为{zh}，权重、梯度和优化器状态共占多少字节？不计激活值。",
    )


_SGD: Final = _asks("plain SGD (no momentum)", "普通 SGD（无动量）")
_MOMENTUM: Final = _asks("SGD with momentum", "带动量的 SGD")
_ADAM: Final = _asks("Adam", " Adam")
_EIGHT_BIT: Final = _asks("8-bit Adam", " 8 位 Adam")
_ADAFACTOR: Final = _asks("Adafactor", " Adafactor")


def _adam_and_sgd(draw: Draw) -> Two:
    numbers = {"Φ": parameters(draw)}
    return Two(Put(FP32, numbers), Put(SGD, numbers))


def _adam_and_another(draw: Draw) -> Two:
    numbers = {"Φ": parameters(draw)}
    rule, name = draw.one_of(((MOMENTUM, "sgd-momentum"), (EIGHT_BIT, "adamw-8bit"), (ADAFACTOR, "adafactor")))
    return Two(Put(FP32, numbers), Put(rule, numbers), {"other": name})


def _model(draw: Draw) -> Setup:
    return Setup(model=draw.one_of(SMALL_LLAMAS))


KINDS: Final = (
    by_rule(TOPIC, SGD, _SGD, sizes),
    by_rule(TOPIC, MOMENTUM, _MOMENTUM, sizes),
    by_rule(TOPIC, FP32, _ADAM, sizes),
    by_rule(TOPIC, EIGHT_BIT, _EIGHT_BIT, sizes),
    by_rule(TOPIC, ADAFACTOR, _ADAFACTOR, _model),
    times(
        TOPIC,
        "Adam over SGD",
        Words(
            "how many times as many bytes do weights, gradients and optimizer states take with Adam as with plain "
            "SGD (no momentum), everything in fp32?",
            "全部采用 fp32，使用 Adam 时权重、梯度和优化器状态的总字节数是普通 SGD（无动量）的多少倍？",
        ),
        _adam_and_sgd,
    ),
    less(
        TOPIC,
        "Adam less another",
        Words(
            "how many bytes does a change of the optimizer from Adam (fp32 moments) to {other} save? Weights and "
            "gradients are fp32.",
            "把优化器从 Adam（fp32 矩）换成 {other} 能省多少字节？权重和梯度为 fp32。",
        ),
        _adam_and_another,
    ),
    exactly(TOPIC, MOMENTUM, _MOMENTUM, _model),
    exactly(TOPIC, EIGHT_BIT, _EIGHT_BIT, _model),
    exactly(TOPIC, ADAFACTOR, _ADAFACTOR, _model),
)
