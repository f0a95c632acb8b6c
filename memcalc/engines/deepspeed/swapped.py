"""DeepSpeed's ZeRO-3 with the optimizer in files (`offload_optimizer: {device: nvme}`, ZeRO-Infinity).

A sub-group of at least 1 MiB in fp32 has a file for its weights and for each moment. The step reads one sub-group at a time
into buffers of the host, updates it there with DeepSpeedCPUAdam, and writes it back. A smaller one stays on the host.

With the last micro-batch a rank's part of each gradient is cast to fp32 on the GPU, and those of a whole bucket wait there
for each other. A part of at least 1 MiB goes to a file, but for what is left over a multiple of the alignment. What has no
file stays on the GPU until its sub-group is updated; a leftover is a view, which keeps its whole part there.

Sources: deepspeed/runtime/zero/stage3.py (partition_grads, _swap_out_offload_fp32_gradients, step), deepspeed/runtime/
swap_tensor: optimizer_utils.py (_swap_out_gradients, _adjust_for_misaligned_lengths, unswapped_gradients),
partitioned_optimizer_swapper.py.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Final, NamedTuple

from memcalc.core.dtypes import fp32, fp64
from memcalc.core.noted import Begins
from memcalc.engines.deepspeed.offloaded_3 import AT_A_TIME, CPU_ADAM, Leaving
from memcalc.engines.deepspeed.sub_groups import sub_groups_of
from memcalc.engines.deepspeed.zero3_step import ZeRO3, play
from memcalc.engines.deepspeed.zero_layout import groups_of, unreached
from memcalc.engines.deepspeed.zero_partitions import block
from memcalc.offload.host import HostRow
from memcalc.offload.transfers import Transfer

if TYPE_CHECKING:
    from memcalc.core.noted import Noted
    from memcalc.core.rows import Row
    from memcalc.inputs.model import Model
    from memcalc.setup.setup import Setup
    from memcalc.tape.rewritten import Out

LEAST: Final = 1024**2
"""The bytes of the smallest tensor that has a file (swap_tensor/utils.py, MIN_AIO_BYTES; aio's block_size is no more)."""
ALIGNED: Final = 1024
"""The bytes that a thread's piece is a multiple of (AIO_ALIGNED_BYTES)."""
SWAPPER: Final = "deepspeed/runtime/swap_tensor/optimizer_utils.py"


class OfSubGroup(NamedTuple):
    """A rank's part of a sub-group of the step."""

    places: tuple[int, ...]
    """The places of its parameters in definition order."""
    parts: tuple[int, ...]
    """The elements of a rank's part of each."""
    threads: int

    @property
    def elements(self) -> int:
        return sum(self.parts)

    @property
    def is_in_files(self) -> bool:
        return self.elements * fp32.itemsize >= LEAST

    @property
    def in_file(self) -> int:
        """Return the elements of one of its files."""
        return aligned(self.elements, fp32.itemsize, self.threads)

    def written(self, part: int) -> int:
        """Return the elements of a gradient's part that go to a file."""
        whole = part - part % (ALIGNED * self.threads // fp32.itemsize)
        return whole if self.is_in_files and whole * fp32.itemsize >= LEAST else 0

    def stays(self, part: int) -> int:
        """Return the elements that a gradient's part keeps on the GPU until the update."""
        return part if self.is_in_files and self.written(part) < part else 0


def aligned(elements: int, itemsize: int, threads: int) -> int:
    """Return so many elements, rounded up to what is read and written at once (_io_aligned_numel)."""
    unit = ALIGNED * threads // itemsize
    return -(-elements // unit) * unit


def of_sub_groups(model: Model, setup: Setup) -> list[OfSubGroup]:
    """Return the sub-groups with their parameters."""
    places = (i for group in groups_of(model, setup.shards) for i in group.places)
    threads = setup.nvme_threads or 1
    return [
        OfSubGroup(tuple(islice(places, len(one.parts))), tuple(one.parts), threads)
        for one in sub_groups_of(model, setup)
    ]


# --- on the GPU


class ZeRO3Swapped(NamedTuple):
    """ZeRO-3 while forward and the last backward of a step run, with the optimizer in files."""

    plain: ZeRO3
    groups: tuple[OfSubGroup, ...]

    def play(self, noted: Noted, out: Out) -> None:
        """Gather and reduce. The order of modules is known from a previous step."""
        order = [event.visited for event in noted.events if isinstance(event, Begins)]
        step = ToFiles(self.plain, noted, order, out)
        step.groups = {i: one for one in self.groups for i in one.places}
        play(step)


class ToFiles(Leaving):
    """One forward and backward whose gradients leave for files."""

    groups: dict[int, OfSubGroup]
    staying: tuple[object, ...] = ()

    def keep_own(self) -> None:
        """Cast the rank's part of each gradient of the bucket to fp32, and then move them all."""
        leaving: list[object] = []
        for i, _ in sorted(self.bucket, key=lambda one: one[0]):
            part, group = -(-self.sizes[i] // self.how.ranks), self.groups[i]
            _back = self._block("a gradient's part, read back from the host", part)
            _in_fp64 = self._block("a gradient's part in fp64 for its norm", min(part, AT_A_TIME), fp64)
            norm = self._block("norm of a gradient", 1, fp64)
            del _in_fp64
            self.norms = (*self.norms, norm)
            del norm
            of_fp32 = self.how.dtype is fp32
            in_fp32 = _back if of_fp32 else self._block("a gradient's part in fp32", part, fp32)
            if group.is_in_files:
                leaving.append(in_fp32)
            if group.stays(part):
                self.staying = (*self.staying, in_fp32)
            del in_fp32, _back
        leaving.clear()

    def ends_backward(self) -> None:
        super().ends_backward()
        self.staying = ()  # the step's rows have these


def staying_rows(groups: list[OfSubGroup]) -> list[Row]:
    """Return the gradients that wait on the GPU for the update."""
    elements = sum(one.stays(part) for one in groups for part in one.parts)
    life = "end of backward to the sub-group's update"
    name = "parts of gradients in fp32 that have no file"
    return [block("temporaries", name, "parameters/dp", elements, fp32, life, SWAPPER)] if elements else []


# --- on the host and in files


def on_host(model: Model, setup: Setup, ranks: int) -> list[HostRow]:
    """Return the rows that take the place of the fp32 gradients, weights and moments of the sub-groups that have files."""
    groups = [one for one in of_sub_groups(model, setup) if one.is_in_files]
    if not groups:
        return []
    many, dim, always = setup.nvme_optimizer_buffer_count, "parameters/dp", "always"
    assert many is not None
    largest = aligned(max(one.elements for one in of_sub_groups(model, setup)), fp32.itemsize, setup.nvme_threads or 1)
    sizes = tuple(one.in_file for one in groups) * ranks
    written = tuple(n for one in groups for part in one.parts if (n := one.written(part))) * ranks
    buffers = HostRow("pinned", "buffers of sub-groups", dim, (largest,) * many * ranks, fp32, always, SWAPPER)
    return [
        buffers._replace(is_rounded=False),
        HostRow("nvme", "fp32 weights of the sub-groups", dim, sizes, fp32, always, SWAPPER),
        HostRow("nvme", "exp_avg", dim, sizes, fp32, always, CPU_ADAM),
        HostRow("nvme", "exp_avg_sq", dim, sizes, fp32, always, CPU_ADAM),
        *([HostRow("nvme", "gradients", dim, written, fp32, always, SWAPPER)] if written else []),
    ]


def of_step(model: Model, setup: Setup) -> list[Transfer]:
    """Return what a rank reads and writes in a step."""
    groups = [one for one in of_sub_groups(model, setup) if one.is_in_files]
    idle = unreached(model)
    written = sum(
        one.written(part) for one in groups for i, part in zip(one.places, one.parts, strict=True) if i not in idle
    )
    states, of = sum(one.in_file for one in groups), "fp32 weights and moments"
    out = [
        Transfer("gradients in fp32", "backward", "to NVMe", written, 1, fp32, SWAPPER),
        Transfer("gradients in fp32", "step", "from NVMe", written, 1, fp32, SWAPPER),
        Transfer(of, "step", "from NVMe", _TENSORS * states, 1, fp32, SWAPPER),
        Transfer(of, "step", "to NVMe", _TENSORS * states, 1, fp32, SWAPPER),
    ]
    return [one for one in out if one.elements]


_TENSORS: Final = 3
"""The weights and two moments of a sub-group."""
