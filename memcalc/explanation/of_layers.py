"""Letters and exact numbers of networks that a file lists layer by layer: of their first convolution, norm and recurrence."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod
from typing import TYPE_CHECKING, Any, Final

from memcalc.errors import InputError
from memcalc.estimation.layers import layer_rows
from memcalc.explanation.words import Words

if TYPE_CHECKING:
    from memcalc.estimation.report import Report
    from memcalc.families.base.layers.network import Placed

ALONE: Final = (
    "relu",
    "leakyrelu",
    "gelu",
    "silu",
    "sigmoid",
    "tanh",
    "dropout",
    "identity",
    "batchnorm2d",
    "syncbatchnorm",
    "groupnorm",
)
"""Layers that change no place of an image, so that convolutions around them are on top of each other."""
OF_FIRST: Final = Words("of the first convolution", "第一个卷积层")


def placed(report: Report) -> list[Placed]:
    """Return the layers. Raise InputError if the model is no network of a file."""
    if report.states_only or report.model.model_type != "layers":
        name = report.model.name or "--params"
        raise InputError(f"--model {name}: the rule is about a network of layers; allowed: --layers FILE")
    program: Any = report.model.program
    return list(program.network.layers)


def first(report: Report, *kinds: str) -> Placed:
    """Return the first layer of some kinds. Raise InputError if there is none."""
    for one in placed(report):
        if one.layer.kind in kinds:
            return one
    raise InputError(f"--layers: {report.model.name} has no {kinds[0]}; allowed: a network with one")


def stacked(report: Report) -> Iterator[Any]:
    """Yield the convolutions that are on top of each other from the first one on, up to another layer that moves a window."""
    started = False
    for one in placed(report):
        if one.layer.kind == "conv2d":
            started = True
            yield one.layer
        elif started and one.layer.kind not in ALONE:
            return
    if not started:
        first(report, "conv2d")


def _of_window(name: str) -> Callable[[Report], int]:
    def value(report: Report) -> int:
        layer: Any = first(report, "conv2d").layer
        return getattr(layer.windows()[0], name)

    return value


kernel, stride, padding = _of_window("kernel"), _of_window("stride"), _of_window("padding")


def channels_in(report: Report) -> int:
    """Return the channels that one filter of the first convolution sees."""
    one = first(report, "conv2d")
    layer: Any = one.layer
    return one.x[0].size // layer.groups


def filters(report: Report) -> int:
    return first(report, "conv2d").out[0].size


def height(report: Report) -> int:
    return first(report, "conv2d").x[1].size


def parameters_of(report: Report, *kinds: str) -> dict[str, int]:
    """Return the parameters of the first layer of some kinds, by their names."""
    one = first(report, *kinds)
    return {p.name: prod(d.size for d in p.shape) for p in one.layer.parameters(one.x)}


def kept_of_first(report: Report) -> dict[str, int]:
    """Return the bytes that the first convolution and the layers behind it, up to one that moves a window, leave for
    backward."""
    first(report, "conv2d")
    parts: dict[str, int] = {}
    for row in layer_rows(report):
        if parts and row.kind not in ALONE:
            break
        if parts or row.kind == "conv2d":
            parts[f"{row.name} {row.kind}"] = row.saved
    return parts


NORMS: Final = ("batchnorm2d", "syncbatchnorm", "batchnorm1d")


def normed(report: Report) -> int:
    """Return the channels of the first batch norm."""
    return first(report, *NORMS).x[0].size


def units(report: Report) -> int:
    """Return the hidden units of the first LSTM. Raise InputError for one with more layers or directions, or without biases."""
    layer: Any = first(report, "lstm").layer
    if layer.layers > 1 or layer.bidirectional or not layer.bias:
        raise InputError(
            "--layers: the rule is about an LSTM of one layer and one direction, with biases; allowed: such a one"
        )
    return layer.hidden


def features(report: Report) -> int:
    """Return the features of a step of the first LSTM."""
    return first(report, "lstm").x[1].size


def convolutions(report: Report) -> int:
    return sum(1 for _ in stacked(report))


def field(report: Report) -> dict[str, int]:
    """Return the parts of the side of the window of the input that one value of the last stacked convolution sees: 1, and what
    each convolution adds."""
    parts, step = {"1": 1}, 1
    for i, layer in enumerate(stacked(report), start=1):
        window = layer.windows()[0]
        parts[f"convolution {i}"] = (window.reach - 1) * step
        step *= window.stride
    return parts
