"""LSTMs: parameters."""

from __future__ import annotations

from typing import Final

from memcalc.explanation.exact import exact_step
from memcalc.explanation.of_layers import parameters_of
from memcalc.explanation.step import Step
from memcalc.explanation.topic import Asked, Case, Quoted, Rule, Topic
from memcalc.explanation.words import Words

PARAMETERS: Final = Rule(
    title=Words("4·h·(in + h + 2) parameters", "4·h·(输入 + h + 2) 个参数"),
    formula="4·H·(E + H + 2)",
    unit="parameters",
    counts=Words(
        "four gates, each with a matrix over the input, one over the state, and torch's two biases.",
        "四个门，每个门有作用于输入的矩阵、作用于状态的矩阵，以及 torch 的两个偏置。",
    ),
    leaves_out=Words(
        "the textbooks' single bias for each gate, 4·h·(in + h + 1); GRUs (three gates) and simple RNNs (none).",
        "教科书中每个门只有一个偏置：4·h·(输入 + h + 1)。GRU 有三个门，简单 RNN 没有门。",
    ),
    quoted=Quoted(
        {"E": 128, "H": 256}, 395_264, 0, "torch.nn.LSTM, shapes of weight_ih_l, weight_hh_l and biases (formula)"
    ),
)
_OF_PARAMETERS: Final = Words("parameters of the first LSTM", "第一个 LSTM 的参数")


def _parameters(asked: Asked) -> Step:
    return exact_step(asked, _OF_PARAMETERS, parameters_of(asked.report, "lstm"), "parameters")


TOPIC: Final = Topic(
    name="lstm",
    title=Words("Recurrent layers", "循环层"),
    summary=Words("parameters of an LSTM, and what its steps keep", "LSTM 的参数量，以及各时间步保存的内容"),
    text=(
        Words(
            "All steps share the weights, so parameters do not grow with the sequence. What backward needs does: each step "
            "keeps its gates and states. So an LSTM's activations are proportional to the length, as those of a transformer "
            "without the scores of attention.",
            "所有时间步共享权重，参数量不随序列增长。反向所需的内容会增长：每一步都保存门和状态。因此 LSTM 的激活值与长度成正"
            "比，与不含注意力分数的 Transformer 一样。",
        ),
    ),
    cases=(Case(PARAMETERS, _parameters, Words("All biases are there.", "偏置齐全。")),),
    model={
        "model_type": "layers",
        "name": "language model",
        "input": "tokens",
        "layers": [{"embedding": {"vocab": 1000, "size": 128}}, {"lstm": 256}, {"linear": 1000}],
    },
    options={"seq_len": 16},
)
