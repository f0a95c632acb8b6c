"""Exact numbers beside a rule of thumb, each read off a report."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

from memcalc.errors import InputError
from memcalc.explanation.folding import ITEMSIZES
from memcalc.explanation.step import Step
from memcalc.explanation.topic import Asked, Exact
from memcalc.explanation.words import Words

if TYPE_CHECKING:
    from memcalc.core.rows import Item
    from memcalc.estimation.report import Report
    from memcalc.layout.collectives import Collective
    from memcalc.setup.setup import Setup

STATES: Final = ("parameters", "gradients", "optimizer_states")
MEMCALC: Final = Words("memcalc, exactly: {what}", "memcalc 精确值：{what}")
_OF_STATES: Final = Words("weights, gradients and optimizer states", "权重、梯度和优化器状态")
_WITH_BUCKETS: Final = Words("the same and DDP's buckets", "同上，再加 DDP 的桶")
_SENT: Final = Words("sent by a GPU over {axis}", "一张 GPU 在 {axis} 轴上发送")
_SAVED: Final = Words("saved activations of the layers", "各层保存的激活值")
_LAYER: Final = Words(
    "sent by a GPU for one layer and micro-batch over {axis}", "一张 GPU 每层每个微批次在 {axis} 轴上发送"
)
_WEIGHTS: Final = Words("parameters of one layer", "一层的参数")
_BETWEEN: Final = Words("sent over one boundary for a micro-batch, both ways", "一个微批次在一个边界上双向发送")


def exact_step(asked: Asked, what: Words, parts: dict[str, int], unit: Any = "bytes", **values: object) -> Step:
    """Return a step whose result is the sum of named parts."""
    words = MEMCALC.said(asked.language, what=what.said(asked.language, **values))
    return Step(words, " + ".join(parts), " + ".join(map(str, parts.values())), sum(parts.values()), unit)


def ratio_step(asked: Asked, what: Words, formula: str, above: int | float, below: int | float) -> Step:
    """Return a step whose result is one number over another."""
    words = MEMCALC.said(asked.language, what=what.said(asked.language))
    return Step(words, formula, f"{above}/{below}", above / below, "ratio")


def states(asked: Asked) -> Step:
    """Return the bytes of weights, gradients and optimizer states: the most of each in a step."""
    return exact_step(asked, _OF_STATES, {name: asked.report.total(name) for name in STATES})


def states_and_buckets(asked: Asked) -> Step:
    """Return the bytes of weights, gradients, optimizer states, and the buckets that DDP reduces gradients in."""
    parts = {name: asked.report.total(name) for name in STATES}
    return exact_step(asked, _WITH_BUCKETS, {**parts, "buckets": _sum(buckets(asked.report))})


def buckets(report: Report) -> list[Item]:
    """Return the rows of DDP's buckets."""
    return [item for item in report.items if item.name.startswith("DDP buckets")]


def _sum(items: Iterable[Item]) -> int:
    return sum(item.nbytes for item in items)


def sent_over(axis: str) -> Exact:
    """Return the exact number of bytes that a GPU sends over an axis in a step, by collective."""

    def sent(asked: Asked) -> Step:
        own = [c for c in asked.report.collectives if c.axis == axis]
        check_sent(own, axis)
        parts: dict[str, int] = {}
        for c in own:
            parts[c.collective] = parts.get(c.collective, 0) + c.wire
        return exact_step(asked, _SENT, parts, axis=axis)

    return sent


def check_sent(own: list[Collective], axis: str) -> None:
    """Raise InputError if a setup sends nothing over an axis."""
    if not own:
        option = "gpus" if axis == "dp" else axis
        raise InputError(f"--{option} 1: nothing is sent; allowed: 2 or more")


def saved_in_layers(asked: Asked) -> Step:
    """Return the bytes that all layers save for backward, at the end of forward."""
    return exact_step(asked, _SAVED, {"saved_activations": layers_saved(asked.report)})


def layers_saved(report: Report) -> int:
    """Return the bytes that a rank's layers have saved at the end of forward, without what is outside them."""
    if report.states_only:
        raise InputError("--params: a bare number of parameters has no activations; allowed: --model")
    return _sum(item for item in report.items if item.component == "saved_activations" and ".*" in item.name)


def elements_of_a_layer(axis: str) -> Exact:
    """Return the elements that a GPU sends over an axis for one layer and micro-batch."""

    def sent(asked: Asked) -> Step:
        from memcalc.report.per_layer import shares

        own = [share for share in shares(asked.report) if share.collective.axis == axis and share.layers]
        check_sent([share.collective for share in own], axis)
        parts: dict[str, int] = {}
        for share in own:
            name = f"{share.collective.phase} {share.collective.collective}"
            parts[name] = parts.get(name, 0) + share.wire // ITEMSIZES[share.collective.dtype]
        return exact_step(asked, _LAYER, parts, "elements", axis=axis)

    return sent


def weights_of_a_layer(asked: Asked) -> Step:
    """Return the parameters of one layer: those of all equal layers divided by their number."""
    model = asked.report.model
    own = [weight for weight in model.weight_classes if "*" in weight.name]
    parts = {weight.name.rsplit("*.", 1)[-1].removesuffix(".weight"): _elements(model, weight) for weight in own}
    return exact_step(asked, _WEIGHTS, parts, "parameters")


def _elements(model: Any, weight: Any) -> int:
    from memcalc.core.dims import numel

    return model.copies(weight) * numel(weight.shape)[0] // model.layers


def boundaries_of(setup: Setup) -> int:
    """Return the number of boundaries that a micro-batch crosses from one rank to another."""
    from memcalc.pipelining.placement import stages
    from memcalc.pipelining.schedules import placement_of

    placement = placement_of(setup.schedule)
    within = 1 if placement == "in a V" else 0  # the last rank has the stages on both sides of the turn
    return stages(placement, setup.pp, setup.virtual_stages) - 1 - within


def elements_between_stages(asked: Asked) -> Step:
    """Return the elements that two stages send each other for one micro-batch: the sends of all ranks, divided by the
    boundaries."""
    report = asked.report
    sends = [c for rank in report.each_rank() for c in rank.collectives if (c.axis, c.collective) == ("pp", "send")]
    check_sent(sends, "pp")
    boundaries = report.setup.micro_batches * boundaries_of(report.setup)
    parts: dict[str, int] = {}
    for c in sends:
        parts[c.phase] = parts.get(c.phase, 0) + c.payload // ITEMSIZES[c.dtype]
    return exact_step(asked, _BETWEEN, {phase: n // boundaries for phase, n in parts.items()}, "elements")
