"""DeepSpeed's ZeRO-3 with the weights on the host (`offload_param: {device: cpu}`), with the optimizer there or not.

A rank's parts of the weights that train lie in one pinned block, and each frozen weight's part in a pinned block of its own;
those of weights that stay whole on the GPU too. Before each all-gather the rank's parts are copied to the GPU, and
the copies go when the all-gather has begun. The step's all-gather of small weights has the copies of all of them at once.
`buffer_count`, `buffer_size` and `max_in_cpu` are for NVMe alone. Sources, all in deepspeed/runtime/zero: stage3.py
(_create_fp16_partitions_with_defragmentation, _reassign_or_swap_out_partitioned_parameters, _post_step),
partition_parameters.py (_partition_param, _all_gather_dtype, _all_gather_sequential, _allgather_params_coalesced).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from memcalc.core.dtypes import fp64
from memcalc.core.noted import Begins
from memcalc.engines.deepspeed import offloaded_3
from memcalc.engines.deepspeed.offloaded_3 import Leaving
from memcalc.engines.deepspeed.sub_groups import sub_groups_of
from memcalc.engines.deepspeed.zero3_coordinator import Handle
from memcalc.engines.deepspeed.zero3_step import Step, ZeRO3, play
from memcalc.engines.deepspeed.zero_layout import STAGE_3, frozen, sizes_of, thresholds_of
from memcalc.engines.deepspeed.zero_partitions import block, nbytes_of
from memcalc.offload.host import HostRow

if TYPE_CHECKING:
    from memcalc.core.noted import Noted
    from memcalc.engines.base.holdings import Holdings
    from memcalc.engines.deepspeed.swapped_params import InFiles
    from memcalc.inputs.model import Model
    from memcalc.setup.setup import Setup
    from memcalc.tape.rewritten import Out


class ZeRO3FromHost(NamedTuple):
    """ZeRO-3 while forward and backward run, with the weights on the host."""

    plain: ZeRO3

    def play(self, noted: Noted, out: Out) -> None:
        """Gather and reduce. The order of modules is known from a previous step."""
        order = [event.visited for event in noted.events if isinstance(event, Begins)]
        play(FromHost(self.plain, noted, order, out))


class BothOnHost(NamedTuple):
    """ZeRO-3 while forward and the last backward of a step run, with the weights and the optimizer on the host."""

    plain: ZeRO3

    def play(self, noted: Noted, out: Out) -> None:
        """Gather and reduce. The order of modules is known from a previous step."""
        order = [event.visited for event in noted.events if isinstance(event, Begins)]
        play(FromHostLeaving(self.plain, noted, order, out))


class FromHost(Step):
    """One forward and backward whose weights come from the host."""

    def _gather(self, parameters: tuple[int, ...], handle: Handle) -> None:
        super()._gather(parameters, handle)
        if self.how.ranks == 1:
            self.whole.update((i, self._block("parameters copied from the host", self.sizes[i])) for i in parameters)
        elif parameters:
            own = sum(self._padded(i) for i in parameters) // self.how.ranks
            _copies = self._block("own parts of parameters, copied from the host", own)


class FromHostLeaving(FromHost, Leaving):
    """One forward and backward whose weights come from the host, and whose gradients leave for it."""


def on_gpu(model: Model, setup: Setup, held: Holdings, over: ZeRO3) -> Holdings:
    """Return what a rank holds on the GPU; `held` is what it holds without offload."""
    dtype, ranks, life = setup.compute_dtype, setup.shards, "from the end of a step to the next one"
    always = [row for row in held.always if row.component != "parameters"]
    small = [n for n in sizes_of(model) if n <= thresholds_of(setup).persistence]
    whole = sum(-(-n // ranks) * ranks for n in small)
    kept = [block("buffers", _KEPT, "persistent", whole, dtype, life, STAGE_3)] if whole else []
    own = block("temporaries", _OWN, "persistent/dp", whole // ranks, dtype, "end of the step", STAGE_3)
    arriving = [*kept, own] if whole and ranks > 1 else kept
    scaled = [row for row in held.backward if row.name != _KEPT]
    held = held._replace(always=tuple(always), forward=tuple(kept), backward=(*kept, *scaled))
    if setup.offload_optimizer == "none":
        groups = len(sub_groups_of(model, setup))
        numbers = block(
            "temporaries", "norms of the sub-groups", "numbers", groups + 2, fp64, "within the step", STAGE_3
        )
        step = max(list(held.step), [*arriving, numbers], key=nbytes_of)
        plain = ZeRO3FromHost(over) if setup.offload_params == "cpu" else _in_files(model, setup, over)
        return held._replace(step=tuple(step), over=plain, order=None)
    left = offloaded_3.on_gpu(model, setup, held, kept, over)
    step = max(list(left.step), arriving, key=nbytes_of)  # the norms have gone when small weights come back
    if "nvme" in (setup.offload_optimizer, setup.offload_params):
        return left._replace(step=tuple(step), over=_in_files(model, setup, over))
    return left._replace(step=tuple(step), over=BothOnHost(over))


def _in_files(model: Model, setup: Setup, over: ZeRO3) -> InFiles:
    """Return what ZeRO-3 does while a run goes on, with the optimizer, the weights or both in files."""
    from memcalc.engines.deepspeed.swapped import of_sub_groups
    from memcalc.engines.deepspeed.swapped_params import InFiles, weights_of

    weights = weights_of(model, setup) if setup.offload_params == "nvme" else None
    groups = tuple(of_sub_groups(model, setup)) if setup.offload_optimizer == "nvme" else ()
    return InFiles(over, weights, setup.offload_optimizer != "none", groups)


_KEPT: Final = "small parameters kept whole"
_OWN: Final = "own parts of small parameters, copied from the host"


def on_host(model: Model, setup: Setup) -> list[HostRow]:
    """Return what the ranks of a node keep on the host between steps."""
    ranks, dtype, of = min(setup.gpus, setup.gpus_per_node), setup.compute_dtype, "parameters/dp"
    if setup.offload_params == "nvme":
        from memcalc.engines.deepspeed.swapped_params import on_host as blocks_and_files

        rows = blocks_and_files(model, setup, ranks)
        return rows if setup.offload_optimizer == "none" else [*rows, *offloaded_3.on_host(model, setup)]
    sizes = sizes_of(model)
    trained = sum(sum(group.parts) for group in sub_groups_of(model, setup))
    parts = tuple(-(-sizes[i] // setup.shards) for i in sorted(frozen(model)))
    rows = [HostRow("pinned", "weights", of, (trained,) * ranks, dtype, "always", STAGE_3)]
    if parts:
        rows.append(HostRow("pinned", "frozen weights", "weight/dp", parts * ranks, dtype, "always", STAGE_3))
    return rows if setup.offload_optimizer == "none" else [*rows, *offloaded_3.on_host(model, setup)]
