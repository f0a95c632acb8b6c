"""LoRA: its parameters, and the model states that are left."""

from __future__ import annotations

from typing import Final

from memcalc.explanation.topics.adam import SIXTEEN
from memcalc.explanation.topics.lora import PARAMETERS, STATES, TOPIC
from memcalc.explanation.words import Words
from memcalc.quiz.numbers import Draw, Setup
from memcalc.quiz.of_cases import by_rule, exactly
from memcalc.quiz.of_rules import Put, Two, letters_of, times

_MODELS: Final = ("llama-7b", "llama-13b", "llama-2-7b", "llama-3-8b", "mistral-7b", "qwen2.5-7b")
_SQUARE: Final = ("llama-7b", "llama-13b", "llama-2-7b")
"""Models whose adapted matrices, of queries and values, are all h × h."""
_RANKS: Final = (4, 8, 16, 32, 64, 128)
_HOW_MANY: Final = Words(
    "how many parameters train with LoRA adapters on the matrices of queries and values, in all layers?",
    "在所有层的 Q 和 V 矩阵上使用 LoRA 适配器，参与训练的参数有多少？",
)
_BYTES: Final = Words(
    "how many bytes do weights, gradients and optimizer states take? The base is frozen and in 16 bits. The adapters on "
    "queries and values train with Adam in fp32.",
    "权重、梯度和优化器状态共占多少字节？底座冻结，为 16 位；Q 和 V 上的适配器以 fp32 用 Adam 训练。",
)
_LESS: Final = Words(
    "how many times the bytes of LoRA's model states are those of full fine-tuning with Adam and mixed precision? The "
    "model is {model}; LoRA trains adapters of rank {rank} on queries and values in fp32, over a base in 16 bits.",
    "使用 Adam 和混合精度全量微调时，模型状态的字节数是 LoRA 的多少倍？模型为 {model}；LoRA 在 Q 和 V 上以 fp32 训练秩为 {rank} "
    "的适配器，底座为 16 位。",
)


def _square(draw: Draw) -> Setup:
    return Setup(model=draw.one_of(_SQUARE), options={"lora_rank": draw.one_of(_RANKS)})


def _any(draw: Draw) -> Setup:
    return Setup(model=draw.one_of(_MODELS), options={"lora_rank": draw.one_of(_RANKS)})


def _full_and_lora(draw: Draw) -> Two:
    model, rank = draw.one_of(_SQUARE), draw.one_of(_RANKS)
    numbers = letters_of((STATES,), model, lora_rank=rank)
    whole = Put(SIXTEEN, {"Φ": numbers["B"]})
    return Two(whole, Put(STATES, numbers), {"model": model, "rank": rank})


KINDS: Final = (
    by_rule(TOPIC, PARAMETERS, _HOW_MANY, _square),
    by_rule(TOPIC, STATES, _BYTES, _square),
    times(TOPIC, "full fine-tuning over LoRA", _LESS, _full_and_lora),
    exactly(TOPIC, PARAMETERS, _HOW_MANY, _any),
    exactly(TOPIC, STATES, _BYTES, _any),
)
