"""Parameter servers: traffic of a server, of a worker, and of a ring."""

from __future__ import annotations

from typing import Final

from memcalc.explanation.topics.ddp import ALL_REDUCE
from memcalc.explanation.topics.parameter_server import SERVER, TOPIC, WORKER
from memcalc.explanation.words import Words
from memcalc.quiz.numbers import Draw, parameters, sharded_models
from memcalc.quiz.of_cases import by_rule
from memcalc.quiz.of_rules import Put, Two, times


def _server_and_ring(draw: Draw) -> Two:
    numbers = {"Φ": parameters(draw), "n": draw.one_of((4, 8, 16, 32, 64))}
    return Two(Put(SERVER, numbers), Put(ALL_REDUCE, numbers))


def _ring_and_worker(draw: Draw) -> Two:
    numbers = {"Φ": parameters(draw), "n": draw.one_of((2, 4, 8, 16, 32))}
    return Two(Put(ALL_REDUCE, numbers), Put(WORKER, numbers))


KINDS: Final = (
    by_rule(
        TOPIC,
        SERVER,
        Words(
            "how many bytes does a single parameter server receive and send in a step, together, if each of the n "
            "GPUs pushes all 16-bit gradients and pulls all 16-bit weights?",
            "若 n 张 GPU 各推送全部 16 位梯度并拉取全部 16 位权重，一台参数服务器每步收发共多少字节？",
        ),
        sharded_models,
    ),
    by_rule(
        TOPIC,
        WORKER,
        Words(
            "how many bytes does one worker of a parameter server send in a step, if it pushes 16-bit gradients? "
            "What it receives does not count.",
            "参数服务器架构中，一个 worker 推送 16 位梯度，每步发送多少字节？不计接收的部分。",
        ),
        sharded_models,
    ),
    times(
        TOPIC,
        "a server over a GPU of a ring",
        Words(
            "how many times as many bytes does a parameter server move (received and sent, 16-bit gradients and "
            "weights) as a GPU of a ring sends in an all-reduce of 16-bit gradients?",
            "参数服务器的收发总量（16 位梯度和权重）是 16 位梯度环形 all-reduce 中每张 GPU 发送量的多少倍？",
        ),
        _server_and_ring,
    ),
    times(
        TOPIC,
        "a GPU of a ring over a worker",
        Words(
            "how many times as many bytes does a GPU send in a ring all-reduce of 16-bit gradients as a worker "
            "sends to a parameter server?",
            "16 位梯度的环形 all-reduce 中每张 GPU 的发送量，是一个 worker 向参数服务器发送量的多少倍？",
        ),
        _ring_and_worker,
    ),
)
