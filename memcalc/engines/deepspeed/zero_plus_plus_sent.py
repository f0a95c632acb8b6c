"""The collectives of a step with parts of ZeRO++: what runs have sent, by group of ranks."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final, NamedTuple

from memcalc.core.dims import numel
from memcalc.engines.deepspeed.collectives import step_of_stage_3
from memcalc.engines.deepspeed.quantizer import SOURCE as QUANTIZER
from memcalc.engines.deepspeed.zero_layout import STAGE_3
from memcalc.engines.deepspeed.zero_plus_plus import BETWEEN, CODES, INSIDE, SCALES, SECONDARY
from memcalc.layout.collectives import Collective
from memcalc.layout.layer_kinds import elements_of, shares_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from memcalc.core.tensor import Sent
    from memcalc.inputs.model import Model
    from memcalc.layout.layer_kinds import Shares
    from memcalc.setup.setup import Setup

_COALESCED: Final = "deepspeed/runtime/comm/coalesced_collectives.py"


class _Group(NamedTuple):
    """Ranks that send to one another."""

    ranks: int
    apart: int
    """The distance of two neighbours in rank order."""
    name: str


def of_runs(model: Model, setup: Setup, first: Iterable[Sent], later: Iterable[Sent]) -> list[Collective]:
    """Return what the first micro-batch's run and all later ones' have sent, and what is sent in the step."""
    times = Counter[_Call]()
    for sent, micro_batches in ((first, 1), (later, setup.micro_batches - 1)):
        for call in map(_call, sent):
            times[call] += micro_batches
    calls, elements = Counter[_Call](), Counter[_Call]()
    for call, count in times.items():
        if count:
            calls[call._replace(elements=0)] += count
            elements[call._replace(elements=0)] += count * call.elements
    groups = groups_of(setup)
    made = [_collective(model, setup, call, count, elements[call], groups[call.axis]) for call, count in calls.items()]
    return [*sorted(made, key=lambda one: (one.phase == "backward", one.collective)), *step_of_stage_3(model, setup)]


class _Call(NamedTuple):
    """The kind of a call, by which calls count together, and the elements of one."""

    axis: str
    kind: str
    name: str
    phase: str
    dtype: str
    itemsize: int
    elements: int


def _call(sent: Sent) -> _Call:
    return _Call(
        sent.axis, sent.kind, sent.name, sent.phase, sent.dtype.name, sent.dtype.itemsize, numel(sent.shape)[0]
    )


def groups_of(setup: Setup) -> dict[str, _Group]:
    """Return the groups of ranks by what a run records for them: neighbours share a second partition and a node
    (utils/groups.py, _create_zero_param_parallel_group and _get_local_all_to_all_group)."""
    node = setup.gpus_per_node
    return {
        "dp": _Group(setup.shards, 1, ""),
        SECONDARY: _Group(setup.zero_hpz_partition_size, 1, " of second partitions"),
        INSIDE: _Group(node, 1, ", inside a node"),
        BETWEEN: _Group(setup.gpus // node, node, ", between nodes"),
    }


_NAMES: Final = {
    ("all_gather", "forward"): "parameters",
    ("all_gather", "backward"): "parameters released since forward",
    ("reduce_scatter", "backward"): "gradient buckets",
    ("all_to_all", "backward"): "gradients",
}


def _collective(model: Model, setup: Setup, call: _Call, count: int, elements: int, group: _Group) -> Collective:
    name = f"{_NAMES[call.kind, call.phase]}{group.name}"
    bits = {CODES: "int4 codes" if call.kind == "all_to_all" else "int8 codes", SCALES: "scales"}.get(call.name, "")
    payload = elements * call.itemsize
    return Collective(
        "dp", call.kind, f"{name}: {bits}" if bits else name, call.phase, call.dtype, group.ranks, count, payload,  # type: ignore[arg-type]
        f"{elements}·{call.itemsize} B", shares=_shares(model, setup, call.kind),
        source=_COALESCED if call.kind == "all_to_all" else QUANTIZER if bits else STAGE_3,
        overlap=call.phase, apart=group.apart,  # type: ignore[arg-type]
    )  # fmt: skip


def _shares(model: Model, setup: Setup, kind: str) -> Shares:
    """Return the layers' shares of a collective, in proportion to the parameters that are gathered or reduced."""
    program, least = model.program, setup.param_persistence_threshold or 0
    if kind == "all_gather":
        return shares_of(program.weights(), sent=lambda w: elements_of(w) if elements_of(w) > least else 0)
    return shares_of(program.weights(), sent=lambda w: elements_of(w) if program.gets_gradient(w) else 0)
