"""FSDP2: `fully_shard` over every layer, then over the model (torch/distributed/fsdp/_fully_shard).

Every parameter is sharded along its first dim, which is padded to a multiple of the ranks (_fsdp_param.py). `--zero 3`
is `reshard_after_forward=True`, `--zero 2` is False; the root never reshards after forward (_fsdp_state.py,
_lazy_init). With `bf16-mixed` the shards are fp32; the policy gathers in bf16 and reduces in fp32
(MixedPrecisionPolicy). With one dtype for all there is no policy. `--shard-group` smaller than dp is hybrid sharding:
gradients are also all-reduced over replicas. Under `--ep` each layer's experts are a unit of their own over the ranks
that have the same experts: edp = shard group · tp / ep (transformers/distributed/fsdp.py).
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from memcalc.core.dims import Dim, Shape
from memcalc.core.dtypes import DType
from memcalc.core.rows import Row
from memcalc.engines.base.clipping import norms, temporaries
from memcalc.engines.base.holdings import (
    ENOUGH_MICRO_BATCHES,
    Holdings,
    Order,
    Update,
    input_rows,
    larger,
    state_rows,
    step_temporaries,
    weights_in_turn,
)
from memcalc.engines.fsdp2.backward_units import BackwardUnits
from memcalc.engines.fsdp2.no_sync import NoSync
from memcalc.engines.fsdp2.sharded_part import frozen_dtype, shape_in_unit, sharded_dtype
from memcalc.engines.fsdp2.sizes import padded_elements
from memcalc.engines.fsdp2.step import STREAMS, ExpertUnits, Sharding
from memcalc.layout.collectives import Collective, Kind, Overlap
from memcalc.layout.expert_parallel import expert_path
from memcalc.layout.layer_kinds import LaterShares, Shares, shares_of
from memcalc.optimizers import Parameter
from memcalc.setup.setup import DTYPES

if TYPE_CHECKING:
    from collections.abc import Callable

    from memcalc.families.base.module import Weight
    from memcalc.families.base.replacing import Packing
    from memcalc.inputs.model import Model
    from memcalc.setup.setup import Setup

_SOURCE: Final = "torch/distributed/fsdp/_fully_shard/_fsdp_param.py"
_COLLECTIVES: Final = "torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py"


def holdings(model: Model, setup: Setup) -> Holdings:
    if setup.offload_params != "none":
        from memcalc.engines.fsdp2.offloaded import on_gpu

        return on_gpu(model, setup)
    always, step, sharding = states_and_step(model, setup)
    inputs = input_rows(model, setup, frozen_dtype(setup), setup.compute_dtype)
    on_paper = min(setup.micro_batches, ENOUGH_MICRO_BATCHES) if setup.keeps_whole_gradients else 1
    hooks = NoSync(sharding, on_paper) if on_paper > 1 else sharding
    earlier = tuple(row for row in step if row.component == "gradients") if sharding.accumulating else ()
    order = order_of(model, setup, [row for row in always if row.component == "parameters"] + inputs, sharding)
    always += inputs
    return Holdings(
        tuple(always),
        forward=earlier,
        backward=earlier,
        step=tuple(step),
        hooks=hooks,
        order=order,
        micro_batches=on_paper,
    )


def order_of(model: Model, setup: Setup, before: list[Row], sharding: Sharding) -> Order:
    """Return the order of allocations. `before` are the rows before the first step."""
    sharded, parameters = sharded_dtype(setup), _parameters(model, setup)
    updates = tuple(Update(tuple(group), sharded) for group in _by_mesh(model, setup, parameters))
    states = state_rows(setup, parameters, sharded)
    first = sharding._replace(accumulating=False) if sharding.accumulating else None
    streams = STREAMS
    if sharding.replicas > 1 and sharding.reduced is not sharded:  # cast once the replicas have summed them
        streams = STREAMS | {"sharded gradients": "all-reduce"}
    clipping = tuple(temporaries(model, setup, sharded))
    return Order(tuple(before), tuple(states), (), updates, streams, first=first, clipping=clipping)


def states_and_step(model: Model, setup: Setup) -> tuple[list[Row], list[Row], Sharding]:
    """Return a rank's shards and states, its gradients and temporaries in the step, and the sharding of all these."""
    sharded, parameters = sharded_dtype(setup), _parameters(model, setup)
    gradients = rows_of(model, setup, "gradients", "backward to step", model.trained)
    always = rows_of(model, setup, "parameters", "always", model.copies)
    always += state_rows(setup, parameters, sharded)
    groups = _by_mesh(model, setup, _met_in_step(model, setup))
    how = setup.optimizer, setup.optimizer_implementation
    updates = [step_temporaries(*how, group, sharded, sharded) for group in groups]
    step = larger(temporaries(model, setup, sharded), *updates)
    sharding = Sharding(
        setup.shards,
        setup.zero == 3,
        sharded,
        DTYPES[setup.grad_dtype],
        setup.micro_batches > 1 and not setup.keeps_whole_gradients,
        setup.replicas,
        _expert_units(model, setup),
        over(setup),
        None if setup.quantize == "none" else frozen_dtype(setup),
    )
    return always, [*gradients, *step], sharding


