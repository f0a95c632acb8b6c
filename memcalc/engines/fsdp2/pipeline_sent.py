"""The collectives of a pipeline rank under FSDP2: hidden states for its neighbours, units of parameters and gradients,
and those of its layers' plans."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from memcalc.core.dims import evaluate, formula, numel
from memcalc.engines.base.clipping import norm_over_stages, norms
from memcalc.engines.base.sent import of_stages
from memcalc.engines.fsdp2.engine import sharded_dtype
from memcalc.engines.fsdp2.pipeline import STAGE, actions_of, paper_micro_batches
from memcalc.engines.fsdp2.sizes import padded_elements
from memcalc.engines.fsdp2.staged_rank import gradient_stays, handed, handed_shape, leads_to_itself
from memcalc.layout.collectives import Collective, Kind, Overlap
from memcalc.layout.layer_kinds import LayerKind, Shares, in_named_dims
from memcalc.pipelining.encoded import COPIES, ENCODED, EncodedStage, encoded_spans
from memcalc.pipelining.frozen_units import Part, gathers_of_frozen
from memcalc.pipelining.orders import WANTED, Wanted, gathers
from memcalc.pipelining.programs import HIDDEN_STATES
from memcalc.pipelining.schedules import flushes, of_each_chunk, placement_of, schedule_of, updates_of
from memcalc.setup.setup import DTYPES

if TYPE_CHECKING:
    from memcalc.core.dtypes import DType
    from memcalc.engines.fsdp2.staged_rank import StagedRank
    from memcalc.families.base.module import Weight
    from memcalc.pipelining.programs import Stage
    from memcalc.setup.setup import Setup
    from memcalc.tape.profile import Profile

_FSDP: Final = "torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py"


class Unit(NamedTuple):
    """Parameters that are gathered together, or whose gradients are reduced together."""

    elements: int
    """The number of elements, padded."""
    where: str
    in_words: str = "unit"
    """The unit's weights in named dims, if it is a layer."""


def collectives_of(setup: Setup, rank: StagedRank, made: Profile) -> list[Collective]:
    """Return what one rank sends in a step."""
    split = of_stages(made, setup, paper_micro_batches(setup, rank.number)) if setup.tp * setup.cp > 1 else []
    dtype = sharded_dtype(setup)
    clipping = [*norms(rank.model, setup, dtype), *norm_over_stages(setup, dtype)]
    return [*_sends(setup, rank), *split, *of_units(setup, rank), *_of_copies(setup, rank), *clipping]


def _sends(setup: Setup, rank: StagedRank) -> list[Collective]:
    dtype, stages = setup.compute_dtype, rank.program.stages
    out: list[Collective] = []
    asks = setup.input_require_grads
    outputs = handed(stages, "sends", HIDDEN_STATES) - leads_to_itself(setup, rank.number)
    inputs = [stage for stage in stages if stage.input_wants_gradient(asks=asks)]
    back = handed(inputs, "receives", HIDDEN_STATES) - gradient_stays(setup, rank)
    ways: tuple[tuple[str, str, Overlap, int], ...] = (
        ("hidden states to the next stage", HIDDEN_STATES, "forward", outputs),
        ("gradient to the stage before", HIDDEN_STATES, "backward", back),
        ("encoder output to the next stage", ENCODED, "forward", handed(stages, "sends", ENCODED)),
        (
            "gradient of the encoder output to the stage before",
            ENCODED,
            "backward",
            handed(stages, "receives", ENCODED),
        ),
    )
    for what, name, phase, each_micro_batch in ways:
        shape = handed_shape(rank, name)
        each = evaluate(numel(shape)[1], setup.micro_batch_size, setup.tokens_per_part) * dtype.itemsize
        unit = f"{formula(shape)}·{dtype.itemsize} B"
        calls = of_each_chunk(setup.schedule, setup.micro_batches) * each_micro_batch
        if calls:
            # The runtime of several chunks waits for its sends when the step is over.
            overlap: Overlap = "exposed" if setup.schedule in ("gpipe", "1f1b") else phase
            out.append(
                Collective(
                    "pp",
                    "send",
                    what,
                    phase,
                    dtype.name,
                    setup.pp,
                    calls,
                    calls * each,
                    f"{calls}·{unit} = {calls}·{each} B",
                    each=unit,
                    source=STAGE,
                    overlap=overlap,
                )
            )
    return out


