"""Tensor parallelism: elements sent, weights of a layer, bytes saved."""

from __future__ import annotations

from typing import Final

from memcalc.explanation.topics.activations import FLASH
from memcalc.explanation.topics.tensor_parallel import ALL_REDUCES, DTENSOR, SAVED, TOPIC, WEIGHTS
from memcalc.explanation.words import Words
from memcalc.quiz.numbers import LLAMAS, SMALL_LLAMAS, Draw, Setup, batch_of
from memcalc.quiz.of_cases import by_rule, exactly
from memcalc.quiz.of_rules import Put, Two, letters_of, times

_SENT: Final = Words(
    "how many elements does a GPU send over the tensor-parallel axis for one layer and one micro-batch, forward and "
    "backward, if every all-reduce of b·s·h is counted as 2·b·s·h (without the factor (t-1)/t of a ring)?",
    "每张 GPU 每层每个微批次（前向加反向）在张量并行轴上发送多少个元素？每次 b·s·h 的 all-reduce 按 2·b·s·h 计（不计"
    "环形算法的系数 (t-1)/t）。",
)
_RING: Final = Words(
    "how many elements does a GPU send over the tensor-parallel axis for one layer and one micro-batch, forward and "
    "backward, by rings?",
    "使用环形算法，每张 GPU 每层每个微批次（前向加反向）在张量并行轴上发送多少个元素？",
)
_LAYERS: Final = Words(
    "how many bytes do all layers save for backward on each GPU? Embeddings, the last norm, head and loss do not "
    "count.",
    "每张 GPU 上所有层共为反向保存多少字节？不计词嵌入、最后的归一化、输出层和损失。",
)


def _node(draw: Draw) -> Setup:
    tp = draw.one_of((2, 4, 8))
    models = ("llama-7b", "llama-2-7b", "llama-3-8b", "mistral-7b", "qwen3-8b", "llama-2-70b", "llama-3-70b")
    return Setup(model=draw.one_of(models), options={"gpus": tp, "tp": tp, **batch_of(draw)})


def _activations_against_weights(draw: Draw) -> Two:
    numbers = letters_of((ALL_REDUCES, WEIGHTS), draw.one_of(SMALL_LLAMAS), **batch_of(draw))
    return Two(Put(ALL_REDUCES, numbers), Put(WEIGHTS, numbers))


def _one_and_split(draw: Draw) -> Two:
    tp = draw.one_of((2, 4, 8))
    numbers = letters_of((SAVED,), draw.one_of(LLAMAS), **batch_of(draw)) | {"t": tp}
    return Two(Put(FLASH, numbers), Put(SAVED, numbers), {"t": tp})


KINDS: Final = (
    by_rule(TOPIC, ALL_REDUCES, _SENT, _node),
    by_rule(
        TOPIC,
        WEIGHTS,
        Words(
            "how many parameters does a layer have, if attention has four matrices of h × h, and the MLP is gated "
            "and 4h wide?",
            "若注意力有四个 h × h 的矩阵，MLP 为门控、宽度 4h，一层有多少参数？",
        ),
        _node,
    ),
    by_rule(
        TOPIC,
        SAVED,
        Words(
            "how many bytes do all layers of a GPT save for backward on each GPU, with tensor parallelism, but "
            "without sequence parallelism? 16 bits, dropout, flash attention. Embeddings, head and loss do not "
            "count.",
            "使用张量并行但不用序列并行，每张 GPU 上 GPT 的所有层共为反向保存多少字节？16 位、带 dropout、"
            "FlashAttention。不计词嵌入、输出层和损失。",
        ),
        _node,
    ),
    times(
        TOPIC,
        "activations sent over weights",
        Words(
            "how many times as many elements does tensor parallelism send for a layer and micro-batch (each "
            "all-reduce counted twice, no factor (t-1)/t) as a layer with a gated MLP of width 4h has parameters?",
            "每层每个微批次，张量并行发送的元素数（每次 all-reduce 计两倍，不计系数 (t-1)/t）是该层参数量（门控 "
            "MLP，宽度 4h）的多少倍？",
        ),
        _activations_against_weights,
    ),
    times(
        TOPIC,
        "saved on one GPU over saved on t",
        Words(
            "how many times as many bytes of activations do the layers of a GPT save on one GPU alone as on each of "
            "{t} tensor-parallel GPUs without sequence parallelism? 16 bits, dropout, flash attention.",
            "单卡上 GPT 各层保存的激活值是 {t} 路张量并行（不用序列并行）时每张 GPU 的多少倍？16 位、带 dropout、"
            "FlashAttention。",
        ),
        _one_and_split,
    ),
    exactly(TOPIC, ALL_REDUCES, _RING, _node),
    exactly(TOPIC, DTENSOR, _RING, _node),
    exactly(
        TOPIC,
        WEIGHTS,
        Words("how many parameters does one layer of the whole model have?", "整个模型的一层有多少参数？"),
        _node,
    ),
    exactly(TOPIC, SAVED, _LAYERS, _node),
)
