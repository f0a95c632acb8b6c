"""Activations: what a layer saves for backward."""

from __future__ import annotations

from typing import Final

from memcalc.explanation.exact import saved_in_layers
from memcalc.explanation.topic import Case, Quoted, Rule, Topic
from memcalc.explanation.words import Words

EQUATION_1: Final = "Korthikanti et al., arXiv 2205.05198, equation 1 (formula)"
TABLE_2: Final = "Korthikanti et al., arXiv 2205.05198, table 2 (formula)"

EAGER: Final = Rule(
    title=Words("s·b·h·(34 + 5as/h) bytes per layer", "每层 s·b·h·(34 + 5as/h) 字节"),
    formula="s·b·h·(34 + 5·a·s/h)·L",
    unit="bytes",
    counts=Words(
        "a GPT layer in 16 bits with dropout and fused kernels: attention 11 sbh + 5 a s² b, MLP 19 sbh, two norms 4 sbh. "
        "The 5 a s² b are the softmax, its dropout mask, and what dropout leaves.",
        "16 位、带 dropout、使用融合核的 GPT 层：注意力 11sbh + 5as²b，MLP 19sbh，两个层归一化 4sbh。"
        "5as²b 来自 softmax、dropout 掩码和 dropout 输出。",
    ),
    leaves_out=Words(
        "embeddings, the last norm, logits and loss; statistics of norms; gated MLPs; fewer key-value heads; "
        "norms that are computed in fp32.",
        "词嵌入、最后的归一化、logits 和损失；归一化的统计量；门控 MLP；更少的 KV 头；以 fp32 计算的归一化。",
    ),
    quoted=Quoted({"s": 2048, "b": 4, "h": 6144, "a": 64, "L": 48}, 339_839_287_296, 0, EQUATION_1),
)
FLASH: Final = Rule(
    title=Words("With flash attention: 34·s·b·h per layer", "使用 FlashAttention：每层 34·s·b·h"),
    formula="34·s·b·h·L",
    unit="bytes",
    counts=Words(
        "the same layer without what is quadratic in s: a fused kernel computes the scores again in backward.",
        "同一层去掉与 s 的平方成正比的部分：融合核在反向中重新计算注意力分数。",
    ),
    leaves_out=Words(
        "one fp32 number for each head and token that the kernel keeps, and the statistics of norms.",
        "融合核为每个头每个 token 保留的一个 fp32 数，以及归一化的统计量。",
    ),
    quoted=Quoted({"s": 2048, "b": 4, "h": 6144, "L": 48}, 82_141_249_536, 0, TABLE_2),
)

TOPIC: Final = Topic(
    name="activations",
    title=Words("Activations", "激活值"),
    summary=Words("what a layer saves for backward: sbh(34 + 5as/h)", "每层为反向传播保存什么：sbh(34 + 5as/h)"),
    text=(
        Words(
            "Backward needs what forward computed: a matrix product its input, dropout its mask, a softmax its output. All of "
            "it stays alive from forward to backward, for every layer. It grows with batch and sequence, not with the "
            "optimizer, and data parallelism does not shard it.",
            "反向传播需要前向的中间结果：矩阵乘法需要输入，dropout 需要掩码，softmax 需要输出。这些张量从前向一直存活到反向，"
            "每层都有。它随批次和序列长度增长，与优化器无关，数据并行也不切分它。",
        ),
    ),
    cases=(
        Case(
            EAGER,
            saved_in_layers,
            Words(
                "The rule has one layout. transformers' GPT-2 computes GELU op by op, which saves three more tensors of the "
                "MLP's width, 24 sbh; other families have gated MLPs, no dropout, or norms in fp32.",
                "该公式对应一种实现。transformers 的 GPT-2 逐算子计算 GELU，多保存三个 MLP 宽度的张量，即 24sbh；"
                "其他模型有门控 MLP、没有 dropout，或以 fp32 计算归一化。",
            ),
            {"engine": "none", "attention": "eager"},
        ),
        Case(
            FLASH,
            saved_in_layers,
            Words(
                "Megatron's layers with flash attention keep one fp32 number a head and token, and fp32 statistics of norms; "
                "a gated MLP, grouped heads or no dropout change the 34.",
                "Megatron 的层使用 FlashAttention 时，每个头每个 token 还保留一个 fp32 数，以及 fp32 的归一化统计量；"
                "门控 MLP、分组 KV 头或不用 dropout 会改变系数 34。",
            ),
            {"engine": "megatron"},
        ),
    ),
    model="gpt2-xl",
)