def of_units(setup: Setup, rank: StagedRank) -> list[Collective]:
    """Return FSDP2's collectives, unit by unit: gathered in the schedule's order, reduced once after all backwards of a
    stage."""
    of_layers = {part: _gathers(setup, rank.number, part, reshards=setup.zero == 3) for part in _parts(setup, rank)}
    of_root = _gathers(setup, rank.number, "has a backward", reshards=False)
    out: list[Collective] = []
    gathered, reduced = _units_of_layers(setup, rank)
    for unit, layers in gathered.items():
        for wanted in WANTED:
            counted = [(n, n * of_layers[part][chunk, wanted]) for (chunk, part), n in layers.items()]
            sharers, calls = sum(n for n, own in counted if own), sum(own for _, own in counted)
            out += _gathered(setup, unit, wanted, calls, sharers)
        for trained, n in reduced.pop(unit, {}).items():
            out += _reduced(setup, trained, n)
    for chunk, stage in enumerate(rank.program.stages):
        root = [w for w in stage.weights() if w.layer is None]
        trained = [w for w in root if stage.wants_gradient(w)]
        unit = Unit(_elements(root, setup), "outside the layers")
        for wanted in WANTED:
            out += _gathered(setup, unit, wanted, of_root[chunk, wanted], 0)
        out += _reduced(setup, unit._replace(elements=_elements(trained, setup)), 0)
    return out


def _of_copies(setup: Setup, rank: StagedRank) -> list[Collective]:
    """Return the sums of gradients over the stages that have a copy of the weight: of an encoder and a decoder."""
    if rank.program.one_stack:
        return []
    own: Any = rank.program.stages[0]
    of_ranks = encoded_spans(own.whole_model, setup.pp, setup.encoder_stages)
    stages = [EncodedStage(own.whole_model, spans[0]) for spans in of_ranks]
    dtype = sharded_dtype(setup)
    out: list[Collective] = []
    for weight, ranks in own.copies(stages):
        each = padded_elements(weight.shape, setup.shards) // setup.shards * dtype.itemsize
        name, shard = f"gradients of copies of {weight.name}", "shard" if setup.shards > 1 else "weight"
        in_words = f"1·{shard}·{dtype.itemsize} B = 1·{each} B"
        out.append(Collective("pp", "all_reduce", name, "step", dtype.name, ranks, 1, each, in_words, source=COPIES))
    return out


def _elements(weights: list[Weight], setup: Setup) -> int:
    return sum(padded_elements(w.shape, setup.shards) for w in weights)


def _parts(setup: Setup, rank: StagedRank) -> set[Part]:
    return {part for stage in rank.program.stages for part in _parts_of(setup, stage)}


def _parts_of(setup: Setup, stage: Stage) -> list[Part]:
    """Return each layer's part in a backward of its stage. Where a backward ends, the layer before is gathered ahead, and for
    nothing."""
    begins = stage.backward_from(asks=setup.input_require_grads)

    def part(layer: int) -> Part:
        if begins is None or layer < begins - 1:
            return "has none"
        return "has a backward" if layer >= begins else "is gathered for it"

    return [part(layer) for layer in range(stage.layers)]


