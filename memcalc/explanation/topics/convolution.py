"""Convolutions: parameters, the size of a feature map, the receptive field."""

from __future__ import annotations

from typing import Final

from memcalc.explanation.exact import exact_step
from memcalc.explanation.of_layers import field, first, kept_of_first, parameters_of
from memcalc.explanation.step import Step
from memcalc.explanation.topic import Asked, Case, Quoted, Rule, Topic
from memcalc.explanation.words import Words

NOTES: Final = "CS231n notes, Convolutional Networks"

PARAMETERS: Final = Rule(
    title=Words("(k²·in + 1)·out parameters", "(k²·输入通道 + 1)·输出通道 个参数"),
    formula="(Q²·I + 1)·O",
    unit="parameters",
    counts=Words(
        "one weight for each place of the kernel and each input channel, and one bias, for each filter.",
        "每个滤波器：卷积核的每个位置、每个输入通道一个权重，再加一个偏置。",
    ),
    leaves_out=Words(
        "a convolution without biases, as before a batch norm; kernels that are not square.",
        "没有偏置的卷积（如批归一化之前）；非正方形的卷积核。",
    ),
    quoted=Quoted({"Q": 11, "I": 3, "O": 96}, 34_944, 0, f"{NOTES}, parameter sharing"),
)
MAP: Final = Rule(
    title=Words("(W + 2P - k)/S + 1 places in a row", "每行 (W + 2P - k)/S + 1 个位置"),
    formula="(W + 2·Z - Q)/S + 1",
    unit="elements",
    counts=Words(
        "the places that a kernel has along one side of the image. A feature map has the square of it, for each filter.",
        "卷积核在图像一边上的位置数。特征图每个滤波器有其平方个值。",
    ),
    leaves_out=Words("dilation, and a remainder: torch rounds down.", "空洞卷积，以及余数：torch 向下取整。"),
    quoted=Quoted({"W": 227, "Z": 0, "Q": 11, "S": 4}, 55, 0, f"{NOTES}, spatial arrangement"),
)
FIELD: Final = Rule(
    title=Words("1 + n·(k - 1) inputs in a row are seen", "每行看到 1 + n·(k - 1) 个输入"),
    formula="1 + X·(Q - 1)",
    unit="elements",
    counts=Words(
        "the receptive field of equal convolutions of stride 1 on top of each other, along one side.",
        "步长为 1 的相同卷积叠加后，一边上的感受野。",
    ),
    leaves_out=Words(
        "strides, which multiply what later layers add; pooling; dilation.",
        "步长（会放大后面各层的增量）、池化、空洞。",
    ),
    quoted=Quoted({"X": 3, "Q": 3}, 7, 0, f"{NOTES}, layer patterns"),
)
BYTES: Final = Rule(
    title=Words("2 bytes for each value of a feature map", "特征图每个值 2 字节"),
    formula="2·b·O·((W + 2·Z - Q)/S + 1)²",
    unit="bytes",
    counts=Words(
        "one map in 16 bits for each filter and image: what is kept from forward to backward if each layer of a convolution and "
        "an activation keeps one map.",
        "16 位下每张图像每个滤波器一张特征图：若卷积加激活只保存一张图，这就是从前向保存到反向的内容。",
    ),
    leaves_out=Words(
        "a second map where a norm between them keeps its input; the 8-byte places that max pooling keeps.",
        "中间的归一化层保存输入时的第二张图；最大池化保存的 8 字节位置。",
    ),
    quoted=Quoted(
        {"b": 32, "O": 64, "W": 224, "Z": 1, "Q": 3, "S": 1},
        205_520_896,
        0,
        "VGG-16's first map, 32·64·224·224·2 B (formula)",
    ),
)
_OF_BYTES: Final = Words(
    "left for backward by the first convolution and the layers behind it that move no window",
    "第一个卷积层及其后不移动窗口的层为反向保存的内容",
)
_OF_PARAMETERS: Final = Words("parameters of the first convolution", "第一个卷积层的参数")
_OF_MAP: Final = Words("places of the first convolution along the height", "第一个卷积层沿高度方向的位置数")
_OF_FIELD: Final = Words("inputs that the convolutions see along the height", "这些卷积沿高度方向看到的输入数")


def _parameters(asked: Asked) -> Step:
    return exact_step(asked, _OF_PARAMETERS, parameters_of(asked.report, "conv2d"), "parameters")


def _map(asked: Asked) -> Step:
    return exact_step(asked, _OF_MAP, {"height": first(asked.report, "conv2d").out[1].size}, "elements")


def _field(asked: Asked) -> Step:
    return exact_step(asked, _OF_FIELD, field(asked.report), "elements")


def _bytes(asked: Asked) -> Step:
    return exact_step(asked, _OF_BYTES, kept_of_first(asked.report))


TOPIC: Final = Topic(
    name="convolution",
    title=Words("Convolutions", "卷积"),
    summary=Words("parameters, the size of a feature map, the receptive field", "参数量、特征图大小、感受野"),
    text=(
        Words(
            "A filter slides over the image and has one output for each place. All places share its weights, so parameters do "
            "not grow with the image, and FLOPs and saved bytes do: 2·k²·in FLOPs for each value of the map, and for backward "
            "the input of the convolution.",
            "滤波器在图像上滑动，每个位置产生一个输出。所有位置共享权重，所以参数量不随图像增大，而 FLOP 和保存的字节会：特征图"
            "的每个值需要 2·k²·输入通道 次 FLOP，反向需要卷积的输入。",
        ),
        Words(
            "Training VGG-16 keeps the maps of its first layers: few parameters, most of the memory. Its linear layers have "
            "most of the parameters and almost no maps. `memcalc estimate --layers FILE` has the table.",
            "训练 VGG-16 时，前几层的特征图占用大部分显存，参数却很少；线性层有大部分参数，却几乎没有特征图。"
            "见 `memcalc estimate --layers FILE` 的表格。",
        ),
    ),
    cases=(
        Case(
            PARAMETERS,
            _parameters,
            Words(
                "The first convolution has no biases, or no square kernel.",
                "第一个卷积层没有偏置，或卷积核不是正方形。",
            ),
        ),
        Case(
            MAP,
            _map,
            Words(
                "A window that does not fit whole has no place, or is dilated.",
                "放不下的窗口没有位置，或使用了空洞卷积。",
            ),
        ),
        Case(
            BYTES,
            _bytes,
            Words(
                "A batch norm keeps its input besides, an activation that is not in place its output; the precision may not "
                "be 16 bits.",
                "批归一化还会保存输入，非原地的激活函数保存输出；精度也可能不是 16 位。",
            ),
        ),
        Case(
            FIELD,
            _field,
            Words(
                "The convolutions have other kernels or strides than the first one.", "这些卷积的核或步长与第一个不同。"
            ),
        ),
    ),
    model={
        "model_type": "layers",
        "name": "alexnet-stem",
        "input": [3, 227, 227],
        "layers": [
            {"conv2d": {"out": 96, "kernel": 11, "stride": 4}},
            "relu",
            {"maxpool2d": 3},
            "flatten",
            {"linear": 10},
        ],
    },
)
