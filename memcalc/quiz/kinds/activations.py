"""Activations: bytes that layers save for backward."""

from __future__ import annotations

from typing import Final

from memcalc.explanation.topics.activations import EAGER, FLASH, TOPIC
from memcalc.explanation.words import Words
from memcalc.quiz.numbers import GPTS, SMALL_LLAMAS, Draw, Setup, batch_of, gpts
from memcalc.quiz.of_cases import by_rule, exactly
from memcalc.quiz.of_rules import Put, Two, letters_of, times

_EAGER: Final = Words(
    "how many bytes do all layers of a GPT save for backward in 16 bits, with dropout and with the attention scores "
    "in memory? Embeddings, head and loss do not count.",
    "16 位、带 dropout、注意力分数存放在显存中时，GPT 的所有层共为反向保存多少字节？不计词嵌入、输出层和损失。",
)
_FLASH: Final = Words(
    "how many bytes do all layers of a GPT save for backward in 16 bits, with dropout and a flash attention kernel "
    "that saves no scores? Embeddings, head and loss do not count.",
    "16 位、带 dropout、使用不保存分数的 FlashAttention 时，GPT 的所有层共为反向保存多少字节？不计词嵌入、输出层和损"
    "失。",
)
_EXACT: Final = Words(
    "how many bytes do all layers together save for backward, by the end of forward? Embeddings, the last norm, "
    "head and loss do not count.",
    "到前向结束时，所有层共为反向保存多少字节？不计词嵌入、最后的归一化、输出层和损失。",
)


def _eager_and_flash(draw: Draw) -> Two:
    model = draw.one_of(GPTS)
    numbers = letters_of((EAGER,), model, seq_len=draw.one_of((512, 1024)), micro_batch_size=draw.one_of((1, 2, 4)))
    return Two(Put(EAGER, numbers), Put(FLASH, numbers))


def _megatron(draw: Draw) -> Setup:
    return Setup(model=draw.one_of(SMALL_LLAMAS), options=batch_of(draw))


KINDS: Final = (
    by_rule(TOPIC, EAGER, _EAGER, gpts),
    by_rule(TOPIC, FLASH, _FLASH, gpts),
    times(
        TOPIC,
        "scores in memory over flash attention",
        Words(
            "how many times as many bytes do the layers of a GPT save in 16 bits, with dropout, if the attention "
            "scores are in memory as with a flash attention kernel?",
            "16 位、带 dropout 的 GPT，注意力分数存放在显存中时各层保存的字节数是使用 FlashAttention 时的多少倍？",
        ),
        _eager_and_flash,
    ),
    exactly(TOPIC, EAGER, _EXACT, gpts),
    exactly(TOPIC, FLASH, _EXACT, _megatron),
)
