"""torch's DataParallel: what the first GPU has on top."""

from __future__ import annotations

from typing import Final

from memcalc.explanation.topics.data_parallel import OUTPUTS, STATES, TOPIC
from memcalc.explanation.words import Words
from memcalc.quiz.numbers import LLAMAS, Draw, Setup, batch_of, sizes
from memcalc.quiz.of_cases import by_rule, exactly
from memcalc.quiz.of_rules import Put, Two, both, letters_of


def _gpus(draw: Draw) -> Setup:
    return Setup(model=draw.one_of(LLAMAS), options={"gpus": draw.one_of((2, 4, 8)), **batch_of(draw)})


def _states_and_outputs(draw: Draw) -> Two:
    numbers = letters_of((STATES, OUTPUTS), draw.one_of(LLAMAS), gpus=draw.one_of((2, 4, 8)), **batch_of(draw))
    return Two(Put(STATES, numbers), Put(OUTPUTS, numbers))


KINDS: Final = (
    by_rule(
        TOPIC,
        STATES,
        Words(
            "torch.nn.DataParallel has one optimizer, on the first GPU. How many bytes of optimizer states (Adam, "
            "fp32 master weights and moments) does only the first GPU have?",
            "torch.nn.DataParallel 只有一个优化器，位于第一张 GPU。只有第一张 GPU 拥有的优化器状态（Adam，fp32 主权"
            "重和矩）有多少字节？",
        ),
        sizes,
    ),
    by_rule(
        TOPIC,
        OUTPUTS,
        Words(
            "torch.nn.DataParallel gathers the 16-bit logits of all GPUs on the first one. How many bytes are they, "
            "if each GPU has one micro-batch?",
            "torch.nn.DataParallel 把所有 GPU 的 16 位 logits 收集到第一张 GPU。若每张 GPU 处理一个微批次，它们共占"
            "多少字节？",
        ),
        _gpus,
    ),
    both(
        TOPIC,
        "states and outputs",
        Words(
            "with torch.nn.DataParallel, how many bytes are on the first GPU alone: Adam's states (fp32 master "
            "weights and moments) and the 16-bit logits gathered from all GPUs?",
            "使用 torch.nn.DataParallel，只在第一张 GPU 上的 Adam 状态（fp32 主权重和矩）与从所有 GPU 收集的 16 位 "
            "logits 共占多少字节？",
        ),
        _states_and_outputs,
    ),
    exactly(
        TOPIC,
        STATES,
        Words(
            "how many bytes of optimizer states does each GPU have with DDP? torch's AdamW updates fp32 weights, "
            "and the 16-bit copy of the weights is not a state of the optimizer.",
            "使用 DDP，每张 GPU 上的优化器状态有多少字节？torch 的 AdamW 更新 fp32 权重；16 位权重副本不是优化器状态。",
        ),
        _gpus,
    ),
)