def _expert_units(model: Model, setup: Setup) -> ExpertUnits | None:
    path = expert_path(model.program) if setup.ep > 1 else None
    return None if path is None else ExpertUnits(path, _same_experts(setup))


def _same_experts(setup: Setup) -> int:
    """Return the number of ranks of a shard group that have the same experts (DistributedConfig.efsdp_size)."""
    return setup.shards * setup.tp // setup.ep


def _spread(setup: Setup, weight: Weight) -> tuple[str, int]:
    """Return the axis that a weight is sharded over, and its number of ranks."""
    return ("edp", _same_experts(setup)) if _is_apart(setup, weight) else (over(setup), setup.shards)


def over(setup: Setup) -> str:
    """Return the divisor in the names of shards."""
    if setup.replicas > 1:
        return "shard group"
    return "dp" if setup.cp == 1 else "(dp·cp)"


def _is_apart(setup: Setup, weight: Weight) -> bool:
    return setup.ep > 1 and weight.component == "experts"


def _parameters(model: Model, setup: Setup) -> list[Parameter]:
    """Return the parameters that one rank updates."""
    return [
        Parameter(w.name, _shard(w.shape, *_spread(setup, w)), count, w.layer is not None and len(w.shape) == 2)
        for w in model.weight_classes
        if (count := model.trained(w))
    ]


def _met_in_step(model: Model, setup: Setup) -> list[Parameter]:
    """Return the parameters that one rank updates, in the order in which a step updates them."""
    return [
        Parameter(w.name, _shard(w.shape, *_spread(setup, w)), copies, w.layer is not None and len(w.shape) == 2)
        for w, copies in weights_in_turn(model, setup)
    ]


def _by_mesh(model: Model, setup: Setup, parameters: list[Parameter]) -> list[list[Parameter]]:
    """Return the optimizer's groups. Parameters on different meshes share no kernel (transformers'
    Trainer.create_optimizer)."""
    parallel, experts = model.program.tensor_parallel, _expert_units(model, setup)
    if parallel is None and experts is None:
        return [parameters]
    groups: dict[str, list[Parameter]] = {}
    for parameter in parameters:
        apart = experts is not None and parameter.name.startswith(f"{experts.path}.")
        is_split = parallel is not None and parallel.is_split(parameter.name)
        groups.setdefault("experts" if apart else "split" if is_split else "whole", []).append(parameter)
    return list(groups.values())


def rows_of(model: Model, setup: Setup, component: str, life: str, copies: Callable[[Weight], int]) -> list[Row]:
    frozen, sharded = frozen_dtype(setup), sharded_dtype(setup)
    rows: list[Row] = []
    for w in model.weight_classes:
        if not (n := copies(w)):
            continue
        if w.packing is not None:
            rows += _packed_rows(setup, w, w.packing, n)
            continue
        dtype = sharded if model.trainable(w) else frozen
        rows.append(Row(component, w.name, _shard(w.shape, *_spread(setup, w)), dtype, n, life, "exact", _SOURCE))  # type: ignore[arg-type]
    return rows


