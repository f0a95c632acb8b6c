"""DeepSpeed's ZeRO-3 with weights in files (`offload_param: {device: nvme}`), or on the host beside an optimizer in files.

Every part of a weight of at least 1 MiB gets a file when the engine is made. Then a pinned block of the host takes the
sub-groups that fit `max_in_cpu`, in their order: their files are never read again. Of the others the small parts have a pinned
block each, and the large ones come from their files through buffers, one for each part. A buffer is taken when a part is read,
which is at the latest when it is gathered, and is free again when the weight is released.

Weights that are in files alone are not gathered in advance. Their parts are read in advance instead, as long as buffers are
free and no more than twice the elements of what is being gathered have been passed. DeepSpeed stops with an assertion where a
gather wants more buffers than are free.

Sources: deepspeed/runtime/swap_tensor/partitioned_param_swapper.py; deepspeed/runtime/zero: partition_parameters.py
(_partition_param, _ensure_availability_of_partitioned_params), partitioned_param_coordinator.py (fetch_sub_module,
__prefetch_nvme_param_partitions), stage3.py (_create_param_groups_fp16_flat_cpu_memory,
_create_fp16_partitions_with_defragmentation, _partitioned_params_swap_out).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from memcalc.core.dims import Dim
from memcalc.core.dtypes import fp16
from memcalc.core.noted import Begins
from memcalc.core.tensor import Sent
from memcalc.engines.deepspeed.offloaded_params import FromHost, FromHostLeaving
from memcalc.engines.deepspeed.swapped import LEAST, OfSubGroup, ToFiles, aligned, of_sub_groups
from memcalc.engines.deepspeed.zero3_coordinator import Coordinator
from memcalc.engines.deepspeed.zero3_step import ZeRO3, play
from memcalc.engines.deepspeed.zero_layout import STAGE_3, frozen, sizes_of, thresholds_of
from memcalc.inputs.options import refuse
from memcalc.offload.host import HostRow
from memcalc.offload.transfers import Transfer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence, Set

    from memcalc.core.dtypes import DType
    from memcalc.core.noted import Noted
    from memcalc.engines.deepspeed.zero3_coordinator import Order
    from memcalc.inputs.model import Model
    from memcalc.setup.setup import Setup
    from memcalc.tape.rewritten import Out

SWAPPER: Final = "deepspeed/runtime/swap_tensor/partitioned_param_swapper.py"
FILES: Final = "nvme"
"""The axis under which a run records the parts that it reads."""


class Weights(NamedTuple):
    """The places of a rank's parts of the weights, by the weights' place in definition order."""

    parts: tuple[int, ...]
    """The elements of each part."""
    written: frozenset[int]
    """The weights whose part has a file."""
    in_files: frozenset[int]
    """The weights whose part is in a file alone."""
    alone: frozenset[int]
    """The weights whose part has a block of its own on the host."""
    flat: int
    """The elements of the host's block for sub-groups."""
    largest: tuple[int, ...]
    """The elements of each weight of the largest sub-group, whole: DeepSpeed sizes the buffer for its parts so
    (reserve_partitioned_swap_space gets ds_numel of the parameters). None if all are on the host."""
    dtype: DType
    threads: int
    buffers: int

    def in_file(self, i: int) -> int:
        """Return the elements of a part's file."""
        return aligned(self.parts[i], self.dtype.itemsize, self.threads)


