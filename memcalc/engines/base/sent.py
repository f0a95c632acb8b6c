"""The collectives of a step, from what a run of a rank's program has sent."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final, NamedTuple

from memcalc.core.dims import evaluate, formula, numel
from memcalc.layout.collectives import Collective

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from memcalc.core.dims import Poly, Shape
    from memcalc.core.tensor import Sent
    from memcalc.setup.setup import Setup
    from memcalc.tape.profile import Profile
    from memcalc.tape.runs import Middle


class Group(NamedTuple):
    """The ranks of a collective: the axis that it is reported under, their number, and the engine's source."""

    axis: str
    ranks: int
    source: str


def collectives_of_run(
    profile: Profile, setup: Setup, layers: str, groups: Mapping[str, Group], micro_batches: int = 1
) -> list[Collective]:
    """Return every call over one of the groups, those of equal layers as one collective. `layers` is the name of the
    stack.

    `micro_batches` is the number of micro-batches in the run, all alike.
    """
    noted = _with_equal_shapes(sent for sent in profile.run.sent if sent.axis in groups)
    calls, of_layers = _calls(noted, profile.run.middle), _layers(noted, profile.run.middle)
    times = setup.micro_batches, micro_batches
    return [
        _collective(sent, n * times[0] // times[1], setup, layers, groups[sent.axis])._replace(layers=of_layers[sent])
        for sent, n in calls.items()
    ]


def _with_equal_shapes(noted: Iterable[Sent]) -> list[Sent]:
    """Return the calls with one shape for all that have equal dims. Layers may make a dim of their own for the same
    size."""
    shapes: dict[tuple[tuple[str, Poly], ...], Shape] = {}
    return [
        sent._replace(shape=shapes.setdefault(tuple((d.name, d.poly) for d in sent.shape), sent.shape))
        for sent in noted
    ]


def _calls(noted: Iterable[Sent], middle: Middle) -> Counter[Sent]:
    """Count the calls of the real stack; those of equal layers count together."""
    calls: Counter[Sent] = Counter()
    for sent in noted:
        repeated = sent.layer is not None and sent.layer in middle.early
        calls[sent._replace(layer=None if sent.layer is None else 0)] += 1 + middle.more if repeated else 1
    return calls


def _layers(noted: Iterable[Sent], middle: Middle) -> Counter[Sent]:
    """Count the layers of the real stack that send each call: not all layers of a model with experts have them."""
    out: Counter[Sent] = Counter()
    for sent in set(noted):
        if sent.layer is not None:
            out[sent._replace(layer=0)] += 1 + middle.more if sent.layer in middle.early else 1
    return out


def _collective(sent: Sent, calls: int, setup: Setup, layers: str, group: Group) -> Collective:
    one = evaluate(numel(sent.shape)[1], setup.micro_batch_size, setup.tokens_per_part) * sent.dtype.itemsize
    each = f"{formula(sent.shape)}·{sent.dtype.itemsize} B"
    return Collective(
        group.axis, sent.kind, sent.name, sent.phase, sent.dtype.name, group.ranks, calls, calls * one,  # type: ignore[arg-type]
        f"{calls}·{each} = {calls}·{one} B", None if sent.layer is None else layers, source=group.source, each=each,
    )  # fmt: skip


# --- collectives of transformers' modules under tensor and context parallelism

_TRANSFORMERS: Final = "transformers/distributed/tensor_parallel.py"
_EXPERTS: Final = "transformers/distributed/expert_parallel.py"
_TORCH: Final = "torch/distributed/tensor/parallel/style.py"
_RING: Final = "torch/distributed/tensor/experimental/_context_parallel/_attention.py"


def of_modules(profile: Profile, setup: Setup, layers: str) -> list[Collective]:
    """Return what modules send: by transformers' plan, or by torch's with sequence parallelism, by the ring of shared
    sequences, and by AllToAllEP."""
    groups = _groups(setup) | {"ep": Group("ep", setup.ep, _EXPERTS)}
    return _of_step(profile, setup, layers, groups, len(profile.run.forward_ends) or 1)


def of_stages(profile: Profile, setup: Setup, run_on_paper: int) -> list[Collective]:
    """Return what modules send in a pipeline rank's step. `run_on_paper` of its equal micro-batches were run."""
    return _of_step(profile, setup, "model.layers.*", _groups(setup), run_on_paper)


def _of_step(
    profile: Profile, setup: Setup, layers: str, groups: Mapping[str, Group], run_on_paper: int
) -> list[Collective]:
    """Return the collectives of all micro-batches, and those of the step's one reduction."""
    run = profile.run
    noted, once_a_step = (
        _with_equal_shapes(sent for sent in run.sent if sent.axis in groups),
        _with_equal_shapes(run.sent_once),
    )
    calls = _calls(noted, run.middle)
    for sent, of_run in calls.items():
        assert not of_run % run_on_paper
        calls[sent] = of_run // run_on_paper * setup.micro_batches
    return [
        _collective(sent, n, setup, layers, groups[sent.axis])._replace(layers=of_layers[sent], once=once)
        for once, own, counted in ((False, noted, calls), (True, once_a_step, _calls(once_a_step, run.middle)))
        for of_layers in (_layers(own, run.middle),)
        for sent, n in counted.items()
    ]


def _groups(setup: Setup) -> dict[str, Group]:
    plan = _TORCH if setup.sequence_parallel else _TRANSFORMERS
    return {"tp": Group("tp", setup.tp, plan), "cp": Group("cp", setup.cp, _RING)}
