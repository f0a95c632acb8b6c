"""Pipeline parallelism: elements between stages, micro-batches in flight."""

from __future__ import annotations

from typing import Final

from memcalc.explanation.topics.pipeline import BETWEEN, GPIPE, IN_FLIGHT, TOPIC, VERSIONS
from memcalc.explanation.topics.tensor_parallel import ALL_REDUCES
from memcalc.explanation.words import Words
from memcalc.quiz.numbers import OF_32_LAYERS, SMALL_LLAMAS, Draw, Setup, batch_of
from memcalc.quiz.of_cases import by_rule, exactly
from memcalc.quiz.of_rules import Put, Two, letters_of, times

_BETWEEN: Final = Words(
    "how many elements cross one boundary between two stages for one micro-batch, forward and backward together?",
    "一个微批次（前向加反向）在两个相邻阶段的边界上共传输多少个元素？",
)


def _stages(draw: Draw) -> Setup:
    pp, micro_batches = draw.one_of((2, 4, 8, 16)), draw.one_of((16, 32, 64))
    options = {"gpus": pp, "pp": pp, **batch_of(draw)}
    return Setup(
        model=draw.one_of(OF_32_LAYERS),
        options={**options, "global_batch_size": micro_batches * options["micro_batch_size"]},
    )


def _few_micro_batches(draw: Draw) -> Setup:
    pp, micro_batches = draw.one_of((4, 8, 16)), draw.one_of((2, 4, 8, 12))
    return Setup(model=draw.one_of(OF_32_LAYERS), options={"gpus": pp, "pp": pp, "global_batch_size": micro_batches})


def _gpipe_and_1f1b(draw: Draw) -> Two:
    numbers = {"p": draw.one_of((4, 8, 16)), "m": draw.one_of((16, 32, 64, 128))}
    return Two(Put(GPIPE, numbers), Put(IN_FLIGHT, numbers), numbers)


def _tensor_and_pipeline(draw: Draw) -> Two:
    numbers = letters_of((BETWEEN,), draw.one_of(SMALL_LLAMAS), **batch_of(draw))
    return Two(Put(ALL_REDUCES, numbers), Put(BETWEEN, numbers))


KINDS: Final = (
    by_rule(TOPIC, BETWEEN, _BETWEEN, _stages),
    by_rule(
        TOPIC,
        IN_FLIGHT,
        Words(
            "how many micro-batches does the first stage hold activations of at once with the schedule 1F1B? There "
            "are at least as many micro-batches as stages.",
            "使用 1F1B 调度，第一个阶段最多同时保存多少个微批次的激活值？微批次数不少于阶段数。",
        ),
        _stages,
        "micro-batches",
    ),
    by_rule(
        TOPIC,
        GPIPE,
        Words(
            "how many micro-batches does each stage hold activations of at once with the schedule GPipe?",
            "使用 GPipe 调度，每个阶段最多同时保存多少个微批次的激活值？",
        ),
        _stages,
        "micro-batches",
    ),
    by_rule(
        TOPIC,
        VERSIONS,
        Words(
            "how many versions of its weights does the first stage keep at once with PipeDream, which updates them after "
            "every micro-batch and never empties the pipeline?",
            "使用 PipeDream（每个微批次之后都更新权重，且从不排空流水线），第一个阶段最多同时保存多少个版本的权重？",
        ),
        _stages,
    ),
    times(
        TOPIC,
        "GPipe over 1F1B",
        Words(
            "how many times as many micro-batches does the first stage hold at once with GPipe as with 1F1B? The "
            "pipeline has {p} stages, and a step {m} micro-batches.",
            "流水线有 {p} 个阶段，每步 {m} 个微批次。GPipe 调度下第一个阶段同时保存的微批次数是 1F1B 的多少倍？",
        ),
        _gpipe_and_1f1b,
    ),
    times(
        TOPIC,
        "tensor over pipeline parallelism",
        Words(
            "how many times as many elements does tensor parallelism send for a micro-batch in one layer (each "
            "all-reduce counted twice, no factor (t-1)/t) as cross one boundary of a pipeline, forward and backward?",
            "对一个微批次，张量并行在一层中发送的元素数（每次 all-reduce 计两倍，不计系数 (t-1)/t）是流水线一个边界"
            "上（前向加反向）传输元素数的多少倍？",
        ),
        _tensor_and_pipeline,
    ),
    exactly(TOPIC, BETWEEN, _BETWEEN, _stages),
    exactly(
        TOPIC,
        IN_FLIGHT,
        Words(
            "how many micro-batches does the first stage hold activations of at once?",
            "第一个阶段最多同时保存多少个微批次的激活值？",
        ),
        _few_micro_batches,
        "micro-batches",
    ),
)