def _packed_rows(setup: Setup, weight: Weight, packing: Packing, copies: int) -> list[Row]:
    """Return the rows of a quantised weight: its codes, or a shard of them, and its scales, which are whole."""
    codes = packing.stored(weight.shape)[0]
    is_whole = shape_in_unit(packing, weight.shape) is None
    shape = codes.shape if is_whole else _shard(codes.shape, *_spread(setup, weight))
    source = packing.source if is_whole else _SOURCE
    return [
        Row("parameters", weight.name, shape, codes.dtype, copies, "always", "exact", source),
        *_scale_rows(weight, packing, copies),
    ]


def scale_rows(model: Model) -> list[Row]:
    """Return the scales of all quantised weights. They are no parameters: every rank has them whole, on the GPU."""
    packed = [(w, w.packing) for w in model.weight_classes if w.packing is not None]
    return [row for w, packing in packed for row in _scale_rows(w, packing, model.copies(w))]


def _scale_rows(weight: Weight, packing: Packing, copies: int) -> list[Row]:
    return [
        Row("parameters", f"{weight.name}.{one.name}", one.shape, one.dtype, copies, "always", "exact", packing.source)
        for one in packing.stored(weight.shape)[1:]
    ]


def _in_unit(weight: Weight, ranks: int) -> int:
    """Return the elements that a weight has in its unit, padded; 0 if it is in none."""
    shape = shape_in_unit(weight.packing, weight.shape)
    return 0 if shape is None else padded_elements(shape, ranks)


