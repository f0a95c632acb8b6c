"""Batch norms: parameters, and what ranks send that share their statistics."""

from __future__ import annotations

from typing import Final

from memcalc.core.ops.sync_batch_norm import GATHERED, SUMMED
from memcalc.explanation.exact import exact_step
from memcalc.explanation.of_layers import NORMS, first, parameters_of
from memcalc.explanation.step import Step
from memcalc.explanation.topic import Asked, Case, Quoted, Rule, Topic
from memcalc.explanation.words import Words

PARAMETERS: Final = Rule(
    title=Words("2 parameters a channel", "每个通道 2 个参数"),
    formula="2·C",
    unit="parameters",
    counts=Words("a weight and a bias for each channel.", "每个通道一个缩放和一个偏移。"),
    leaves_out=Words(
        "the running mean and variance and the count of batches, which are buffers: the optimizer does not know them.",
        "运行均值、运行方差和批次计数：它们是缓冲区，优化器不管理。",
    ),
    quoted=Quoted({"C": 64}, 128, 0, "torch.nn.BatchNorm2d, weight and bias of (C) (formula)"),
)
SENT: Final = Rule(
    title=Words(
        "SyncBatchNorm: (2C+1)·n values gathered, 2C summed", "SyncBatchNorm：收集 (2C+1)·n 个值，求和 2C 个值"
    ),
    formula="4·((2·C + 1)·n + 2·C)",
    unit="bytes",
    counts=Words(
        "in forward mean, inverse deviation and count of every rank in fp32; in backward two sums for each channel.",
        "前向收集每个进程的均值、标准差倒数和样本数（fp32）；反向对每个通道求两个和。",
    ),
    leaves_out=Words(
        "the gradients of weight and bias, which DDP reduces with all others.",
        "权重和偏置的梯度，由 DDP 与其他梯度一起规约。",
    ),
    quoted=Quoted({"C": 64, "n": 8}, 4640, 0, "torch/nn/modules/_functions.py, SyncBatchNorm (formula)"),
)
_OF_PARAMETERS: Final = Words("parameters of the first batch norm", "第一个批归一化层的参数")
_OF_SENT: Final = Words("payload of the batch norms of a step", "一步中批归一化的通信载荷")


def _parameters(asked: Asked) -> Step:
    return exact_step(asked, _OF_PARAMETERS, parameters_of(asked.report, *NORMS), "parameters")


def _sent(asked: Asked) -> Step:
    first(asked.report, "syncbatchnorm")
    sent = asked.report.collectives
    parts = {name: sum(c.payload for c in sent if c.name == name) for name in (GATHERED, SUMMED)}
    return exact_step(asked, _OF_SENT, parts)


TOPIC: Final = Topic(
    name="batch-norm",
    title=Words("Batch norms", "批归一化"),
    summary=Words(
        "parameters, buffers, what is saved, and what SyncBatchNorm sends",
        "参数、缓冲区、保存的内容，以及 SyncBatchNorm 的通信",
    ),
    text=(
        Words(
            "A batch norm keeps its input for backward, as the mean and the deviation of the batch are functions of all of it. "
            "An activation behind it can work in place, as the norm does not keep its output.",
            "批归一化要为反向保存输入，因为批次的均值和标准差依赖全部输入。它不保存输出，所以其后的激活函数可以原地计算。",
        ),
        Words(
            "Each rank of DDP has statistics of its own batch. nn.SyncBatchNorm takes those of all ranks: a small gather in "
            "every forward and a small sum in every backward, whose time is latency.",
            "DDP 的每个进程只统计自己的批次。nn.SyncBatchNorm 统计所有进程的批次：每次前向一次小的 all-gather，每次反向一次小的 "
            "all-reduce，耗时主要是延迟。",
        ),
    ),
    cases=(
        Case(PARAMETERS, _parameters, Words("All batch norms have both.", "所有批归一化层两者都有。")),
        Case(
            SENT,
            _sent,
            Words(
                "The network has more than one batch norm, or steps of several micro-batches.",
                "网络有多个批归一化层，或每步有多个微批次。",
            ),
            {"engine": "ddp"},
        ),
    ),
    model={
        "model_type": "layers",
        "name": "convolution with a batch norm",
        "input": [3, 32, 32],
        "layers": [
            {"conv2d": {"out": 64, "kernel": 3, "bias": False}},
            "syncbatchnorm",
            "relu",
            "flatten",
            {"linear": 10},
        ],
    },
    options={"gpus": 8},
)
