"""Frozen weights and adapters on the parallel axes: what crosses a boundary, what an adapter sums."""

from __future__ import annotations

from typing import Final

from memcalc.explanation.topics.frozen_axes import FORWARD_ALONE, OF_ADAPTER, TOPIC
from memcalc.explanation.words import Words
from memcalc.quiz.numbers import Draw, Setup, batch_of
from memcalc.quiz.of_cases import by_rule, exactly
from memcalc.quiz.of_rules import Put, Two, letters_of, times

_MODELS: Final = ("llama-7b", "llama-2-7b", "mistral-7b", "llama-3-8b")
"""Models of 32 layers, which 2, 4 and 8 stages share."""
_BOUNDARY: Final = Words(
    "how many elements cross one boundary between two stages for one micro-batch, if only the output head trains?",
    "若只训练输出层，一个微批次在两个相邻阶段的边界上共传输多少个元素？",
)
_ADAPTER: Final = Words(
    "how many elements does one all-reduce for a LoRA adapter have, if its layer is column-parallel? The adapter is split as "
    "the layer is.",
    "LoRA 适配器所在的层为列并行，适配器与该层一样切分。它的一次 all-reduce 有多少个元素？",
)


def _stages(draw: Draw) -> Setup:
    pp, batch = draw.one_of((2, 4, 8)), batch_of(draw)
    size = 16 * batch["micro_batch_size"]
    options = {"gpus": pp, "pp": pp, "tp": 1, **batch, "global_batch_size": size, "freeze": "all-but:head"}
    return Setup(model=draw.one_of(_MODELS), options=options)


def _adapters(draw: Draw) -> Setup:
    tp = draw.one_of((2, 4, 8))
    options = {"gpus": tp, "tp": tp, "pp": 1, "lora_rank": draw.one_of((4, 8, 16, 32, 64)), **batch_of(draw)}
    return Setup(model=draw.one_of(_MODELS), options=options)


def _hidden_states_and_adapter(draw: Draw) -> Two:
    setup = _adapters(draw)
    numbers = letters_of((FORWARD_ALONE, OF_ADAPTER), str(setup.model), engine="fsdp2", **setup.options)
    return Two(Put(FORWARD_ALONE, numbers), Put(OF_ADAPTER, numbers))


KINDS: Final = (
    by_rule(TOPIC, FORWARD_ALONE, _BOUNDARY, _stages),
    by_rule(TOPIC, OF_ADAPTER, _ADAPTER, _adapters),
    times(
        TOPIC,
        "hidden states over an adapter's sum",
        Words(
            "how many times as many elements as one all-reduce for a LoRA adapter of a split layer cross a boundary between two "
            "stages behind a frozen part, for one micro-batch?",
            "一个微批次在冻结部分之后的阶段边界上传输的元素数，是切分层 LoRA 适配器一次 all-reduce 的多少倍？",
        ),
        _hidden_states_and_adapter,
    ),
    exactly(TOPIC, FORWARD_ALONE, _BOUNDARY, _stages),
    exactly(TOPIC, OF_ADAPTER, _ADAPTER, _adapters),
)
