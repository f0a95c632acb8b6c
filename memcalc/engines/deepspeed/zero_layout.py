"""The layout of a model under ZeRO in DeepSpeed 0.19: flat buffers, buckets and sub-groups."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from itertools import accumulate
from typing import TYPE_CHECKING, Final, NamedTuple

from memcalc.core.dims import numel
from memcalc.core.dtypes import DType, fp32
from memcalc.engines.deepspeed.all_reduces import AllReduce, Copies, copied
from memcalc.engines.deepspeed.zero3_coordinator import Thresholds
from memcalc.tape.profile import gradient_order

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from memcalc.inputs.model import Model
    from memcalc.setup.setup import Setup

ALL_REDUCE_BUCKET: Final = 500_000_000  # elements; engine.py MEMORY_OPT_ALLREDUCE_SIZE, stage 0
ALIGNMENT: Final = 2  # nccl_start_alignment_factor
EXPERTS_OF_A_GROUP: Final = 178_956_971  # elements; moe/utils.py, max_group_size

ENGINE: Final = "deepspeed/runtime/engine.py"
STAGE_0: Final = "deepspeed/runtime/fp16/fused_optimizer.py"
STAGE_12: Final = "deepspeed/runtime/zero/stage_1_and_2.py"
FUSED_ADAM: Final = "deepspeed/ops/adam/fused_adam.py"
COORDINATOR: Final = "deepspeed/runtime/zero/partitioned_param_coordinator.py"
STAGE_3: Final = "deepspeed/runtime/zero/stage3.py"


def sizes_of(model: Model) -> list[int]:
    """Return the elements of every parameter, in definition order; of a quantised one those of its codes."""
    if "sizes" not in model.profiles:
        model.profiles["sizes"] = [numel(weight.stored_shape)[0] for weight in model.program.weights()]
    return model.profiles["sizes"]


def frozen(model: Model) -> frozenset[int]:
    """Return the places of the parameters that require no gradient: no optimizer has them."""
    if "frozen" not in model.profiles:
        program = model.program
        model.profiles["frozen"] = frozenset(
            i for i, w in enumerate(program.weights()) if not program.wants_gradient(w)
        )
    return model.profiles["frozen"]


def unreached(model: Model) -> frozenset[int]:
    """Return the places of the parameters that require a gradient and get none. DeepSpeed makes a gradient of zeros for
    them on request."""
    program = model.program
    if not program.untrained:
        return frozenset()
    places = frozenset(i for i, w in enumerate(program.weights()) if not program.gets_gradient(w))
    return places.difference(frozen(model))


class Group(NamedTuple):
    """One of the optimizer's groups of parameters, which has a flat buffer of its own."""

    places: tuple[int, ...]
    """The group's parameters, by their place in definition order."""
    starts: tuple[int, ...]
    """The offset of each parameter in the buffer, followed by the end."""
    first: int
    """The number of parameters in earlier groups."""
    ranks: int
    """The number of ranks that the buffer is cut for."""
    alike: int
    """The number of neighbouring ranks with the same part, each of other experts."""

    @property
    def partition(self) -> int:
        """Return the elements of a rank's part. The buffer is padded to a multiple of 2·ranks."""
        unit = ALIGNMENT * self.ranks
        return -(-self.starts[-1] // unit) * ALIGNMENT


def groups_of(model: Model, ranks: int) -> tuple[Group, ...]:
    """Return the optimizer's groups. All parameters that require a gradient are one group. Experts of expert parallelism
    are other groups (moe/utils.py, split_params_into_different_moe_groups_for_optimizer), over the ranks that have the
    same ones."""
    key = "parameter groups", ranks
    if key not in model.profiles:
        ep, sizes = model.program.expert_parallel, sizes_of(model)
        experts = [i for i, w in enumerate(model.program.weights()) if ep > 1 and w.component == "experts"]
        dense = sorted({*range(len(sizes))}.difference(experts, frozen(model)))
        chunks = _chunks([sizes[i] for i in experts], EXPERTS_OF_A_GROUP)
        places = [tuple(dense), *(tuple(experts[k] for k in chunk) for chunk in chunks)]
        firsts = accumulate((len(group) for group in places), initial=0)
        model.profiles[key] = tuple(
            Group(
                group,
                tuple(accumulate((sizes[i] for i in group), initial=0)),
                first,
                ranks if group is places[0] else ranks // ep,
                1 if group is places[0] else ep,
            )
            for group, first in zip(places, firsts, strict=False)
        )
    return model.profiles[key]


def _chunks(sizes: list[int], most: int) -> list[list[int]]:
    """Return indices into `sizes` in chunks of at most `most` elements."""
    return buckets_before_exceeding(sizes, most)


def flat_elements(model: Model, ranks: int) -> int:
    """Return the elements of the flat 16-bit buffers, including padding."""
    return sum(group.partition * group.ranks for group in groups_of(model, ranks))


def own_elements(model: Model, ranks: int) -> int:
    """Return the elements of a rank's parts of the flat buffers."""
    return sum(group.partition for group in groups_of(model, ranks))


def thresholds_of(setup: Setup) -> Thresholds:
    """Return the options that decide what stage 3 gathers when."""
    live, reuse = setup.max_live_parameters, setup.max_reuse_distance
    persistence, prefetch = setup.param_persistence_threshold, setup.prefetch_bucket_size
    assert live is not None and reuse is not None and persistence is not None and prefetch is not None
    return Thresholds(live, reuse, persistence, prefetch)


def ready_order(model: Model) -> list[int]:
    """Return the places (in definition order) of the parameters in the order in which backward has their gradients
    ready."""
    if "ready order" not in model.profiles:
        places: dict[str, list[int]] = {}
        for i, weight in enumerate(model.program.weights()):
            if model.program.wants_gradient(weight):
                places.setdefault(weight.name, []).append(i)
        model.profiles["ready order"] = [places[name].pop() for name, _ in gradient_order(model.program)]
    return model.profiles["ready order"]


class Partition(NamedTuple):
    """One rank's part of a group's flat buffer in stages 1 and 2."""

    first: int
    """The parameters that touch the part are those from `first` up to `end`, by their place in the order of the
    groups."""
    end: int
    whole: int
    """The elements of these parameters, inside the partition or not."""
    largest: int
    """The elements of the largest slice of one parameter."""
    before_largest: int
    """The number of slices before the largest one."""
    slices: int
    padding: int
    """The elements of the buffer's padding."""
    size: int
    unreached: int
    """The elements of the parameters that touch the part and get no gradient."""

    def touches(self, parameters: Sequence[int]) -> bool:
        """Tell whether one of these parameters, which are in order, touches the part."""
        i = bisect_left(parameters, self.first)
        return i < len(parameters) and parameters[i] < self.end


Owned = tuple[Partition, ...]
"""One rank's part of each group's flat buffer."""


def whole_of(owned: Owned) -> int:
    """Return the elements of all parameters that touch a rank's partitions."""
    return sum(part.whole for part in owned)


def inside_of(owned: Owned) -> int:
    """Return the elements of parameters in a rank's partitions, without padding."""
    return sum(part.size - part.padding for part in owned)


def unreached_of(owned: Owned) -> int:
    """Return the elements of the parameters that touch a rank's partitions and get no gradient."""
    return sum(part.unreached for part in owned)


def gradient_elements_of(owned: Owned) -> int:
    """Return the elements of the gradients that backward leaves for a rank's partitions."""
    return whole_of(owned) + unreached_of(owned)


def partitions(model: Model, ranks: int) -> list[Owned]:
    """Return every rank's parts of the flat buffers (stage_1_and_2.py, get_partition_info)."""
    key = "partitions", ranks
    if key not in model.profiles:
        idle = unreached(model)
        parts = [(group.alike, _partitions_of(group, idle)) for group in groups_of(model, ranks)]
        model.profiles[key] = [tuple(of_group[rank // alike] for alike, of_group in parts) for rank in range(ranks)]
    return model.profiles[key]


def _partitions_of(group: Group, idle: frozenset[int]) -> list[Partition]:
    size, starts = group.partition, group.starts
    count = len(group.places)
    out: list[Partition] = []
    while len(out) < group.ranks:
        start = len(out) * size
        first = max(bisect_right(starts, start) - 1, 0)
        end = min(bisect_left(starts, start + size), count)
        slices = [min(starts[i + 1], start + size) - max(starts[i], start) for i in range(first, end)]
        here = [i for i, n in zip(range(first, end), slices, strict=True) if n > 0]
        first, end = (here[0], here[-1] + 1) if here else (count, count)
        slices = [n for n in slices if n > 0]
        largest = max(slices, default=0)
        last = max((i for i, n in enumerate(slices) if n == largest), default=0)
        whole, padding = starts[end] - starts[first], size - sum(slices)
        zeros = sum(starts[i + 1] - starts[i] for i in range(first, end) if group.places[i] in idle) if idle else 0
        places = group.first + first, group.first + end
        part = Partition(*places, whole, largest, last, len(slices), padding, size, zeros)
        alike = (starts[first + 1] - start) // size if first < count else group.ranks - len(out)
        out += [part] * max(1, alike)  # the following ranks whose parts lie within the same parameter, or behind all
    return out


Slices = dict[int, int]
"""A parameter's place in the order of the groups -> its elements in a rank's partitions."""


def slices_of(model: Model, setup: Setup, owned: Owned) -> Slices:
    """Return the parts of the parameters in the partitions of a rank."""
    ranks = setup.shards
    rank, out = partitions(model, ranks).index(owned), Slices()
    for group, part in zip(groups_of(model, ranks), owned, strict=True):
        start = (rank // group.alike) * group.partition
        for place in range(part.first, part.end):
            i = place - group.first
            out[place] = min(group.starts[i + 1], start + group.partition) - max(group.starts[i], start)
    return out


def largest_trained(model: Model, ranks: int) -> int:
    """Return the elements of the largest parameter of all groups."""
    sizes = sizes_of(model)
    return max(sizes[i] for group in groups_of(model, ranks) for i in group.places)


def straddling_elements(model: Model, ranks: int) -> int:
    """Return the elements of all parameters that touch the partitions of the rank with the most."""
    return max(whole_of(owned) for owned in partitions(model, ranks))


def buckets_before_exceeding(sizes: list[int], most: int) -> list[list[int]]:
    """Return indices of the gradients, which come in this order, bucket by bucket. A gradient larger than a bucket has
    its own."""
    out: list[list[int]] = []
    current = most  # the first bucket begins with the first gradient
    for i, n in enumerate(sizes):
        if current + n > most:
            out.append([])
            current = 0
        out[-1].append(i)
        current += n
    return out


class Flat:
    """The flat buffers of stages 1 and 2, one object for a model and a number of ranks."""

    __slots__ = ("_copies", "groups", "order")

    def __init__(self, groups: tuple[Group, ...], order: tuple[int, ...]) -> None:
        self.groups = groups
        self.order = order
        """The place of each parameter in the order of the groups, by its place in definition order; -1 for those in no
        group."""
        self._copies: dict[tuple[tuple[int, ...], int, DType, DType], Copies] = {}

    def copies(self, parameters: Sequence[int], most: int, dtype: DType, sent: DType) -> Copies:
        """Return the largest copies that the all-reduces of one bucket make of gradients of `dtype`."""
        key = tuple(parameters), most, dtype, sent
        if key not in self._copies:
            self._copies[key] = copied(self.all_reduces(parameters, most), dtype, sent)
        return self._copies[key]

    def all_reduces(self, parameters: Iterable[int], most: int) -> list[AllReduce]:
        """Return the all-reduces of one bucket of parameters, in the order of the groups (average_tensor,
        allreduce_and_scatter).

        A gradient larger than the bucket is sent in several calls. A call ends with the slice that exceeds `most`.
        """
        out: list[AllReduce] = []
        of_ranks: dict[int, list[int]] = {}
        for ranks, n in self._slices(parameters):
            of_ranks.setdefault(ranks, []).append(n)
        for ranks, slices in of_ranks.items():
            call: list[int] = []
            total = 0
            out.append(AllReduce(ranks, call))
            for n in slices:
                if total > most:
                    call, total = [], 0
                    out.append(AllReduce(ranks, call))
                call.append(n)
                total += n
        return out

    def _slices(self, parameters: Iterable[int]) -> list[tuple[int, int]]:
        """Return the ranks and elements of each slice: consecutive elements for one rank."""
        slices: list[tuple[int, int]] = []
        last: tuple[int, int] = 0, -1
        group, end_of_group, partition = self.groups[0], 0, 1
        for i in parameters:
            if not group.first <= i < end_of_group:
                group = self.groups[bisect_right(self.groups, i, key=lambda group: group.first) - 1]
                end_of_group, partition = group.first + len(group.places), group.partition
            start, end = group.starts[i - group.first], group.starts[i - group.first + 1]
            while start < end:
                rank = start // partition
                stop = min(end, (rank + 1) * partition)
                if (group.ranks, rank) == last:
                    slices[-1] = group.ranks, slices[-1][1] + stop - start
                else:
                    slices.append((group.ranks, stop - start))
                start, last = stop, (group.ranks, rank)
        return slices


def flat(model: Model, ranks: int) -> Flat:
    """Return the flat buffers of a model."""
    key = "flat", ranks
    if key not in model.profiles:
        groups = groups_of(model, ranks)
        order = [-1] * len(sizes_of(model))
        for k, i in enumerate(i for group in groups for i in group.places):
            order[i] = k
        model.profiles[key] = Flat(groups, tuple(order))
    return model.profiles[key]


def reduced_in_order(model: Model, layout: Flat) -> list[int]:
    """Return the places of the parameters with a gradient, which stage 1 reduces, in the order of the groups."""
    idle = unreached(model)
    return [i for group in layout.groups for i in group.places if i not in idle]


def sent_dtype(setup: Setup) -> DType:
    """Return the dtype that gradients are reduced in. It is fp32 if ranks share sequences, unless
    `seq_parallel_communication_data_type` says otherwise (deepspeed/runtime/constants.py; stages 1 and 2 ignore that
    option: stage_1_and_2.py, allreduce_bucket)."""
    return fp32 if setup.cp > 1 else setup.compute_dtype


def over(setup: Setup) -> str:
    """Return the divisor in the names of shards."""
    return "dp" if setup.cp == 1 else "(dp·cp)"


def can_have_most(model: Model, ranks: int, most: int) -> list[Owned]:
    """Return the partitions of the ranks that can have the highest peak in stage 2's backward.

    Ranks differ there in one block: the room for all gradients that a rank owns, from the reduction of its first one
    on. A rank cannot have more than another one whose room is as large and comes as early. The rank whose room comes
    first is the first; ranks with zeros for parameters that get no gradient are last.
    """
    order, sizes, places = ready_order(model), sizes_of(model), flat(model, ranks).order
    buckets = buckets_before_exceeding([sizes[i] for i in order], most)
    reduced = {places[order[k]]: bucket for bucket, gradients in enumerate(buckets) for k in gradients}
    largest: dict[int, Owned] = {}
    for owned in dict.fromkeys(partitions(model, ranks)):
        comes = min((reduced.get(i, len(buckets)) for part in owned for i in range(part.first, part.end)), default=None)
        if comes is not None and (comes not in largest or whole_of(owned) > whole_of(largest[comes])):
            largest[comes] = owned
    out: list[Owned] = []
    for _, owned in sorted(largest.items(), key=lambda item: item[0]):
        if not out or whole_of(owned) > whole_of(out[-1]):
            out.append(owned)
    with_zeros = [owned for owned in dict.fromkeys(partitions(model, ranks)) if unreached_of(owned)]
    return list(dict.fromkeys([*out, *with_zeros]))
