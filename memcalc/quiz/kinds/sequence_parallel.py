"""Sequence parallelism: bytes saved, elements sent."""

from __future__ import annotations

from typing import Final

from memcalc.explanation.topics import tensor_parallel
from memcalc.explanation.topics.sequence_parallel import SAVED, SENDS, TOPIC
from memcalc.explanation.words import Words
from memcalc.quiz.numbers import LLAMAS, Draw, Setup, batch_of
from memcalc.quiz.of_cases import by_rule, exactly
from memcalc.quiz.of_rules import Put, Two, letters_of, times

_SENT: Final = Words(
    "how many elements does a GPU send over the tensor-parallel axis for one layer and one micro-batch, forward and "
    "backward, with sequence parallelism? Each all-gather and each reduce-scatter of b·s·h counts as b·s·h (without "
    "the factor (t-1)/t), and nothing is gathered a second time.",
    "使用序列并行，每张 GPU 每层每个微批次（前向加反向）在张量并行轴上发送多少个元素？每次 b·s·h 的 all-gather 和 "
    "reduce-scatter 各按 b·s·h 计（不计系数 (t-1)/t），没有重复的收集。",
)


def _node(draw: Draw) -> Setup:
    tp = draw.one_of((2, 4, 8))
    models = ("llama-7b", "llama-2-7b", "llama-3-8b", "mistral-7b", "qwen3-8b", "llama-2-70b", "llama-3-70b")
    return Setup(model=draw.one_of(models), options={"gpus": tp, "tp": tp, **batch_of(draw)})


def _without_and_with(draw: Draw) -> Two:
    tp = draw.one_of((2, 4, 8))
    numbers = letters_of((SAVED,), draw.one_of(LLAMAS), **batch_of(draw)) | {"t": tp}
    return Two(Put(tensor_parallel.SAVED, numbers), Put(SAVED, numbers), {"t": tp})


KINDS: Final = (
    by_rule(
        TOPIC,
        SAVED,
        Words(
            "how many bytes do all layers of a GPT save for backward on each GPU, with tensor and sequence "
            "parallelism? 16 bits, dropout, flash attention. Embeddings, head and loss do not count.",
            "同时使用张量并行和序列并行，每张 GPU 上 GPT 的所有层共为反向保存多少字节？16 位、带 dropout、"
            "FlashAttention。不计词嵌入、输出层和损失。",
        ),
        _node,
    ),
    by_rule(TOPIC, SENDS, _SENT, _node),
    times(
        TOPIC,
        "saved without over with",
        Words(
            "with {t} tensor-parallel GPUs, how many times as many bytes of activations do the layers of a GPT save "
            "without sequence parallelism as with it? 16 bits, dropout, flash attention.",
            "{t} 路张量并行下，不用序列并行时 GPT 各层保存的激活值是使用时的多少倍？16 位、带 dropout、"
            "FlashAttention。",
        ),
        _without_and_with,
    ),
    exactly(
        TOPIC,
        SAVED,
        Words(
            "how many bytes do all layers save for backward on each GPU? Embeddings, the last norm, head and loss "
            "do not count.",
            "每张 GPU 上所有层共为反向保存多少字节？不计词嵌入、最后的归一化、输出层和损失。",
        ),
        _node,
    ),
    exactly(
        TOPIC,
        SENDS,
        Words(
            "how many elements does a GPU send over the tensor-parallel axis for one layer and one micro-batch, "
            "forward and backward, by rings?",
            "使用环形算法，每张 GPU 每层每个微批次（前向加反向）在张量并行轴上发送多少个元素？",
        ),
        _node,
    ),
)
