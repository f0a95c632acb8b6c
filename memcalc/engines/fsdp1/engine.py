"""FSDP1: `FullyShardedDataParallel` around every layer, then around the model (torch/distributed/fsdp).

accelerate and HF Trainer wrap like this with TRANSFORMER_BASED_WRAP. A unit's parameters are one flat parameter, of which
each rank has an equal part (`memcalc.engines.fsdp1.flat`). `--zero 3` is FULL_SHARD: a layer's flat parameter is freed when
its forward is done; `--zero 2` is SHARD_GRAD_OP: it stays until its backward is done. The root's always stays
(_post_forward_reshard). With `bf16-mixed` the shards are fp32, and MixedPrecision gathers in bf16, reduces in `--grad-dtype`
and casts the buffers. `--shard-group` smaller than dp is HYBRID_SHARD.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from memcalc.core.dims import Dim
from memcalc.core.dtypes import DType, fp32
from memcalc.core.rows import Row
from memcalc.engines.base.holdings import (
    ENOUGH_MICRO_BATCHES,
    Holdings,
    Order,
    Update,
    input_rows,
    larger,
    state_rows,
    step_temporaries,
)
from memcalc.engines.fsdp1.flat import Flat, flat_of, stack_and_layer
from memcalc.engines.fsdp1.no_sync import NoSync
from memcalc.engines.fsdp1.step import STREAMS, Sharding
from memcalc.layout.collectives import Collective, Kind, Overlap
from memcalc.layout.layer_kinds import LayerKind, Shares
from memcalc.optimizers import Parameter
from memcalc.setup.setup import DTYPES

if TYPE_CHECKING:
    from memcalc.core.dims import Shape
    from memcalc.inputs.model import Model
    from memcalc.setup.setup import Setup

_SOURCE: Final = "torch/distributed/fsdp/_flat_param.py"
_RUNTIME: Final = "torch/distributed/fsdp/_runtime_utils.py"
_CLIPPING: Final = "torch/distributed/fsdp/fully_sharded_data_parallel.py, clip_grad_norm_"


class UnitKind(NamedTuple):
    """`copies` units with the same parameters: layers of a stack, or the root."""

    name: str
    flat: Flat
    copies: int
    is_layer: bool


def unit_kinds(model: Model, setup: Setup) -> tuple[UnitKind, ...]:
    """Return the units by kind, layers and the root, in the order in which they first appear."""
    key = ("fsdp1 units", setup.shards, setup.compute_dtype, setup.use_orig_params)
    if key not in model.profiles:
        units: dict[tuple[str, int | None], list[tuple[str, Shape]]] = {}
        for weight in model.program.weights():
            units.setdefault(stack_and_layer(weight.name, weight.layer), []).append((weight.name, weight.shape))
        itemsize, original = setup.compute_dtype.itemsize, bool(setup.use_orig_params)
        counts = Counter(
            (stack, layer is not None, flat_of(own, setup.shards, itemsize, original=original))
            for (stack, layer), own in units.items()
        )
        model.profiles[key] = tuple(
            UnitKind(f"{stack}*" if is_layer else "outside the layers", flat, copies, is_layer)
            for (stack, is_layer, flat), copies in counts.items()
        )
    return model.profiles[key]


@lru_cache(maxsize=64)
def fullest_rank(kinds: tuple[UnitKind, ...]) -> int:
    """Return the rank whose shards have most elements of parameters, and of those the one with most tensors: padding has
    no optimizer states."""

    def bytes_of(rank: int) -> tuple[int, int]:
        own = [(kind.copies, kind.flat.slices(rank)) for kind in kinds]
        elements = sum(copies * sum(one.elements for one in slices) for copies, slices in own)
        return elements, sum(copies * len(slices) for copies, slices in own)

    ranks = kinds[0].flat.ranks if kinds else 1
    return max(range(ranks), key=lambda rank: (bytes_of(rank), -rank))


def holdings(model: Model, setup: Setup) -> Holdings:
    kinds, sharded = unit_kinds(model, setup), sharded_dtype(setup)
    parameters = updated(kinds) if setup.use_orig_params else flat_shards(setup, kinds)
    shards = [_shard_row(setup, kind, "parameters", "flat parameter", "always", sharded) for kind in kinds]
    gradients = [_shard_row(setup, kind, "gradients", "flat gradient", "backward to step", sharded) for kind in kinds]
    states = state_rows(setup, parameters, sharded)
    inputs = input_rows(model, setup, setup.compute_dtype, setup.compute_dtype)
    kept = _kept_by_clipping(setup)
    clipping = _clipping(setup, parameters)
    how = setup.optimizer, setup.optimizer_implementation
    step = [*gradients, *larger(clipping, step_temporaries(*how, parameters, sharded, sharded))]
    sharding = sharding_of(setup)
    earlier = tuple(gradients) if sharding.accumulating else ()
    on_paper = min(setup.micro_batches, ENOUGH_MICRO_BATCHES) if setup.keeps_whole_gradients else 1
    first = sharding._replace(accumulating=False) if sharding.accumulating else None
    order = Order(
        (*shards, *inputs), (*states, *kept), (), (Update(tuple(parameters), sharded),), STREAMS, first=first,
        clipping=tuple(clipping),
    )  # fmt: skip
    return Holdings(
        (*shards, *states, *kept, *inputs),
        forward=earlier,
        backward=earlier,
        step=tuple(step),
        hooks=NoSync(sharding, on_paper, fullest_rank(kinds)) if on_paper > 1 else sharding,
        order=order,
        micro_batches=on_paper,
    )


def sharding_of(setup: Setup) -> Sharding:
    accumulating = setup.micro_batches > 1 and not setup.keeps_whole_gradients
    sums = DTYPES[setup.grad_dtype]
    reshards = setup.zero == 3
    return Sharding(
        setup.shards, reshards, sharded_dtype(setup), sums, accumulating, setup.replicas, over(setup),
        bool(setup.use_orig_params), str(setup.backward_prefetch), bool(setup.forward_prefetch),
    )  # fmt: skip


def sharded_dtype(setup: Setup) -> DType:
    return fp32 if setup.has_master_weights else setup.compute_dtype


def over(setup: Setup) -> str:
    """Return the divisor in the names of shards."""
    return "shard group" if setup.replicas > 1 else "dp"


def updated(kinds: tuple[UnitKind, ...]) -> list[Parameter]:
    """Return the tensors that the fullest rank updates: what its shards have of each parameter."""
    rank = fullest_rank(kinds)
    return [
        Parameter(one.name, (Dim("elements on the rank", one.elements),), kind.copies, False)
        for kind in kinds
        for one in kind.flat.slices(rank)
    ]


def flat_shards(setup: Setup, kinds: tuple[UnitKind, ...]) -> list[Parameter]:
    """Return the tensors that every rank updates without `use_orig_params`: its shards, padding included."""
    dim = f"unit/{over(setup)}"
    return [Parameter(kind.name, (Dim(dim, kind.flat.shard),), kind.copies, False) for kind in kinds]


def _shard_row(setup: Setup, kind: UnitKind, component: str, name: str, life: str, dtype: DType) -> Row:
    dim = Dim(f"unit/{over(setup)}", kind.flat.shard)
    return Row(component, f"{kind.name}: {name}", (dim,), dtype, kind.copies, life, "exact", _SOURCE)  # type: ignore[arg-type]


def _kept_by_clipping(setup: Setup) -> list[Row]:
    """Return the number that FSDP1 keeps for ranks without gradients, once it has clipped (_zero_scalar)."""
    if not setup.clip_grad_norm:
        return []
    return [Row("buffers", "zero of clip_grad_norm_", (), fp32, source=_CLIPPING)]


def _clipping(setup: Setup, parameters: list[Parameter]) -> list[Row]:
    """Return the rows of clipping at its peak: the norms of all gradients, in fp32, are stacked to become one."""
    if not setup.clip_grad_norm:
        return []
    tensors, life = sum(parameter.count for parameter in parameters), "while gradients are clipped"
    rows = ("norm of each gradient", (), tensors), ("norms of the gradients", (Dim("gradients", tensors),), 1)
    return [Row("temporaries", name, shape, fp32, copies, life, "modelled", _CLIPPING) for name, shape, copies in rows]


class _Sent(NamedTuple):
    """The parts of a collective's record that its kind decides."""

    kind: Kind
    name: str
    phase: Literal["forward", "backward"]
    dtype: DType
    ranks: int
    divisor: int
    """The part of a flat parameter that the collective is called on is 1/divisor."""


