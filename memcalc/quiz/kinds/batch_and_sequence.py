"""Batch and sequence: how many times the activations are."""

from __future__ import annotations

from typing import Final

from memcalc.explanation.topic import Rule
from memcalc.explanation.topics.activations import EAGER
from memcalc.explanation.topics.activations import FLASH as SAVED
from memcalc.explanation.topics.batch_and_sequence import BATCH, FLASH, SEQUENCE, TOPIC
from memcalc.explanation.words import Words
from memcalc.quiz.numbers import GPTS, LLAMAS, Draw, Setup, plain_models
from memcalc.quiz.of_cases import by_rule, exactly
from memcalc.quiz.of_rules import Pairs, Put, Two, letters_of, times


def _sequence(draw: Draw) -> Setup:
    return Setup(model=draw.one_of(GPTS), options={"seq_len": draw.one_of((256, 512)), "micro_batch_size": 1})


def _model(draw: Draw) -> Setup:
    return Setup(model=draw.one_of(LLAMAS), options={"micro_batch_size": draw.one_of((1, 2, 4))})


def _grown(rule: Rule) -> Pairs:
    def drawn(draw: Draw) -> Two:
        model, factor, longer = draw.one_of(GPTS), draw.one_of((2, 3, 4)), draw.one_of((2, 4))
        seq = 1024 // longer
        before = letters_of((rule,), model, seq_len=seq, micro_batch_size=2)
        after = letters_of((rule,), model, seq_len=seq * longer, micro_batch_size=2 * factor)
        said = {"batch": factor, "longer": longer, "b": 2, "s": seq}
        return Two(Put(rule, after, _AFTER), Put(rule, before, _BEFORE), said)

    return drawn


_AFTER: Final = Words("after", "之后")
_BEFORE: Final = Words("before", "之前")

KINDS: Final = (
    by_rule(
        TOPIC,
        BATCH,
        Words(
            "how many times as many activations do the layers save if the micro-batch is twice as large?",
            "微批次加倍时，各层保存的激活值变为多少倍？",
        ),
        plain_models,
    ),
    by_rule(
        TOPIC,
        SEQUENCE,
        Words(
            "how many times as many activations do the layers of a GPT save if the sequence is twice as long as the "
            "one given here? The attention scores are in memory, precision is 16 bits, and dropout is on.",
            "序列长度变为所给长度的两倍时，GPT 各层保存的激活值变为多少倍？注意力分数存放在显存中，16 位精度，带 "
            "dropout。",
        ),
        _sequence,
    ),
    by_rule(
        TOPIC,
        FLASH,
        Words(
            "how many times as many activations do the layers save if the sequence is twice as long and a fused "
            "attention kernel saves no scores?",
            "序列长度加倍、融合注意力核不保存分数时，各层保存的激活值变为多少倍？",
        ),
        plain_models,
    ),
    times(
        TOPIC,
        "batch and sequence, scores in memory",
        Words(
            "how many times as many activations do the layers of a GPT save if the micro-batch grows {batch} times "
            "from {b} sequences, and the sequence {longer} times from {s} tokens? The attention scores are in "
            "memory, precision is 16 bits, and dropout is on.",
            "微批次由 {b} 个序列增大到 {batch} 倍，序列由 {s} 个 token 增长到 {longer} 倍，GPT 各层保存的激活值变为多少"
            "倍？注意力分数存放在显存中，16 位精度，带 dropout。",
        ),
        _grown(EAGER),
    ),
    times(
        TOPIC,
        "batch and sequence, flash attention",
        Words(
            "how many times as many activations do the layers of a GPT save if the micro-batch grows {batch} times "
            "from {b} sequences, and the sequence {longer} times from {s} tokens? A flash attention kernel saves no "
            "scores.",
            "微批次由 {b} 个序列增大到 {batch} 倍，序列由 {s} 个 token 增长到 {longer} 倍，GPT 各层保存的激活值变为多少倍？"
            "FlashAttention 不保存分数。",
        ),
        _grown(SAVED),
    ),
    exactly(
        TOPIC,
        SEQUENCE,
        Words(
            "how many times as many bytes do the layers save for backward if the sequence is twice as long as here?",
            "序列长度变为此处的两倍时，各层为反向保存的字节数变为多少倍？",
        ),
        _model,
    ),
)