@lru_cache(maxsize=1024)
def _shard(shape: Shape, axis: str, ranks: int) -> Shape:
    """Return the shape of one rank's shard of a parameter, including padding."""
    first, *rest = shape
    if ranks == 1:
        return shape
    return (Dim(f"⌈{first.name}/{axis}⌉", -(-first.size // ranks)), *rest)


def collectives(model: Model, setup: Setup) -> list[Collective]:
    """Return the collectives of a step in which every layer has a backward and gradients."""
    every = frozenset(range(model.layers))
    return collectives_of(model, setup, BackwardUnits(every, every), BackwardUnits(every, every))


def collectives_of(model: Model, setup: Setup, backward: BackwardUnits, of_experts: BackwardUnits) -> list[Collective]:
    """Return the collectives of a step whose backward gathers and reduces the units of some layers and of some layers'
    experts."""
    clipping = norms(model, setup, sharded_dtype(setup))
    if setup.dp * setup.cp == 1:
        return clipping
    root = [w for w in model.weight_classes if w.layer is None]
    experts = [w for w in model.weight_classes if _is_apart(setup, w)]
    layers = [w for w in model.weight_classes if w.layer is not None and not _is_apart(setup, w)]
    stack = f"{layers[0].name.split('*')[0]}*" if layers else None
    return [
        *_of_layers(model, setup, layers, stack, "layers", backward),
        *_of_layers(model, setup, experts, stack, "experts", of_experts),
        *_of_root(model, setup, root),
        *clipping,
    ]


class _Sent(NamedTuple):
    """The parts of a collective's record that its kind decides."""

    kind: Kind
    name: str
    phase: Literal["forward", "backward"]
    dtype: DType
    ranks: int
    elements: int
    """The elements of all units together."""
    units: int


def _of_root(model: Model, setup: Setup, weights: list[Weight]) -> list[Collective]:
    """Return the collectives of the unit of everything outside the layers. It is not gathered again."""
    ranks = _spread(setup, weights[0])[1] if weights else 1
    elements = sum(_in_unit(w, ranks) * model.copies(w) for w in weights)
    reduced = sum(_in_unit(w, ranks) * model.trained(w) for w in weights)
    return [
        _collective(setup, one, None, "outside the layers", None)
        for one in _kinds(setup, ranks, (elements, 1), (0, 0), (reduced, 1))
    ]


def _of_layers(
    model: Model, setup: Setup, weights: list[Weight], layer: str | None, where: str, backward: BackwardUnits
) -> list[Collective]:
    """Return the collectives of the units of layers, or of the experts of layers."""
    if not weights:
        return []
    apart, ranks = _is_apart(setup, weights[0]), _spread(setup, weights[0])[1]
    own = [w for w in model.program.weights() if w.layer is not None and _is_apart(setup, w) == apart]

    def units(layers: frozenset[int], *, trained: bool = False) -> tuple[int, int]:
        """Return the elements of the units of these layers, and the number of the units."""
        there = [w for w in own if w.layer in layers and (not trained or model.program.gets_gradient(w))]
        return sum(_in_unit(w, ranks) for w in there), len({w.layer for w in there})

    again = units(backward.gathered) if setup.zero == 3 else (0, 0)
    gathered, reduced = units(frozenset(range(model.layers))), units(backward.reduced, trained=True)
    sharers: dict[str, Callable[[Weight], bool]] = {
        "parameters again": lambda w: w.layer in backward.gathered,
        "gradients": lambda w: w.layer in backward.reduced and model.program.gets_gradient(w),
    }
    out: list[Collective] = []
    for one in _kinds(setup, ranks, gathered, again, reduced):
        is_sent = sharers.get(one.name.removesuffix(" shards over replicas"), lambda w: True)
        shares = partial(_shares, model, setup, ranks, is_sent, apart=apart)
        out.append(_collective(setup, one, layer, where, LaterShares(shares)))
    return out


def _shares(model: Model, setup: Setup, ranks: int, is_sent: Callable[[Weight], bool], *, apart: bool) -> Shares:
    """Return the layers' shares of what some units send."""
    return shares_of(
        model.program.weights(), sent=lambda w: _sent_of(setup, w, ranks, apart=apart) if is_sent(w) else 0
    )


def _sent_of(setup: Setup, weight: Weight, ranks: int, *, apart: bool) -> int:
    """Return a weight's elements in units of layers, padded; 0 if it is in another unit."""
    is_own = weight.layer is not None and _is_apart(setup, weight) == apart
    return _in_unit(weight, ranks) if is_own else 0


def _kinds(
    setup: Setup, ranks: int, gathered: tuple[int, int], again: tuple[int, int], reduced: tuple[int, int]
) -> list[_Sent]:
    """Return what some units send. Each pair has the elements of units and their number."""
    compute, sums = setup.compute_dtype, DTYPES[setup.grad_dtype]
    out: list[_Sent] = []
    if ranks > 1:
        out.append(_Sent("all_gather", "parameters", "forward", compute, ranks, *gathered))
        out.append(_Sent("all_gather", "parameters again", "backward", compute, ranks, *again))
        out.append(_Sent("reduce_scatter", "gradients", "backward", sums, ranks, *reduced))
    if setup.replicas > 1:
        shards, units = reduced[0] // ranks, reduced[1]
        name = "gradient shards over replicas"
        out.append(_Sent("all_reduce", name, "backward", sums, setup.replicas, shards, units))
    return [one for one in out if one.elements]


def _collective(setup: Setup, one: _Sent, layer: str | None, where: str, shares: LaterShares | None) -> Collective:
    micro = 1 if setup.keeps_whole_gradients and one.kind != "all_gather" else setup.micro_batches
    size = one.dtype.itemsize
    formula = f"{micro}·unit{'s' if one.units > 1 else ''}·{size} B = {micro}·{one.elements}·{size} B"
    return Collective(
        "dp", one.kind, f"{one.name}, {where}", one.phase, one.dtype.name, one.ranks, micro * one.units,
        micro * one.elements * size, formula, layer, shares=shares, source=_COLLECTIVES,
        overlap=_overlap(one.phase, layer),
    )  # fmt: skip


def _overlap(phase: str, layer: str | None) -> Overlap:
    """Return the phase that can hide a collective.

    Layers are gathered ahead on a separate stream, and reduced behind the next layer's backward (_fsdp_state.py). The
    root is gathered before anything else can run, and reduced when backward is over
    (_root_post_backward_final_callback).
    """
    if layer is None:
        return "exposed"
    return "forward" if phase == "forward" else "backward"


def textbook(model: Model, setup: Setup) -> list[Collective]:
    return []