def weights_of(model: Model, setup: Setup) -> Weights:
    """Return where the parts of the weights are."""
    most, buffers, threads = setup.nvme_max_in_cpu, setup.nvme_buffer_count, setup.nvme_threads
    assert most is not None and buffers is not None and threads is not None
    dtype = setup.compute_dtype
    parts = tuple(-(-size // setup.shards) for size in sizes_of(model))
    written = frozenset(i for i, n in enumerate(parts) if n * dtype.itemsize >= LEAST)
    groups = of_sub_groups(model, setup)
    whole = sum(one.elements for one in groups)
    flat = min(whole, most)
    off: set[int] = set()
    at = 0
    for one in groups:
        at += one.elements
        if at > flat:
            off.update(one.places)
    off |= frozen(model)
    places = max(groups, key=lambda one: one.elements).places if off - frozen(model) else ()
    of_largest = tuple(sizes_of(model)[i] for i in places)
    in_files = written & off
    return Weights(parts, written, in_files, frozenset(off - written), flat, of_largest, dtype, threads, buffers)


# --- while a step runs


class InFiles(NamedTuple):
    """ZeRO-3 while forward and backward run, with the weights on the host or in files. `groups`: with the optimizer in files."""

    plain: ZeRO3
    weights: Weights | None
    leaves: bool
    """True if gradients leave for the host or for files."""
    groups: tuple[OfSubGroup, ...]

    def play(self, noted: Noted, out: Out) -> None:
        """Gather and reduce. The order of modules is known from a previous step."""
        order = [event.visited for event in noted.events if isinstance(event, Begins)]
        kind = FromFilesToFiles if self.groups else FromFilesLeaving if self.leaves else FromFiles
        step = kind(self.plain, noted, order, out)
        if isinstance(step, FromFilesToFiles):
            step.groups = {i: one for one in self.groups for i in one.places}
        if self.weights is not None and self.weights.in_files:
            step.read_from(self.weights, order)
        play(step)


class FromFiles(FromHost):
    """One forward and backward whose weights come from the host or from files."""

    files: Reading | None = None

    def read_from(self, weights: Weights, order: Order) -> None:
        """Take weights from files."""

        def read(i: int) -> None:
            shape = (Dim("elements", weights.in_file(i)),)
            self.out.send(Sent(FILES, "read", "", self._phase(), None, shape, weights.dtype), self.sent)

        self.files = Reading(
            self.sizes, order, self.how.thresholds, self._launch, self._arrive, self._free, self.how.frozen
        )
        self.files.begin(weights, read)
        self.coordinator = self.files

    def _free(self, i: int) -> None:
        super()._free(i)
        if self.files is not None:
            self.files.let_go(i)


class FromFilesLeaving(FromFiles, FromHostLeaving):
    """One forward and backward whose gradients leave for the host."""


class FromFilesToFiles(FromFiles, ToFiles):
    """One forward and backward whose gradients leave for files."""


class Reading(Coordinator):
    """The bookkeeping of gathered parameters whose parts are read from files."""

    def begin(self, weights: Weights, read: Callable[[int], None]) -> None:
        """Begin a step. What is kept whole has a buffer since the step before (_post_step)."""
        self.weights, self.read = weights, read
        self.in_buffer: dict[int, bool] = dict.fromkeys(self.persistent & weights.in_files, True)
        """True if the part of a weight has been waited for."""
        self.unused = weights.buffers - len(self.in_buffer)

    def let_go(self, i: int) -> None:
        """Free the buffer of a part."""
        if self.in_buffer.pop(i, None) is not None:
            self.unused += 1

    def _is_far(self, i: int) -> bool:
        return i in self.weights.in_files and i not in self.in_buffer

    def _read(self, parameters: Sequence[int]) -> None:
        if len(set(parameters)) < len(parameters):
            why = "DeepSpeed would read a weight ahead for forward and backward at once, and stops (swap_in)"
            refuse("prefetch_bucket_size", self.thresholds.prefetch, f"with --offload-params nvme {why}; allowed: 0")
        if len(parameters) > self.unused:
            _refuse_buffers(self.weights.buffers)
        for i in parameters:
            self.in_buffer[i] = False
            self.unused -= 1
            self.read(i)

    def _gather(self, parameters: Set[int], forward: bool) -> None:
        missing = [i for i in parameters if i not in self.available and i not in self.in_flight]
        self._read(sorted(i for i in missing if self._is_far(i)))
        super()._gather(parameters, forward)

    def _prefetch(self, forward: bool) -> None:
        if not self.thresholds.prefetch:
            return
        most = min(self.thresholds.max_live - self.live, self.thresholds.prefetch)
        wanted: set[int] = set()
        elements = 0
        while self.queue and elements < most and not self._is_far(self.queue[0][0]):
            i, at = self.queue.popleft()
            self.fetched_for[i] = max(self.fetched_for.get(i, at), at)
            if i not in self.available and i not in self.in_flight and i not in wanted:
                wanted.add(i)
                elements += self.sizes[i]
        self._gather(frozenset(wanted), forward)
        self._read_ahead()

    def _read_ahead(self) -> None:
        """Read the parts of the weights that come after those that are gathered in advance."""
        in_flight = sum(self.sizes[i] for i in self.in_flight)
        passed, wanted = 0, list[int]()
        for i, _ in self.queue:
            if passed > 2 * in_flight or len(wanted) >= self.unused:
                break
            if self._is_far(i):
                wanted.append(i)
            passed += self.sizes[i]
        self._read(wanted)


def _refuse_buffers(buffers: int) -> Any:
    why = (
        "a step wants more buffers at once than there are, and DeepSpeed stops (partitioned_param_swapper.py, swap_in)"
    )
    refuse("nvme_buffer_count", buffers, f"{why}; allowed: more")


# --- the host and the files


def on_host(model: Model, setup: Setup, ranks: int) -> list[HostRow]:
    """Return what the ranks of a node keep of the weights."""
    where, size = weights_of(model, setup), setup.nvme_buffer_size
    assert size is not None
    dtype, of, always = setup.compute_dtype, "parameters/dp", "always"
    if len(where.in_files & _persistent(model, setup)) > where.buffers:
        _refuse_buffers(where.buffers)
    one = where.buffers * aligned(size, dtype.itemsize, where.threads)
    to_files = sum(aligned(n, dtype.itemsize, where.threads) for n in where.largest)
    alone = tuple(where.parts[i] for i in sorted(where.alone)) * ranks
    written = tuple(where.in_file(i) for i in sorted(where.written)) * ranks
    buffers = HostRow("pinned", "buffers of weights", "buffers", (one,) * ranks, dtype, always, SWAPPER)
    rows = [
        HostRow("pinned", "weights", of, (where.flat,) * ranks, dtype, always, STAGE_3),
        HostRow("pinned", "small weights, each by itself", "weight/dp", alone, dtype, always, STAGE_3),
        buffers._replace(is_rounded=False),
        buffers._replace(name="updated weights of a sub-group", dim=of, sizes=(to_files,) * ranks, is_rounded=False),
        HostRow("nvme", "weights", "weight/dp", written, dtype, always, SWAPPER),
        HostRow("paged", "a number for parts that are not there", "numbers", (1,) * ranks, fp16, always, SWAPPER),
    ]
    if not where.flat:
        rows.append(HostRow("paged", "a number for an empty block", "numbers", (1,) * ranks, dtype, always, STAGE_3))
    return [row for row in rows if row.nbytes]


def of_step(model: Model, setup: Setup, sent: Sequence[Sent]) -> list[Transfer]:
    """Return what a rank reads and writes of the weights in a step whose run has recorded `sent`."""
    where, many = weights_of(model, setup), setup.micro_batches
    dtype = where.dtype
    out = [
        Transfer("weights", phase, "from NVMe", elements, many, dtype, SWAPPER)
        for phase in ("forward", "backward")
        if (elements := sum(one.shape[0].size for one in sent if (one.axis, one.phase) == (FILES, phase)))
    ]
    again = sum(where.in_file(i) for i in where.in_files & _persistent(model, setup))
    updated = sum(where.in_file(i) for i in where.in_files - frozen(model))
    rest = [
        Transfer("weights that stay whole", "step", "from NVMe", again, 1, dtype, SWAPPER),
        Transfer("updated weights", "step", "to NVMe", updated, 1, dtype, SWAPPER),
    ]
    return [*out, *(one for one in rest if one.elements)]


def _persistent(model: Model, setup: Setup) -> frozenset[int]:
    """Return the weights that stay whole on the GPU."""
    most = thresholds_of(setup).persistence
    return frozenset(i for i, n in enumerate(sizes_of(model)) if n <= most)
