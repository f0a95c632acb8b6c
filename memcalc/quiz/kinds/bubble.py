"""The bubble: shares of time, and micro-batches that make it small."""

from __future__ import annotations

from typing import Final

from memcalc.explanation.topics.bubble import CHIMERA, DUALPIPE, INTERLEAVED, OF_THE_STEP, PER_IDEAL, TOPIC
from memcalc.explanation.words import Words
from memcalc.quiz.numbers import Draw, Setup
from memcalc.quiz.of_cases import by_rule, exactly
from memcalc.quiz.of_rules import Least, Put, Two, fewest, times

_MODELS: Final = ("llama-7b", "llama-2-7b", "mistral-7b", "llama-3-8b")
_IDEAL: Final = Words(
    "how large is the pipeline's bubble with 1F1B, over the ideal time of a step, which is the time without any "
    'waiting ("12%" or "0.12")? All stages take equally long.',
    "使用 1F1B，流水线气泡占一步理想时间（即没有任何等待的时间）的多大比例（如“12%”或“0.12”）？各阶段耗时相同。",
)
_STEP: Final = Words(
    'what share of the whole step, waiting included, is the pipeline\'s bubble with 1F1B ("12%" or "0.12")? All '
    "stages take equally long.",
    "使用 1F1B，流水线气泡占整步时间（含等待）的多大比例（如“12%”或“0.12”）？各阶段耗时相同。",
)
_INTERLEAVED: Final = Words(
    "how large is the bubble of the interleaved schedule, over the ideal time of a step, which is the time without "
    'any waiting ("12%" or "0.12")? All stages take equally long.',
    "使用交错调度，气泡占一步理想时间（即没有任何等待的时间）的多大比例（如“12%”或“0.12”）？各阶段耗时相同。",
)


_CHIMERA: Final = Words(
    "what share of the whole step, waiting included, is the bubble of Chimera's two pipelines with as many micro-batches "
    'as stages ("12%" or "0.12")? All stages take equally long, and a backward twice as long as a forward.',
    "使用 Chimera 的两条流水线，且微批次数等于阶段数，气泡占整步时间（含等待）的多大比例（如“12%”或“0.12”）？"
    "各阶段耗时相同，反向耗时为前向的两倍。",
)
_DUALPIPE: Final = Words(
    "how large is DualPipe's bubble, over the ideal time of a step, which is the time without any waiting "
    '("12%" or "0.12")? All stages take equally long, as do a forward and each half of a backward, and an overlapped pair '
    "takes as long as both of its parts.",
    "使用 DualPipe，气泡占一步理想时间（即没有任何等待的时间）的多大比例（如“12%”或“0.12”）？"
    "各阶段耗时相同，前向与反向的每一半耗时相同，重叠的一对耗时为两者之和。",
)


def _both_ways(draw: Draw, micro_batches: int) -> Setup:
    pp = draw.one_of((4, 8, 16))
    options = {"gpus": pp, "pp": pp, "zero": 2, "global_batch_size": micro_batches * pp}
    return Setup(model=draw.one_of(_MODELS), options=options)


def _as_many_as_stages(draw: Draw) -> Setup:
    return _both_ways(draw, 1)


def _more_than_stages(draw: Draw) -> Setup:
    return _both_ways(draw, draw.one_of((2, 4, 6)))


def _stages(draw: Draw) -> Setup:
    pp, micro_batches = draw.one_of((2, 4, 8, 16)), draw.one_of((16, 32, 64, 128))
    return Setup(model=draw.one_of(_MODELS), options={"gpus": pp, "pp": pp, "global_batch_size": micro_batches})


def _chunks(draw: Draw) -> Setup:
    setup = _stages(draw)
    chunks = draw.one_of([v for v in (2, 4, 8) if 32 % (v * setup.options["pp"]) == 0] or [2])
    return Setup(model=setup.model, options={**setup.options, "virtual_stages": chunks})


def _small_enough(draw: Draw) -> Least:
    stages, percent = draw.one_of((4, 8, 16, 32)), draw.one_of((5, 10, 20, 25))
    said = {"stages": stages, "percent": percent}
    return Least(PER_IDEAL, "m", range(1, 2000), {"p": stages}, percent / 100, said)


def _two_shares(draw: Draw) -> Two:
    numbers = {"p": draw.one_of((4, 8, 16)), "m": draw.one_of((8, 16, 32))}
    return Two(Put(PER_IDEAL, numbers), Put(OF_THE_STEP, numbers))


KINDS: Final = (
    by_rule(TOPIC, PER_IDEAL, _IDEAL, _stages),
    by_rule(TOPIC, OF_THE_STEP, _STEP, _stages),
    by_rule(TOPIC, INTERLEAVED, _INTERLEAVED, _chunks),
    by_rule(TOPIC, CHIMERA, _CHIMERA, _as_many_as_stages),
    by_rule(TOPIC, DUALPIPE, _DUALPIPE, _more_than_stages),
    fewest(
        TOPIC,
        "fewest micro-batches",
        Words(
            "with {stages} stages and 1F1B, how many micro-batches does a step need at least, for the bubble to be "
            "{percent} % of the ideal time or less?",
            "{stages} 个阶段、1F1B 调度，一步至少需要多少个微批次，才能使气泡不超过理想时间的 {percent}%？",
        ),
        _small_enough,
        "micro-batches",
    ),
    times(
        TOPIC,
        "of the ideal time over of the step",
        Words(
            "one bubble is said in two ways, as a share of the ideal time and as a share of the whole step. How "
            "many times is the first number the second, with 1F1B?",
            "同一个气泡有两种说法：占理想时间的比例，以及占整步时间的比例。使用 1F1B 时，前一个数是后一个数的多少倍？",
        ),
        _two_shares,
    ),
    exactly(TOPIC, OF_THE_STEP, _STEP, _stages),
    exactly(TOPIC, INTERLEAVED, _INTERLEAVED, _chunks),
    exactly(TOPIC, DUALPIPE, _DUALPIPE, _more_than_stages),
)
