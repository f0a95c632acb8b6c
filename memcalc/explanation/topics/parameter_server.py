"""Parameter servers: all traffic at one place."""

from __future__ import annotations

from typing import Final

from memcalc.explanation.exact import exact_step, sent_over
from memcalc.explanation.step import Step
from memcalc.explanation.topic import Asked, Case, Quoted, Rule, Topic
from memcalc.explanation.words import Words

_LI: Final = (
    "push and pull, Li et al., Scaling Distributed Machine Learning with the Parameter Server, OSDI 2014 (formula)"
)

SERVER: Final = Rule(
    title=Words("A server moves 2·n times the gradients", "服务器的流量是梯度的 2·n 倍"),
    formula="2·n·2·Φ",
    unit="bytes",
    counts=Words(
        "n workers push 16-bit gradients and pull 16-bit weights, all through one server.",
        "n 个 worker 推送 16 位梯度、拉取 16 位权重，全部经过一台服务器。",
    ),
    leaves_out=Words(
        "that k servers share it, 1/k each; and asynchronous workers, who do not wait for each other.",
        "k 台服务器可以分担，各 1/k；以及互不等待的异步 worker。",
    ),
    quoted=Quoted({"Φ": 7e9, "n": 8}, 224e9, 0, _LI),
)
WORKER: Final = Rule(
    title=Words("A worker sends its gradients once", "每个 worker 只发送一次梯度"),
    formula="2·Φ",
    unit="bytes",
    counts=Words("one push of 16-bit gradients; it receives the weights once.", "推送一次 16 位梯度；再接收一次权重。"),
    leaves_out=Words("the server's side, which is the bottleneck.", "服务器一侧，那里才是瓶颈。"),
    quoted=Quoted({"Φ": 7e9}, 14e9, 0, _LI),
)

_AT_SERVER: Final = Words("through the busiest server", "经过最忙的服务器")


def through_server(asked: Asked) -> Step:
    """Return the bytes that the busiest server receives and sends in a step."""
    from memcalc.engines.parameter_server import traffic_of_a_server

    traffic = traffic_of_a_server(asked.report.model, asked.report.setup)
    return exact_step(asked, _AT_SERVER, traffic._asdict())


_ENGINE: Final = {"engine": "parameter-server", "precision": "bf16-mixed"}
TOPIC: Final = Topic(
    name="parameter-server",
    title=Words("Parameter servers", "参数服务器"),
    summary=Words("why a ring replaced the parameter server", "为什么环形算法取代了参数服务器"),
    text=(
        Words(
            "Workers push gradients to a server, which updates the weights, and pull these. The server's link carries n times "
            "what a worker's does. A ring has no such place: each GPU sends and receives at most twice its gradients.",
            "worker 把梯度推给服务器，服务器更新权重，worker 再拉取。服务器链路的流量是 worker 的 n 倍。"
            "环形算法没有这样的瓶颈："
            "每张 GPU 的收发量最多是其梯度的两倍。",
        ),
        Words(
            "Here the numbers are of --engine parameter-server, whose --servers divide the parameters. With DDP each GPU of a "
            "ring sends 2·(n-1)/n times its gradients, whatever n is.",
            "这里的数值来自 --engine parameter-server，其 --servers 平分参数。用 DDP 时，环中每张 GPU 发送 2·(n-1)/n 倍梯度，"
            "与 n 无关。",
        ),
    ),
    cases=(
        Case(
            SERVER,
            through_server,
            Words(
                "More --servers divide this; a ring has no such place.",
                "增加 --servers 可以分担；环形算法没有这样的瓶颈。",
            ),
            _ENGINE,
        ),
        Case(
            WORKER,
            sent_over("dp"),
            Words(
                "A GPU of a ring sends more than a worker does, since the GPUs do the server's work among themselves.",
                "环中的 GPU 比 worker 发送得多，因为它们分担了服务器的工作。",
            ),
            _ENGINE,
        ),
    ),
    options={"gpus": 8},
)