def _gathers(setup: Setup, rank: int, part: Part, *, reshards: bool) -> Counter[tuple[int, Wanted]]:
    """Return how often a unit of each chunk is gathered in a step. If the pipeline is not emptied, it is what a step adds to
    others."""
    count = gathers if part == "has a backward" else partial(gathers_of_frozen, ahead=part == "is gathered for it")
    many = setup.micro_batches
    if flushes(setup.schedule):
        return count(actions_of(setup, rank, many), reshards=reshards)
    others = 2 * -(-setup.pp // many)
    one, more = (count(actions_of(setup, rank, n * many), reshards=reshards) for n in (others, others + 1))
    return more - one


def _units_of_layers(
    setup: Setup, rank: StagedRank
) -> tuple[dict[Unit, dict[tuple[int, Part], int]], dict[Unit, dict[Unit, int]]]:
    """Return the number of layers of each chunk and part that are units of a size, and for each such unit what its layers
    reduce. Layers with experts have another size."""
    stages = rank.program.stages
    kinds = [stage.kinds_of_layers() for stage in stages]

    def padded(weight: Weight) -> int:
        return padded_elements(weight.shape, setup.shards)

    mixed = len({_has_experts(weights) for own in kinds for weights, _ in own}) > 1
    gathered: dict[Unit, dict[tuple[int, Part], int]] = {}
    reduced: dict[Unit, dict[Unit, int]] = {}
    for chunk, stage in enumerate(stages):
        parts = _parts_of(setup, stage)
        for weights, layers in kinds[chunk]:
            where = "layers" if not mixed else "layers with experts" if _has_experts(weights) else "dense layers"
            unit = Unit(sum(map(padded, weights)), where, in_named_dims(weights, padded))
            own = gathered.setdefault(unit, {})
            for i in layers:
                own[chunk, parts[i]] = own.get((chunk, parts[i]), 0) + 1
            trained = [weight for weight in weights if stage.wants_gradient(weight)]
            if trained:
                sums = Unit(sum(map(padded, trained)), where, in_named_dims(trained, padded))
                of_unit = reduced.setdefault(unit, {})
                of_unit[sums] = of_unit.get(sums, 0) + len(layers)
    return gathered, reduced


def _has_experts(weights: list[Weight]) -> bool:
    return any(w.component == "experts" for w in weights)


def _gathered(setup: Setup, unit: Unit, wanted: Wanted, calls: int, layers: int) -> list[Collective]:
    """Return the gathers of units. `layers` of the rank are such units; 0 stands for the parameters outside them."""
    if setup.shards == 1 or not calls * unit.elements:
        return []
    dtype, ranks = setup.compute_dtype, setup.shards
    if wanted == "unshard":  # all units of a stage are gathered before its first action, which waits for them
        return [_one("all_gather", "parameters of a stage", "forward", dtype, ranks, calls, unit, layers)]
    overlap: Overlap = wanted if layers else "exposed"
    name = "parameters" if wanted == "forward" else "parameters again"
    return [_one("all_gather", name, wanted, dtype, ranks, calls, unit, layers, overlap)]


def _reduced(setup: Setup, unit: Unit, layers: int) -> list[Collective]:
    dtype, replicas = DTYPES[setup.grad_dtype], setup.replicas
    calls = (layers or 1) * updates_of(setup.schedule, setup.micro_batches)
    out: list[Collective] = []
    if setup.shards > 1 and unit.elements:
        out.append(_one("reduce_scatter", "gradients", "backward", dtype, setup.shards, calls, unit, layers))
    if replicas > 1 and unit.elements:
        name, part = "gradient shards over replicas", unit._replace(elements=unit.elements // setup.shards)
        summed = _one("all_reduce", name, "backward", dtype, replicas, calls, part, layers)
        out.append(summed._replace(shares=_shares(unit, layers)))
    if placement_of(setup.schedule) == "both ways" and unit.elements:
        part, source = unit._replace(elements=unit.elements // setup.shards), schedule_of(setup.schedule).source
        summed = _one(
            "all_reduce", "gradient shards over both copies of a stage", "backward", dtype, 2, calls, part, layers
        )
        out.append(summed._replace(source=source))
    return out


def _one(
    kind: Kind, name: str, phase: str, dtype: DType, ranks: int, calls: int, unit: Unit, layers: int,
    overlap: Overlap = "exposed",
) -> Collective:  # fmt: skip
    in_words, each = f"unit·{dtype.itemsize} B", unit.elements * dtype.itemsize
    return Collective(
        "dp", kind, f"{name}, {unit.where}", phase, dtype.name, ranks, calls, calls * each,
        f"{calls}·{in_words} = {calls}·{each} B",
        shares=_shares(unit, layers), source=_FSDP, overlap=overlap,
    )  # fmt: skip


def _shares(unit: Unit, layers: int) -> Shares | None:
    """Return the layers' shares: each layer is a unit."""
    if not layers:
        return None
    return Shares((LayerKind(layers, unit.elements, unit.in_words),), unit.elements * layers)
