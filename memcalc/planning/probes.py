"""Runs without a pipeline, which stand for the layers of many layouts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from memcalc.estimation.report import Report
from memcalc.planning.alone import saved_of, single
from memcalc.planning.stages import Least, least_of
from memcalc.setup.resolved import resolve
from memcalc.timing.kernels import Unknown, products
from memcalc.timing.places import head_seconds, seconds_by_place
from memcalc.timing.rank import rank_time
from memcalc.timing.step import rates_of
from memcalc.units import MICRO

if TYPE_CHECKING:
    from memcalc.inputs.model import Model
    from memcalc.inputs.options import Options
    from memcalc.planning.layouts import Layout
    from memcalc.tape.runs import Trace
    from memcalc.timing.kernels import Rates
    from memcalc.timing.rank import RankTime

_REDUCES: Final = "reduces gradients"
"""The kernels of FSDP2's hook around a layer's backward, by their name in a run (memcalc/engines/fsdp2/step.py)."""
EXACT: Final = 1 - 1e-9
"""The share of a sum that its parts reach in another order of additions."""


class Probe(NamedTuple):
    """A run of one micro-batch without a pipeline, or with two stages if an engine has no such run."""

    seconds: float
    """The seconds of all its kernels, and of what they wait for."""
    attention: float
    """The part of `seconds` that fused attention takes."""
    layers: Least
    """The seconds of a layer's forward and backward."""
    head: float
    """The seconds of the kernels after the layers, and of their backward."""
    saved: Least
    """The bytes that a layer saves for backward."""


_NONE: Final = Least(0.0, 0.0, 1)
NO_PROBE: Final = Probe(0.0, 0.0, _NONE, 0.0, _NONE)


def probe_key(layout: Layout) -> tuple[Any, ...]:
    """Return what a probe depends on."""
    return (
        layout.gpu, layout.engine, layout.tp, layout.cp, layout.ep, layout.sequence_parallel, layout.recompute,
        layout.micro_batch_size, layout.engine == "deepspeed" and layout.pp > 1,
    )  # fmt: skip


def probe_options(base: Options, layout: Layout) -> Options:
    """Return the options of the run that stands for a layout: its axes without pipeline and shards, and one micro-batch,
    whose gradients are added to no others."""
    # without slices DeepSpeed's GPTModel is there for stages only
    stages = 2 if layout.engine == "deepspeed" and layout.pp > 1 and layout.tp == 1 else 1
    zero = {"fsdp1": 2, "fsdp2": 2}.get(layout.engine, 0)
    dp = layout.ep * (1 if layout.engine == "none" else 2)
    tp, gpus = layout.tp, layout.tp * stages * layout.cp * dp
    return single(base)._replace(
        engine=layout.engine, gpu=layout.gpu, gpus=gpus, tp=tp, pp=stages, cp=layout.cp, ep=layout.ep, etp=base.etp,
        zero=zero, sequence_parallel=layout.sequence_parallel, recompute=layout.recompute,
        cp_comm_type=base.cp_comm_type if layout.cp > 1 else None, micro_batch_size=layout.micro_batch_size,
        global_batch_size=dp * layout.micro_batch_size,
    )  # fmt: skip


def probe(model: Model, base: Options, layout: Layout) -> Probe:
    """Return the probe that stands for a layout. Raise InputError if it cannot run."""
    report = Report(model, resolve(probe_options(base, layout), model))
    assert report.gpu is not None
    rates = rates_of(report.setup, report.gpu)
    computing = attention = 0.0
    of_layers: list[float] = []
    head = in_each_layer = 0.0
    for rank in report.each_rank():
        timed = rank_time(rank, rates)
        if isinstance(timed, Unknown):
            return NO_PROBE
        sums, run = timed.sums, rank.rank.profiles[0].run
        exposed, in_each_layer = _exposed(rank, timed, layout.engine)
        run, once, starting = _without_reductions(run, report, rates)
        backward = sums.backward + sums.recomputation - once
        computing += (
            max(sums.forward, sums.starting_forward) + max(backward, sums.starting_backward - starting) + exposed
        )
        fused = products([one for one in rank.computed if one.kind == "attention"], rates)
        assert not isinstance(fused, Unknown)
        attention += sum(item.seconds for item in fused)
        places, head = seconds_by_place(run, report.setup, rates), head_seconds(run, report.setup, rates)
        assert not isinstance(places, Unknown)
        assert not isinstance(head, Unknown)
        numbers = sorted({place.layer for place in places if place.layer is not None})
        of_layers += [sum(s for place, s in places.items() if place.layer == layer) for layer in numbers]
    period = len(report.rank.profiles[0].run.middle.early) or 1
    layers = least_of([seconds + in_each_layer for seconds in of_layers], period)
    return Probe(computing * EXACT, attention, layers, head, saved_of(report))


def _without_reductions(run: Trace, report: Report, rates: Rates) -> tuple[Trace, float, float]:
    """Return a run without the kernels around FSDP2's reductions, the seconds of these, and those that the CPU takes to start
    them. A step has them once, however many micro-batches it has."""
    early, _, more = run.middle
    rest = run._replace(streamed=tuple(one for one in run.streamed if one.name != _REDUCES))
    reductions = run._replace(streamed=tuple(one for one in run.streamed if one.name == _REDUCES), work=())
    places = seconds_by_place(reductions, report.setup, rates)
    if isinstance(places, Unknown):
        return rest, 0.0, 0.0
    many = sum(1 + more * (one.layer in early) for one in reductions.streamed)
    starting = many * rates.speed.launch.value * MICRO
    return rest, sum(seconds * (1 + more * (place.layer in early)) for place, seconds in places.items()), starting


def _exposed(report: Report, timed: RankTime, engine: str) -> tuple[float, float]:
    """Return the seconds of communication within the model that nothing hides, and the part of them that every layer has."""
    axes = ("tp", "cp", "ep") if engine == "megatron" else ("tp", "cp")
    exposed = in_each_layer = 0.0
    for collective, item in zip(report.collectives, timed.sent, strict=True):
        inside = collective.axis in axes and collective.phase in ("forward", "backward") and not collective.once
        if inside and collective.overlap == "exposed":
            exposed += item.seconds
            if collective.layers == report.model.layers:
                in_each_layer += item.seconds / collective.layers
    return exposed, in_each_layer
