"""Networks of textbooks and papers as files of layers, for the tests."""

from __future__ import annotations

from typing import Any

import yaml


def content(text: str) -> dict[str, Any]:
    return yaml.safe_load(text)


def _vgg(*blocks: tuple[int, int]) -> dict[str, Any]:
    """Simonyan and Zisserman, "Very Deep Convolutional Networks", table 1, as torchvision builds it."""
    layers: list[Any] = []
    for channels, times in blocks:
        conv = {"conv2d": {"out": channels, "kernel": 3, "padding": 1}}
        layers += [{"repeat": times, "layers": [conv, {"relu": {"inplace": True}}]}, {"maxpool2d": 2}]
    head = [4096, 4096]
    layers += [{"adaptiveavgpool2d": 7}, "flatten"]
    for width in head:
        layers += [{"linear": width}, {"relu": True}, {"dropout": 0.5}]
    return {"input": [3, 224, 224], "layers": [*layers, {"linear": 1000}]}


VGG_11 = _vgg((64, 1), (128, 1), (256, 2), (512, 2), (512, 2))
VGG_16 = _vgg((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))

LENET_5 = content("""
input: [1, 32, 32]
layers:
  - conv2d: {out: 6, kernel: 5}
  - tanh
  - avgpool2d: 2
  - conv2d: {out: 16, kernel: 5}
  - tanh
  - avgpool2d: 2
  - flatten
  - linear: 120
  - tanh
  - linear: 84
  - tanh
  - linear: 10
""")

ALEXNET = content("""
input: [3, 224, 224]
layers:
  - conv2d: {out: 64, kernel: 11, stride: 4, padding: 2}
  - relu: {inplace: true}
  - maxpool2d: {kernel: 3, stride: 2}
  - conv2d: {out: 192, kernel: 5, padding: 2}
  - relu: {inplace: true}
  - maxpool2d: {kernel: 3, stride: 2}
  - conv2d: {out: 384, kernel: 3, padding: 1}
  - relu: {inplace: true}
  - conv2d: {out: 256, kernel: 3, padding: 1}
  - relu: {inplace: true}
  - conv2d: {out: 256, kernel: 3, padding: 1}
  - relu: {inplace: true}
  - maxpool2d: {kernel: 3, stride: 2}
  - adaptiveavgpool2d: 6
  - flatten
  - dropout: 0.5
  - linear: 4096
  - relu: {inplace: true}
  - dropout: 0.5
  - linear: 4096
  - relu: {inplace: true}
  - linear: 1000
""")

RESNET_BLOCKS = content("""
input: [3, 64, 64]
layers:
  - conv2d: {out: 16, kernel: 7, stride: 2, padding: 3, bias: false}
  - batchnorm2d
  - relu: {inplace: true}
  - maxpool2d: {kernel: 3, stride: 2, padding: 1}
  - repeat: 2
    layers:
      - residual:
          - conv2d: {out: 16, kernel: 3, padding: 1, bias: false}
          - batchnorm2d
          - relu: {inplace: true}
          - conv2d: {out: 16, kernel: 3, padding: 1, bias: false}
          - batchnorm2d
      - relu: {inplace: true}
  - residual:
      - conv2d: {out: 32, kernel: 3, stride: 2, padding: 1, bias: false}
      - batchnorm2d
      - relu
      - conv2d: {out: 32, kernel: 3, padding: 2, dilation: 2, bias: false}
      - groupnorm: 8
    shortcut:
      - conv2d: {out: 32, kernel: 1, stride: 2}
      - groupnorm: {groups: 4, affine: false}
  - gelu
  - adaptiveavgpool2d: 1
  - flatten
  - linear: 10
""")

U_NET = content("""
input: [3, 64, 96]
layers:
  - conv2d: {out: 16, kernel: 3, padding: 1}
  - leakyrelu
  - concat:
      - []
      - - maxpool2d: 2
        - conv2d: {out: 32, kernel: 3, padding: 1}
        - silu
        - concat:
            - [identity]
            - - avgpool2d: {kernel: 3, stride: 2, padding: 1}
              - conv2d: {out: 64, kernel: [3, 5], padding: [1, 2]}
              - sigmoid
              - convtranspose2d: {out: 32, kernel: 3, stride: 2, padding: 1, output_padding: 1}
        - convtranspose2d: {out: 16, kernel: 2, stride: 2, bias: false}
  - conv2d: {out: 5, kernel: 1}
""")

TRANSFORMER = content("""
input: tokens
layers:
  - embedding: {vocab: 1000, size: 64}
  - repeat: 3
    layers:
      - residual: [layernorm, {attention: {heads: 4, causal: true}}, {dropout: 0.1}]
      - residual: [layernorm, {linear: 256}, gelu, {linear: 64}, {dropout: 0.1}]
  - layernorm
  - linear: {out: 1000, bias: false}
""")

LANGUAGE_MODEL = content("""
input: tokens
layers:
  - embedding: {vocab: 500, size: 32}
  - dropout: 0.2
  - lstm: {hidden: 48, layers: 2, dropout: 0.2}
  - dropout: 0.2
  - linear: 500
""")

BOTH_WAYS = content("""
input: [9, 12]
layers:
  - lstm: {hidden: 8, layers: 2, bidirectional: true, bias: false}
  - last
  - linear: 4
""")

GRU = content("""
input: [seq, 12]
layers:
  - gru: {hidden: 8, layers: 3, bidirectional: true, dropout: 0.1}
  - gru: {hidden: 5, bias: false}
  - linear: 4
loss: mse
""")

RNN = content("""
input: [seq, 12]
layers:
  - rnn: {hidden: 8, layers: 2}
  - rnn: {hidden: 8, nonlinearity: relu, bidirectional: true}
  - linear: 4
loss: mse
""")

PERCEPTRON = content("""
input: 784
layers:
  - linear: 256
  - batchnorm1d
  - relu
  - dropout: 0.3
  - linear: {out: 64, bias: false}
  - tanh
  - softmax
  - linear: 10
loss: mse
""")

SIGNALS = content("""
input: [4, 101]
layers:
  - conv1d: {out: 8, kernel: 5, stride: 2}
  - conv1d: {out: 8, kernel: 5, padding: same, dilation: 2}
  - batchnorm1d
  - relu
  - transpose: [1, 2]
  - layernorm
  - linear: 6
  - flatten
  - linear: 3
""")

GROUPS = content("""
input: [6, 20, 20]
layers:
  - conv2d: {out: 12, kernel: 3, groups: 3}
  - relu
  - convtranspose2d: {out: 8, kernel: 3, stride: 2, groups: 4}
  - adaptiveavgpool2d: [3, 2]
  - dropout: {p: 0.1, inplace: true}
  - flatten
  - linear: 7
""")

NETWORKS = {
    "lenet-5": LENET_5, "alexnet": ALEXNET, "vgg-11": VGG_11, "vgg-16": VGG_16, "resnet-blocks": RESNET_BLOCKS, "u-net": U_NET,
    "transformer": TRANSFORMER, "language-model": LANGUAGE_MODEL, "both-ways": BOTH_WAYS, "gru": GRU, "rnn": RNN,
    "perceptron": PERCEPTRON, "signals": SIGNALS, "groups": GROUPS,
}  # fmt: skip
SEQ = 7
"""The tokens of a sequence, where a network has any."""


def seq_of(network: dict[str, Any]) -> int | None:
    given = network["input"]
    return SEQ if given == "tokens" or (isinstance(given, list) and "seq" in given) else None
