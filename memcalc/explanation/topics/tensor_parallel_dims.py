"""Tensor parallelism in two, two and a half and three dimensions: activations are cut too, and weights are sent."""

from __future__ import annotations

from typing import Final

from memcalc.explanation.exact import elements_of_a_layer
from memcalc.explanation.topic import Case, Quoted, Rule, Topic
from memcalc.explanation.words import Words

_FEATURES: Final = "Colossal-AI docs/source/en/features"
_SIZES: Final = {"b": 16, "s": 1024, "h": 8192}
_NORMS: Final = Words(
    "The biases and the norms are sent too: sums of each token along a row, biases and the norms' weights along a column.",
    "偏置和归一化也要通信：沿行是每个 token 的求和，沿列是偏置和归一化的权重。",
)

LINE: Final = Rule(
    title=Words("One dimension: 8·b·s·h·(t-1)/t elements per layer", "一维：每层 8·b·s·h·(t-1)/t 个元素"),
    formula="8·b·s·h·(t - 1)/t",
    unit="elements",
    counts=Words(
        "four all-reduces of b·s·h over a ring: 2·(t-1)/t for each. It does not shrink with more ranks.",
        "四次环形 all-reduce，每次 2·(t-1)/t·b·s·h；rank 再多也不会变少。",
    ),
    leaves_out=Words("the embedding, the logits and the loss.", "词嵌入、logits 和损失。"),
    quoted=Quoted({**_SIZES, "t": 64}, 1_056_964_608, 0, f"{_FEATURES}/1D_tensor_parallel.md (formula)"),
)
SQUARE: Final = Rule(
    title=Words("Two dimensions: 3·(7·b·s·h + 12·h²)/q per layer", "二维：每层 3·(7·b·s·h + 12·h²)/q"),
    formula="3·(7·b·s·h + 12·h²)/q",
    unit="elements",
    counts=Words(
        "q broadcasts of each block. The inputs of the four matrices are 1, 1, 1 and 4 times h wide, the matrices have 12·h². "
        "Backward broadcasts and reduces twice as much. A ring passes each broadcast on q-1 times: the table's 6·(q-1)/q.",
        "每个块广播 q 次。四个矩阵的输入宽度是 h 的 1、1、1、4 倍，矩阵共 12·h²；反向的广播与规约是前向的两倍。"
        "环形广播要转发 q-1 次，即表中的 6·(q-1)/q。",
    ),
    leaves_out=Words("biases, norms, the embedding, the logits and the loss.", "偏置、归一化、词嵌入、logits 和损失。"),
    quoted=Quoted({**_SIZES, "q": 8}, 654_311_424, 0, f"{_FEATURES}/2D_tensor_parallel.md (formula)"),
)
SQUARES: Final = Rule(
    title=Words("Two and a half: 3·(7·b·s·h/D + 12·h²)/q per layer", "2.5 维：每层 3·(7·b·s·h/D + 12·h²)/q"),
    formula="3·(7·b·s·h/D + 12·h²)/q",
    unit="elements",
    counts=Words(
        "D squares of q·q ranks. Each has its own part of the sequences, and all have the same weights: 1/q² of a matrix.",
        "D 个 q·q 的方阵，各自处理一部分序列，权重相同：每个 rank 持有矩阵的 1/q²。",
    ),
    leaves_out=Words(
        "the sum of the gradients over the D squares, biases, norms, the embedding, the logits and the loss.",
        "D 个方阵之间的梯度求和、偏置、归一化、词嵌入、logits 和损失。",
    ),
    quoted=Quoted({**_SIZES, "q": 4, "D": 4}, 780_140_544, 0, f"{_FEATURES}/2p5D_tensor_parallel.md (formula)"),
)
CUBE: Final = Rule(
    title=Words("Three: 2·(16·b·s·h + 12·h²)·(q-1)/q³ per layer", "三维：每层 2·(16·b·s·h + 12·h²)·(q-1)/q³"),
    formula="2·(16·b·s·h + 12·h²)·(q - 1)/(q·q²)",
    unit="elements",
    counts=Words(
        "each matrix gathers its input and itself, and scatters its output: 7 and 9 times b·s·h, and 12·h². Backward does the "
        "same in turn. That is the table's 6·(q-1)/q³ for equal sizes.",
        "每个矩阵 all-gather 输入和权重，再 reduce-scatter 输出：7 倍与 9 倍 b·s·h，以及 12·h²；反向对称。"
        "尺寸相等时即表中的 6·(q-1)/q³。",
    ),
    leaves_out=Words("biases, norms, the embedding, the logits and the loss.", "偏置、归一化、词嵌入、logits 和损失。"),
    quoted=Quoted({**_SIZES, "q": 4}, 276_824_064, 0, f"{_FEATURES}/3D_tensor_parallel.md (formula)"),
)
_GRID: Final = {"engine": "colossalai"}

TOPIC: Final = Topic(
    name="tensor-parallel-dims",
    title=Words("Tensor parallelism in more dimensions", "多维张量并行"),
    summary=Words("grids of ranks cut activations too, and send weights", "网格切分激活值，也传输权重"),
    text=(
        Words(
            "In one dimension every rank has whole hidden states between two layers. A square of q·q ranks cuts them into q "
            "parts of the sequences and q parts of the hidden size, a cube into l² and l; a matrix is cut in two directions. "
            "Then no rank has the rows and columns that it multiplies: they are broadcast block by block (SUMMA), or gathered.",
            "一维时，两层之间的隐藏状态在每个 rank 上都是完整的。q·q 的方阵把序列切 q 份、隐藏维切 q 份，"
            "立方体切 l² 和 l 份；矩阵按两个方向切。于是要乘的行和列都不在本地：逐块广播 (SUMMA)，或先 gather。",
        ),
        Words(
            "Parameters of a matrix, activations between two layers: 1/P and 1 on a line, 1/q² and 1/q² on a square, 1/q² and "
            "1/(d·q²) on d squares, 1/l³ and 1/l³ on a cube. On a cube a matrix saves what it has gathered, 1/l² of its input "
            "and of itself.",
            "矩阵参数与层间激活：一维 1/P 与 1，二维 1/q² 与 1/q²，2.5 维 1/q² 与 1/(d·q²)，三维 1/l³ 与 1/l³。"
            "但三维的矩阵保存 gather 后的输入和权重，各为 1/l²。",
        ),
    ),
    cases=(
        Case(LINE, elements_of_a_layer("tp"), Words("Nothing else is sent.", "没有其他通信。"), {**_GRID, "tp_dims": "1"}),
        Case(SQUARE, elements_of_a_layer("tp"), _NORMS, {**_GRID, "tp_dims": "2"}),
        Case(SQUARES, elements_of_a_layer("tp"), _NORMS, {**_GRID, "tp_dims": "2.5"}),
        Case(
            CUBE,
            elements_of_a_layer("tp"),
            Words("The biases and the norms are sent too.", "偏置和归一化也要通信。"),
            {**_GRID, "tp_dims": "3"},
        ),
    ),
    model={
        "_name_or_path": "gpt2 with 24 layers of 8192", "model_type": "gpt2",
        "n_embd": 8192, "n_layer": 24, "n_head": 64, "n_positions": 2048, "vocab_size": 50304,
    },
    options={"gpus": 64, "tp": 64, "micro_batch_size": 16, "seq_len": 1024},
)  # fmt: skip
