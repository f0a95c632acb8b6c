"""Mixtures of experts: memory holds all experts, a token uses a few."""

from __future__ import annotations

from typing import Final

from memcalc.explanation.exact import elements_of_a_layer, states
from memcalc.explanation.topic import Case, Quoted, Rule, Topic
from memcalc.explanation.topics.mfu import flops_of_the_step
from memcalc.explanation.words import Words

_MIXTRAL: Final = "Mistral AI, Mixtral of experts, mistral.ai/news/mixtral-of-experts"

RESIDENT: Final = Rule(
    title=Words("Memory follows all parameters: 16·Φ", "显存取决于全部参数：16·Φ"),
    formula="16·Φ",
    unit="bytes",
    counts=Words("every expert, whether tokens go to it or not.", "所有专家，不管有没有 token 路由到它。"),
    leaves_out=Words("activations, and whatever shards the experts.", "激活值，以及对专家的切分。"),
    quoted=Quoted({"Φ": 46.7e9}, 747.2e9, 0, f"16 bytes, and the 46.7B of {_MIXTRAL} (formula)"),
)
ACTIVE: Final = Rule(
    title=Words("Compute follows the active ones: 6·A·T", "计算取决于激活参数：6·A·T"),
    formula="6·A·T",
    unit="flop",
    counts=Words(
        "2 FLOP in forward and 4 in backward for each token and each parameter that it meets.",
        "每个 token 与它用到的每个参数：前向 2 FLOP，反向 4 FLOP。",
    ),
    leaves_out=Words(
        "attention's scores; and the embedding, which counts as parameters and multiplies nothing.",
        "注意力分数的乘法；另外词嵌入算作参数，却没有乘法。",
    ),
    quoted=Quoted({"A": 12.9e9, "T": 2048}, 158_515_200_000_000, 0, f"6 FLOP, and the 12.9B of {_MIXTRAL} (formula)"),
)
ALL_TO_ALL: Final = Rule(
    title=Words("Expert parallelism: 4·(e-1)/e·b·s·K·h elements per layer", "专家并行：每层 4·(e-1)/e·b·s·K·h 个元素"),
    formula="4·(e-1)/e·b·s·K·h",
    unit="elements",
    counts=Words(
        "four all-to-alls: tokens to their experts and back, in forward and in backward. A token goes to K experts, and 1/e "
        "of them are on its own rank, if routing is uniform.",
        "四次 all-to-all：token 发往专家再返回，前向和反向各一遍。每个 token 发往 K 个专家；路由均匀时其中 1/e 在本 rank 上。",
    ),
    leaves_out=Words(
        "weights and counts of the routing, an uneven load (--expert-imbalance), capacity limits.",
        "路由的权重和计数、负载不均 (--expert-imbalance)、容量限制。",
    ),
    quoted=Quoted(
        {"e": 8, "b": 1, "s": 2048, "K": 2, "h": 4096},
        58_720_256,
        0,
        "two all-to-alls a pass, Lepikhin et al., GShard, arXiv 2006.16668 (formula)",
    ),
)

_ONE_GPU: Final = {"gpus": 1, "ep": 1, "tp": 1, "pp": 1, "cp": 1, "zero": 0, "engine": "none"}

TOPIC: Final = Topic(
    name="moe",
    title=Words("Mixture of experts", "混合专家 (MoE)"),
    summary=Words("all experts in memory, K at work: what grows with what", "全部专家驻留显存，只有 K 个参与计算"),
    text=(
        Words(
            "A router sends each token to K of E experts. Memory is that of all E, FLOPs are those of K, and activations of "
            "the "
            "experts are those of K rows for each token.",
            "路由器把每个 token 发给 E 个专家中的 K 个。显存按全部 E 个计，运算量按 K 个计，专家的激活值按每个 token K 行计。",
        ),
    ),
    cases=(
        Case(
            RESIDENT,
            states,
            Words(
                "A layout that shards or pads the weights holds another share.",
                "切分或填充权重的并行方式会使每卡比例不同。",
            ),
            _ONE_GPU,
        ),
        Case(
            ACTIVE,
            flops_of_the_step,
            Words(
                "Attention's products come on top, and the embedding's parameters multiply nothing.",
                "注意力的乘法要另加；词嵌入的参数不参与乘法。",
            ),
            _ONE_GPU,
        ),
        Case(
            ALL_TO_ALL,
            elements_of_a_layer("ep"),
            Words(
                "The routing's weights travel too, one number for each row, and the counts of tokens.",
                "路由权重（每行一个数）和 token 计数也要传输。",
            ),
        ),
    ),
    model="mixtral-8x7b",
    options={"gpus": 8, "ep": 8},
)
