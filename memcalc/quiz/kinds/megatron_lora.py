"""LoRA with Megatron-Bridge: an adapter's parameters on a rank, and what its first matrix keeps."""

from __future__ import annotations

from typing import Final

from memcalc.explanation.topics.megatron_lora import KEPT, PARAMETERS, TOPIC
from memcalc.explanation.words import Words
from memcalc.quiz.numbers import Draw, Setup, batch_of
from memcalc.quiz.of_cases import by_rule, exactly

_MODELS: Final = ("llama-7b", "llama-2-13b", "mistral-7b", "llama-3-8b")
_PARAMETERS: Final = Words(
    "how many parameters has the adapter of one linear_qkv on each rank? Megatron-Bridge adapts queries, keys and values as one "
    "layer and cuts both matrices.",
    "每个 rank 上一个 linear_qkv 的适配器有多少个参数？Megatron-Bridge 把 Q、K、V 作为一个层适配，并切分两个矩阵。",
)
_KEPT: Final = Words(
    "how many bytes of the norm's output does each rank keep for the adapter of one linear_qkv, with sequence parallelism and "
    "16-bit activations?",
    "使用序列并行和 16 位激活值时，每个 rank 为一个 linear_qkv 的适配器保留多少字节的归一化输出？",
)


def _adapters(draw: Draw) -> Setup:
    tp = draw.one_of((2, 4, 8))
    options = {"gpus": tp, "tp": tp, "lora_rank": draw.one_of((8, 16, 32, 64)), **batch_of(draw)}
    return Setup(model=draw.one_of(_MODELS), options=options)


KINDS: Final = (
    by_rule(TOPIC, PARAMETERS, _PARAMETERS, _adapters),
    by_rule(TOPIC, KEPT, _KEPT, _adapters),
    exactly(TOPIC, PARAMETERS, _PARAMETERS, _adapters),
    exactly(TOPIC, KEPT, _KEPT, _adapters),
)
