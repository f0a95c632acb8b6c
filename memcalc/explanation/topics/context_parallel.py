"""Context parallelism: a sequence on several GPUs, keys and values passed around."""

from __future__ import annotations

from typing import Final

from memcalc.explanation.exact import elements_of_a_layer, layers_saved, ratio_step
from memcalc.explanation.step import Step
from memcalc.explanation.topic import Asked, Case, Quoted, Rule, Topic
from memcalc.explanation.words import Words

_RING: Final = "c-1 hops of the keys and values of s/c tokens (formula)"

PASSED: Final = Rule(
    title=Words(
        "Keys and values go around: 2·(c-1)/c·b·s·k·d elements in forward, three times that in all",
        "K、V 绕环传递：前向 2·(c-1)/c·b·s·k·d 个元素，合计三倍",
    ),
    formula="3·2·(c-1)/c·b·s·k·d",
    unit="elements",
    counts=Words(
        "the keys and values of the other ranks' tokens once in forward, and about twice that in backward, which also sends "
        "their gradients.",
        "前向传递一遍其他 rank 的 K、V；反向约为其两倍，因为还要传递它们的梯度。",
    ),
    leaves_out=Words(
        "queries, which stay where they are; and that ranks exchange nothing outside attention.",
        "Q 不移动；注意力之外各 rank 之间没有任何通信。",
    ),
    quoted=Quoted({"c": 8, "b": 1, "s": 2048, "k": 32, "d": 128}, 44_040_192, 0, _RING),
)
SAVED: Final = Rule(
    title=Words("Activations: 1/c of them", "激活值：减为 1/c"),
    formula="1/c",
    unit="ratio",
    counts=Words("a layer's activations: each rank has s/c tokens.", "层内激活值：每个 rank 只有 s/c 个 token。"),
    leaves_out=Words(
        "weights, gradients and optimizer states: the ranks of a sequence have all of them, as data-parallel ranks do.",
        "权重、梯度和优化器状态：处理同一序列的各 rank 都有完整的一份，与数据并行相同。",
    ),
    quoted=Quoted({"c": 8}, 0.125, 0, "s/c tokens for each rank (formula)"),
)
_RATIO: Final = Words("saved by the layers over what one GPU would save", "各层保存量与单卡之比")


def share(asked: Asked) -> Step:
    """Return the ratio of the bytes that a rank's layers save to those without context parallelism."""
    setup = asked.report.setup
    whole = asked.again(cp=1, gpus=setup.gpus // setup.cp, engine=setup.engine)
    return ratio_step(asked, _RATIO, "cp/1", layers_saved(asked.report), layers_saved(whole))


TOPIC: Final = Topic(
    name="context-parallel",
    title=Words("Context parallelism", "上下文并行"),
    summary=Words("a sequence on c GPUs, keys and values passed in a ring", "一个序列分到 c 张 GPU，K、V 绕环传递"),
    text=(
        Words(
            "Each rank has s/c tokens of every sequence, for all layers. Only attention needs the others: keys and values go "
            "around in a ring, or are gathered (--cp-comm-type), or heads are exchanged for tokens (Ulysses).",
            "每个 rank 在所有层都只处理每个序列的 s/c 个 token。只有注意力需要其他 token：K、V 绕环传递，或被收集 "
            "(--cp-comm-type)，"
            "或者用头换 token (Ulysses)。",
        ),
    ),
    cases=(
        Case(
            PASSED,
            elements_of_a_layer("cp"),
            Words(
                "In backward the ring passes keys and values with their gradients, and one hop more brings the gradients home.",
                "反向中 K、V 与其梯度一起绕环，并且多走一步把梯度送回原处。",
            ),
        ),
        Case(
            SAVED,
            share,
            Words(
                "Ring attention keeps what it needs of each hop, and some statistics are saved once for each of them.",
                "环形注意力会为每一步保留所需的张量，部分统计量每步各存一份。",
            ),
        ),
    ),
    options={"gpus": 8, "cp": 8},
)
