"""Encoder and decoder as stages: halves that are not equal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from memcalc.errors import InputError
from memcalc.explanation.exact import ratio_step
from memcalc.explanation.step import Step
from memcalc.explanation.topic import Asked, Case, Quoted, Rule, Topic
from memcalc.explanation.words import Words

if TYPE_CHECKING:
    from memcalc.estimation.report import Report

_LAYERS: Final = "4h² of attention and 8h² of an MLP; a decoder layer has 4h² of cross-attention more (formula)"

WEIGHTS: Final = Rule(
    title=Words("A decoder layer has a third more weights", "解码器层的权重多三分之一"),
    formula="(4 + 4 + 8)/(4 + 8)",
    unit="ratio",
    counts=Words(
        "in units of h²: self-attention 4, cross-attention 4, an MLP of width 4h 8.",
        "以 h² 为单位：自注意力 4、交叉注意力 4、宽度 4h 的 MLP 8。",
    ),
    leaves_out=Words(
        "the embedding and the output head, which are in the first and the last stage; gated MLPs; heads wider than h/a.",
        "首末阶段的词嵌入和输出层；门控 MLP；比 h/a 更宽的头。",
    ),
    quoted=Quoted({}, 4 / 3, 0, _LAYERS),
)
ACTIVATIONS: Final = Rule(
    title=Words("And it saves two fifths more activations", "保存的激活值约多四成"),
    formula="(11 + 11 + 19 + 6)/(11 + 19 + 4)",
    unit="ratio",
    counts=Words(
        "in units of sbh, Korthikanti's: attention 11, MLP 19, a norm 2; the decoder has one attention and one norm more.",
        "以 sbh 为单位（Korthikanti）：注意力 11、MLP 19、每个归一化 2；解码器多一个注意力和一个归一化。",
    ),
    leaves_out=Words(
        "that encoder and decoder mostly have sequences of other lengths, which decides more than the layers do; relative "
        "positions, and the encoder's output, which every decoder layer reads.",
        "编码器与解码器的序列长度通常不同，这比层本身影响更大；相对位置编码；以及每个解码器层都要读取的编码器输出。",
    ),
    quoted=Quoted({}, 47 / 34, 0, "terms of Korthikanti et al., arXiv 2205.05198, section 4.1 (formula)"),
)
_WEIGHTS: Final = Words("weights of the decoder's layers over the encoder's", "解码器层与编码器层的权重之比")
_SAVED: Final = Words("saved by the decoder's layers over the encoder's", "解码器层与编码器层保存的激活值之比")


def weights(asked: Asked) -> Step:
    """Return the ratio of the decoder layers' weights to the encoder layers'."""
    return _ratio(asked, _WEIGHTS, "parameters")


def saved(asked: Asked) -> Step:
    """Return the ratio of the bytes that decoder layers save to those of encoder layers."""
    return _ratio(asked, _SAVED, "saved_activations")


def _ratio(asked: Asked, words: Words, component: str) -> Step:
    decoder, encoder = (_of_stack(asked.report, stack, component) for stack in ("decoder", "encoder"))
    if not decoder or not encoder:
        name = asked.report.model.name
        raise InputError(f"--model {name}: has no encoder beside a decoder; allowed: t5-large, bart-large, …")
    return ratio_step(asked, words, "decoder/encoder", decoder, encoder)


def _of_stack(report: Report, stack: str, component: str) -> int:
    """Return the bytes of one component in the equal layers of a stack."""
    own = (item for item in report.items if item.component == component and "*" in item.name)
    return sum(item.nbytes for item in own if stack in item.name.split("*")[0].split("."))


TOPIC: Final = Topic(
    name="encoder-decoder-stages",
    title=Words("An encoder and a decoder as pipeline stages", "把编码器和解码器作为流水线阶段"),
    summary=Words("why T5's two halves are unequal stages", "为什么 T5 的两半不是均等的阶段"),
    text=(
        Words(
            "A pipeline is as fast as its slowest stage and as large as its largest. Cutting an encoder-decoder between its "
            "two stacks gives unequal halves: decoder layers have cross-attention on top, and the decoder's stage has the "
            "output head and the loss. Equal stages need fewer decoder layers than encoder layers on a GPU.",
            "流水线的速度取决于最慢的阶段，显存取决于最大的阶段。在编码器和解码器之间切开会得到不均等的两半："
            "解码器层多了交叉注意力，"
            "而且解码器阶段还有输出层和损失。要让各阶段均衡，每张 GPU 上的解码器层应少于编码器层。",
        ),
        Words(
            "Every decoder layer reads the encoder's output, and a stage sends to the next stage alone. So the output travels "
            "through all stages of the decoder: each of them receives two tensors of a micro-batch and sends two, and two "
            "gradients come back, 2·b·s·h elements where the encoder's stages send b·s·h. Each stage adds to the gradient of "
            "the output what its own layers give, and only the encoder's last stage has all of it.",
            "每个解码器层都要读取编码器输出，而一个阶段只向下一个阶段发送。因此编码器输出要穿过所有解码器阶段："
            "每个解码器阶段对每个微批次接收两个张量、发送两个张量，返回的梯度也是两个；编码器阶段发送 b·s·h 个元素，"
            "解码器阶段则发送 2·b·s·h 个。每个阶段把自己各层的贡献累加到编码器输出的梯度上，"
            "只有编码器的最后一个阶段得到完整的梯度。",
        ),
        Words(
            "Whisper's encoder reads spectrograms: its hidden states and its output have 1500 places, however short the "
            "transcript is. So its stages have most of the work, and the table of tokens is used at two places alone.",
            "Whisper 的编码器读取频谱图：无论文本多短，它的隐藏状态和输出都有 1500 个位置。"
            "因此编码器阶段承担大部分计算，词嵌入表也只用在两处。",
        ),
        Words(
            "The table of tokens is used at three places: before the encoder, before the decoder, and as the head. Each of "
            "these stages has a copy with states of its own, and an all-reduce sums the gradients of the copies in every "
            "step. `memcalc estimate -m t5-large --gpus 8 --pp 4 --zero 2 --global-batch-size 32 --all-ranks` shows the "
            "stages side by side, and --encoder-stages moves the cut between the stacks. The numbers here are of one GPU "
            "that has both stacks.",
            "词嵌入表用在三处：编码器之前、解码器之前，以及输出层。这些阶段各有一份副本和自己的优化器状态，"
            "每一步都用 all-reduce 对各副本的梯度求和。"
            "`memcalc estimate -m t5-large --gpus 8 --pp 4 --zero 2 --global-batch-size 32 --all-ranks` 并列显示各个阶段，"
            "--encoder-stages 可移动两个堆栈之间的切分点。这里的数字来自同时含两个堆栈的单卡。",
        ),
    ),
    cases=(
        Case(
            WEIGHTS,
            weights,
            Words(
                "The MLP's width and the heads' are the model's own, and norms count.",
                "MLP 宽度和头的宽度因模型而异，归一化也计入。",
            ),
        ),
        Case(
            ACTIVATIONS,
            saved,
            Words(
                "Relative positions (T5) are s² tensors of self-attention alone, which both stacks have. The paper's layers "
                "have dropout everywhere, and its norms keep 16 bits: T5's run in fp32, and a fused attention keeps no scores.",
                "相对位置（T5）只是自注意力中的 s² 张量，两个堆栈都有。论文中的层处处有 dropout，归一化保留 16 位；"
                "T5 的归一化以 fp32 计算，融合注意力不保留分数。",
            ),
        ),
    ),
    model="t5-large",
    options={"seq_len": 512},
)
