"""Recomputation: bytes that stay, and FLOPs that it costs."""

from __future__ import annotations

from typing import Final

from memcalc.explanation.topics.activations import EAGER
from memcalc.explanation.topics.recompute import FOUR_THIRDS, FULL, SAVING, TOPIC
from memcalc.explanation.words import Words
from memcalc.quiz.numbers import GPTS, Draw, gpts, plain_models
from memcalc.quiz.of_cases import by_rule, exactly
from memcalc.quiz.of_rules import Put, Two, less, letters_of

_KEPT: Final = Words(
    "how many bytes do all layers keep from forward to backward with full recomputation, if only the 16-bit input "
    "of each layer is kept?",
    "完全重计算时只保留每层的 16 位输入。从前向到反向，所有层共保留多少字节？",
)


def _saved(draw: Draw) -> Two:
    numbers = letters_of(
        (EAGER,), draw.one_of(GPTS), seq_len=draw.one_of((512, 1024)), micro_batch_size=draw.one_of((1, 2, 4, 8))
    )
    return Two(Put(EAGER, numbers), Put(FULL, numbers))


KINDS: Final = (
    by_rule(TOPIC, FULL, _KEPT, plain_models),
    by_rule(
        TOPIC,
        FOUR_THIRDS,
        Words(
            "how many times the FLOPs of a step does full recomputation need?",
            "使用完全重计算后，一步的 FLOP 是原来的多少倍？",
        ),
        plain_models,
    ),
    by_rule(
        TOPIC,
        SAVING,
        Words(
            'what share of a GPT layer\'s saved activations is left with full recomputation ("3%" or "1/30")? '
            "The scores of attention were in memory before, and dropout is on.",
            "使用完全重计算后，GPT 层保存的激活值还剩多大比例（如“3%”或“1/30”）？原来注意力分数存放在显存中，且有 "
            "dropout。",
        ),
        gpts,
    ),
    less(
        TOPIC,
        "bytes that full recomputation saves",
        Words(
            "how many bytes of the layers' activations does full recomputation save at the end of forward? The "
            "model is a GPT in 16 bits with dropout, the attention scores were in memory, and the input of each "
            "layer stays.",
            "到前向结束时，完全重计算能为各层省下多少字节的激活值？模型为带 dropout 的 16 位 GPT，原来注意力分数存放"
            "在显存中，每层的输入仍保留。",
        ),
        _saved,
    ),
    exactly(
        TOPIC,
        FOUR_THIRDS,
        Words(
            "how many times the matrix-product FLOPs of a step without recomputation does full recomputation need?",
            "使用完全重计算时，一步的矩阵乘法 FLOP 是不用重计算时的多少倍？",
        ),
        plain_models,
    ),
    exactly(
        TOPIC,
        SAVING,
        Words(
            'what share of the activations that the layers save for backward is left with full recomputation ("3%" or '
            '"1/30")?',
            "使用完全重计算后，各层为反向保存的激活值还剩多大比例（如“3%”或“1/30”）？",
        ),
        plain_models,
    ),
)
