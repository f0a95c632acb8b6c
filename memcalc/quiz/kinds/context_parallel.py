"""Context parallelism: keys and values that are passed, the share of activations."""

from __future__ import annotations

from typing import Final

from memcalc.explanation.topics.context_parallel import PASSED, SAVED, TOPIC
from memcalc.explanation.words import Words
from memcalc.quiz.numbers import GROUPED, Draw, Setup
from memcalc.quiz.of_cases import by_rule, exactly
from memcalc.quiz.of_rules import Put, Two, letters_of, times


def _ring(draw: Draw) -> Setup:
    cp = draw.one_of((2, 4, 8))
    models = ("llama-7b", "llama-2-7b", "llama-3-8b", "mistral-7b", "llama-3-70b")
    return Setup(model=draw.one_of(models), options={"gpus": cp, "cp": cp, "seq_len": draw.one_of((2048, 4096))})


def _all_heads_and_grouped(draw: Draw) -> Two:
    cp = draw.one_of((2, 4, 8))
    seq = draw.one_of((2048, 4096))
    grouped = letters_of((PASSED,), draw.one_of(GROUPED), seq_len=seq) | {"c": cp}
    heads = draw.one_of((16, 32, 64))
    said = {"heads": heads, "few": grouped["k"]}
    return Two(Put(PASSED, grouped | {"k": heads}, _ALL), Put(PASSED, grouped, _GROUPED), said)


_ALL: Final = Words("as many key-value heads as heads", "KV 头数等于注意力头数")
_GROUPED: Final = Words("grouped key-value heads", "分组 KV 头")

KINDS: Final = (
    by_rule(
        TOPIC,
        PASSED,
        Words(
            "how many elements of keys, values and their gradients does a GPU send for one layer and one "
            "micro-batch with ring attention? Forward passes keys and values of all other ranks on once; backward "
            "sends twice what forward sends.",
            "使用环形注意力，每张 GPU 每层每个微批次发送多少个 K、V 及其梯度的元素？前向把其他所有 rank 的 K、V 传递"
            "一遍，反向的发送量是前向的两倍。",
        ),
        _ring,
    ),
    by_rule(
        TOPIC,
        SAVED,
        Words(
            'what share of a layer\'s activations does each rank save with context parallelism ("12.5%" or "1/8")?',
            "使用上下文并行，每个 rank 保存一层激活值的多大比例（如“12.5%”或“1/8”）？",
        ),
        _ring,
    ),
    times(
        TOPIC,
        "all heads over grouped heads",
        Words(
            "how many times as many elements does ring attention send with {heads} key-value heads as with {few}? "
            "The size of a head stays.",
            "KV 头数为 {heads} 时环形注意力的发送量是 {few} 个 KV 头时的多少倍？每个头的维度不变。",
        ),
        _all_heads_and_grouped,
    ),
    exactly(
        TOPIC,
        PASSED,
        Words(
            "how many elements does a GPU send over the context-parallel axis for one layer and one micro-batch, "
            "forward and backward?",
            "每张 GPU 每层每个微批次（前向加反向）在上下文并行轴上发送多少个元素？",
        ),
        _ring,
    ),
    exactly(
        TOPIC,
        SAVED,
        Words(
            'what share of the bytes that the layers save on one GPU alone does each rank save ("12.5%" or "1/8")?',
            "每个 rank 各层保存的字节数是单卡的多大比例（如“12.5%”或“1/8”）？",
        ),
        _ring,
    ),
)
