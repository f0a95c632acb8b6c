"""The place of a row in the model, read from its name. Rows of one place are explained together."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from memcalc.explanation.words import Words


class Place(NamedTuple):
    """A part of a model: its name, and the reason why backward needs the activations saved there."""

    called: Words
    saves: Words


_ANY: Final = Words("Backward of the operation that has it as input or output needs it.", "该算子的反向传播需要它。")

NORMS: Final = Place(
    Words("norms", "归一化层"),
    Words(
        "The backward of a norm needs its input, its statistics, and what its weight is multiplied by.",
        "归一化的反向传播需要它的输入、统计量，以及与其权重相乘的张量。",
    ),
)
ATTENTION: Final = Place(
    Words("attention", "注意力"),
    Words(
        "Backward needs queries, keys, values, the attention's output and the input of every projection; without a fused "
        "kernel also the scores, seq·seq for each head.",
        "反向传播需要 Q、K、V、注意力输出以及各投影层的输入；没有融合核时还需要注意力分数，每个头 seq·seq 个。",
    ),
)
EXPERTS: Final = Place(
    Words("experts", "专家"),
    Words(
        "A token is there once for each expert that it goes to: experts_per_token rows for one token.",
        "每个 token 在它被路由到的每个专家中各有一行：一个 token 有 experts_per_token 行。",
    ),
)
MLP: Final = Place(
    Words("MLP", "前馈网络 (MLP)"),
    Words(
        "The backward of a matrix product needs its input, that of an activation function its input, that of a product of two "
        "tensors both of them.",
        "矩阵乘法的反向传播需要其输入，激活函数需要其输入，两个张量逐元素相乘则两者都需要。",
    ),
)
EMBEDDING: Final = Place(Words("embeddings", "词嵌入"), _ANY)
HEAD: Final = Place(Words("output head", "输出层 (LM head)"), _ANY)
LOSS: Final = Place(
    Words("loss", "损失函数"),
    Words(
        "The loss keeps what its backward makes the gradient of the logits from: a row of the vocabulary's size for each "
        "token.",
        "损失函数保留用于计算 logits 梯度的张量：每个 token 一行，长度为词表大小。",
    ),
)
BETWEEN: Final = Place(
    Words("inputs and outputs of layers", "各层的输入和输出"),
    Words(
        "The hidden states that go from layer to layer; with recomputation they are all that is kept of a layer.",
        "层与层之间传递的隐藏状态；使用重计算时，每层只保留它。",
    ),
)
TILED_HEAD: Final = Place(
    LOSS.called,
    Words(
        "TRL's head has no logits. It keeps its input and two numbers of each token, and projects each tile again in backward.",
        "TRL 的输出层不保存 logits：它只保留输入和每个 token 的两个数，反向时逐块重新投影。",
    ),
)
REFERENCE: Final = Place(Words("reference model", "参考模型"), _ANY)
OTHER: Final = Place(Words("other", "其他"), _ANY)

_BY_WORD: Final = (
    (re.compile(r"^loss"), LOSS),
    (re.compile(r"expert"), EXPERTS),
    (re.compile(r"norm|\bln(_|\b)"), NORMS),
    (re.compile(r"attention|attn"), ATTENTION),
    (re.compile(r"mlp|feed_?forward|ffn|dense|\bfc[12]|intermediate|\bwi\b|\bwo\b"), MLP),
    (re.compile(r"lm_head|output_layer|embed_out|\bhead\b|\bcls\b"), HEAD),
    (re.compile(r"embed|wte|wpe|shared\.weight"), EMBEDDING),
)
_TILED: Final = re.compile(r"loss: (hidden states of the labels|targets|logsumexp|entropies|positions with a label)")
_LAYER_ITSELF: Final = re.compile(r"\*(:| |$)|\.\d+(:| |$)")


def place_of(name: str) -> Place:
    """Return the place of a row by its name; `OTHER` if the name tells none."""
    module = name.split("(")[0]
    if module.startswith("reference model: "):
        return REFERENCE
    if _TILED.match(module):
        return TILED_HEAD
    if module.startswith("loss"):
        return LOSS
    if _LAYER_ITSELF.search(module.split(".weight")[0]) and "*." not in module:
        return BETWEEN
    lowered = re.sub(r"([a-z])([A-Z])", r"\1_\2", module).lower()
    path = lowered.split(":")[0]
    inner = path.split("*.", 1)[-1]
    return next((place for word, place in _BY_WORD if word.search(inner)), OTHER)