def collectives(model: Model, setup: Setup) -> list[Collective]:
    kinds = unit_kinds(model, setup)
    layers, root = [kind for kind in kinds if kind.is_layer], [kind for kind in kinds if not kind.is_layer]
    stack = layers[0].name if layers else None
    own = [_collective(setup, one, layers, stack) for one in _kinds(setup, again=setup.zero == 3)] if layers else []
    of_root = [_collective(setup, one, root, None) for one in _kinds(setup, again=False)] if root else []
    return [*own, *of_root, *_norm(setup)]


def _kinds(setup: Setup, *, again: bool) -> list[_Sent]:
    compute, sums, shards = setup.compute_dtype, DTYPES[setup.grad_dtype], setup.shards
    out = [_Sent("all_gather", "parameters", "forward", compute, shards, 1)]
    if again:
        out.append(_Sent("all_gather", "parameters again", "backward", compute, shards, 1))
    out.append(_Sent("reduce_scatter", "gradients", "backward", sums, shards, 1))
    if setup.replicas > 1:
        name = "gradient shards over replicas"
        out.append(_Sent("all_reduce", name, "backward", sums, setup.replicas, shards))
    return out


def _collective(setup: Setup, one: _Sent, kinds: list[UnitKind], layer: str | None) -> Collective:
    micro, size = _times(setup, one), one.dtype.itemsize
    units = sum(kind.copies for kind in kinds)
    elements = sum(kind.copies * kind.flat.elements // one.divisor for kind in kinds)
    formula = f"{micro}·unit{'s' if units > 1 else ''}·{size} B = {micro}·{elements}·{size} B"
    where = "outside the layers" if layer is None else "layers"
    overlap: Overlap = "exposed" if layer is None else one.phase
    return Collective(
        "dp", one.kind, f"{one.name}, {where}", one.phase, one.dtype.name, one.ranks, micro * units,
        micro * elements * size, formula, layer, shares=None if layer is None else _shares(kinds, one.divisor),
        source=_RUNTIME, overlap=overlap,
    )  # fmt: skip


def _times(setup: Setup, one: _Sent) -> int:
    """Return the micro-batches that a collective is sent in. With `no_sync` SHARD_GRAD_OP frees nothing before the last
    one's backward."""
    once = setup.keeps_whole_gradients and (one.kind != "all_gather" or setup.zero == 2)
    return 1 if once else setup.micro_batches


def _shares(kinds: list[UnitKind], divisor: int) -> Shares:
    own = tuple(LayerKind(kind.copies, kind.flat.elements // divisor, "unit") for kind in kinds)
    return Shares(own, sum(kind.layers * kind.elements for kind in own))


def _norm(setup: Setup) -> list[Collective]:
    """Return the all-reduce of the squared norm, one fp32 number, over the ranks of a shard."""
    if not setup.clip_grad_norm:
        return []
    size = fp32.itemsize
    return [
        Collective(
            "dp", "all_reduce", "norm of all gradients", "step", "fp32", setup.shards, 1, size, f"{size} B = {size} B",
            source=_CLIPPING,
        )
    ]  # fmt: skip


def textbook(model: Any, setup: Any) -> list[Collective]:
    return []
