"""Sequence parallelism: the tensors that tensor parallelism leaves whole are split by tokens."""

from __future__ import annotations

from typing import Final

from memcalc.explanation.exact import elements_of_a_layer, saved_in_layers
from memcalc.explanation.topic import Case, Quoted, Rule, Topic
from memcalc.explanation.topics.activations import TABLE_2
from memcalc.explanation.words import Words

_PAPER: Final = "Korthikanti et al., arXiv 2205.05198, section 4.2.2 (formula)"

SAVED: Final = Rule(
    title=Words("Activations: 34·s·b·h/t per layer", "激活值：每层 34·s·b·h/t"),
    formula="34·s·b·h·L/t",
    unit="bytes",
    counts=Words(
        "everything of a layer over t, with flash attention or selective recomputation.",
        "层内所有激活值除以 t（使用 FlashAttention 或选择性重计算）。",
    ),
    leaves_out=Words(
        "scores (5as/(ht)) without either of them; embeddings, head and loss; statistics; a gated MLP.",
        "两者都不用时的注意力分数 (5as/(ht))；词嵌入、输出层和损失；统计量；门控 MLP。",
    ),
    quoted=Quoted({"s": 2048, "b": 4, "h": 6144, "L": 48, "t": 8}, 10_267_656_192, 0, TABLE_2),
)
SENDS: Final = Rule(
    title=Words("It sends what tensor parallelism sends: 8·b·s·h elements", "通信量与张量并行相同：8·b·s·h 个元素"),
    formula="8·b·s·h",
    unit="elements",
    counts=Words(
        "each all-reduce as the reduce-scatter and the all-gather that it consists of, at other places in the layer.",
        "每次 all-reduce 拆成它本来就包含的 reduce-scatter 和 all-gather，只是位置不同。",
    ),
    leaves_out=Words(
        "the factor (t-1)/t, and that the inputs of column-parallel layers are gathered once more in backward.",
        "系数 (t-1)/t；以及列并行层的输入在反向中还要再收集一次。",
    ),
    quoted=Quoted({"b": 1, "s": 2048, "h": 4096}, 67_108_864, 0, _PAPER),
)
_ENGINE: Final = {"engine": "megatron", "sequence_parallel": True}

TOPIC: Final = Topic(
    name="sequence-parallel",
    title=Words("Sequence parallelism (Megatron)", "序列并行 (Megatron)"),
    summary=Words("norms and dropout split by tokens: 34sbh/t", "归一化和 dropout 按 token 切分：34sbh/t"),
    text=(
        Words(
            "Tensor parallelism leaves norms, dropout and the inputs of its matrices whole on every rank, 10 of the 34 sbh. "
            "Sequence parallelism gives each of the t ranks a part of the tokens there.",
            "张量并行让归一化、dropout 和矩阵的输入在每个 rank 上保持完整，占 34sbh 中的 10sbh。序列并行在这些位置让 t 个 rank "
            "各处理一部分 token。",
        ),
    ),
    cases=(
        Case(
            SAVED,
            saved_in_layers,
            Words(
                "The rule is of GPT: a gated MLP saves one tensor more of its width, and without dropout there are no masks.",
                "该公式针对 GPT：门控 MLP 多保存一个其宽度的张量；没有 dropout 就没有掩码。",
            ),
            _ENGINE,
        ),
        Case(
            SENDS,
            elements_of_a_layer("tp"),
            Words(
                "A ring sends (t-1)/t, and Megatron gathers the inputs of attention and MLP again for the weight gradients: "
                "ten collectives of b·s·h a layer, not eight.",
                "环形算法发送 (t-1)/t；Megatron 为计算权重梯度会再次收集注意力和 MLP 的输入：每层十次 b·s·h 的集合通信，"
                "而不是八次。",
            ),
            _ENGINE,
        ),
    ),
    options={"gpus": 8, "tp": 8},
)
