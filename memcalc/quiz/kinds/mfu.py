"""Model FLOPs utilisation: FLOPs of a step, and the share of the peak."""

from __future__ import annotations

from typing import Final

from memcalc.explanation.topics.mfu import GPT, SIX, TOPIC, UTILISATION
from memcalc.explanation.words import Words
from memcalc.quiz.numbers import Draw, gpts, parameters, plain_models
from memcalc.quiz.of_cases import by_rule, exactly
from memcalc.quiz.of_rules import Put, question
from memcalc.quiz.question import Kind, Question

_SIX: Final = Words(
    "how many FLOP does one step take on one GPU, forward and backward, without attention's scores and without "
    "recomputation?",
    "单张 GPU 上一步（前向加反向）需要多少 FLOP？不计注意力分数和重计算。",
)
_GPT: Final = Words(
    "how many FLOP does one step of a GPT take on one GPU, forward and backward, attention's scores (all s² pairs) "
    "and the output head included, without recomputation?",
    "单张 GPU 上 GPT 的一步（前向加反向）需要多少 FLOP？计入注意力分数（全部 s² 对）和输出层，不计重计算。",
)
_EXACT: Final = Words(
    "how many FLOP do all matrix products of one step take, forward and backward? The attention of all s² pairs is "
    "included, also what its backward computes again.",
    "一步的所有矩阵乘法（前向加反向）需要多少 FLOP？计入全部 s² 对的注意力，以及注意力反向中重新计算的部分。",
)
_MFU: Final = Words(
    'what is the MFU ("45%" or "0.45") of a GPU that trains a model of {phi:,} parameters at {rate:,} tokens '
    "per second? Its dense peak is {peak} TFLOP/s. The model needs 6 FLOP for each parameter and token.",
    "一张 GPU 以每秒 {rate:,} 个 token 训练 {phi:,} 个参数的模型，其稠密峰值为 {peak} TFLOP/s。MFU 是多少（如“45%”或"
    "“0.45”）？模型对每个参数每个 token 需要 6 FLOP。",
)
_NAME: Final = "MFU by throughput"
_FLOPS_A_SECOND: Final = Words("FLOP that the model needs for the tokens of a second", "一秒内的 token 所需的模型 FLOP")


def _mfu(draw: Draw, language: str) -> Question:
    peak = draw.one_of((312, 989, 2250))
    phi = parameters(draw)
    percent = draw.one_of((25, 30, 35, 40, 45, 50, 55))
    rate = max(round(percent * peak * 10**12 // (600 * phi), -1 if phi > 2 * 10**10 else -2), 10)
    said = {"phi": phi, "rate": rate, "peak": peak}
    flops = Put(SIX, {"Φ": phi, "T": rate}, _FLOPS_A_SECOND).step(language)
    share = Put(UTILISATION, {"F": flops.result, "P": peak * 10**12})
    steps = (flops, share.step(language))
    asks = _MFU.said(language, **said)
    return question(TOPIC, _NAME, asks, (Put(UTILISATION, {}),), steps, steps[1].result, "ratio", language)


KINDS: Final = (
    by_rule(TOPIC, SIX, _SIX, plain_models),
    by_rule(TOPIC, GPT, _GPT, gpts),
    Kind(TOPIC.name, 2, _NAME, _mfu),
    exactly(TOPIC, SIX, _EXACT, plain_models),
)
