"""DeepSpeed's ZeRO-3 with the optimizer on the host (`offload_optimizer: {device: cpu}`).

The GPU keeps its shards of the weights, the reduce bucket, and what is gathered. A rank's part of each reduced gradient is
copied to the host in the gradients' dtype and read back, its norm is computed in fp64, and it is copied once more in fp32.
Sources: deepspeed/runtime/zero/stage3.py (partition_grads, _offload_grad_partition_at_boundary, _constant_buffered_norm2, step).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from memcalc.core.dtypes import boolean, fp32, fp64, uint8
from memcalc.core.noted import Begins
from memcalc.engines.deepspeed.sub_groups import sub_groups_of
from memcalc.engines.deepspeed.zero3_step import Step, ZeRO3, play
from memcalc.engines.deepspeed.zero_layout import STAGE_3
from memcalc.engines.deepspeed.zero_partitions import block, nbytes_of
from memcalc.offload.host import HostRow

if TYPE_CHECKING:
    from memcalc.core.noted import Noted
    from memcalc.core.rows import Row
    from memcalc.engines.base.holdings import Holdings
    from memcalc.inputs.model import Model
    from memcalc.setup.setup import Setup
    from memcalc.tape.rewritten import Out

CPU_ADAM: Final = "deepspeed/ops/adam/cpu_adam.py"
AT_A_TIME: Final = 250_000_000
"""The elements of a gradient whose norm is computed at a time."""
_CHECK: Final = 16
"""The bytes of the numbers that `complete_grad_norm_calculation_for_cpu_offload` makes, when small parameters are freed: the
sum and its root, three masks and the value that is filled in are 15 (mask_nan_or_inf_with_val_inplace); DeepSpeed's run has one
byte more, whose owner was not found."""
_ON_HOST: Final = ("the last norm", "whether a gradient overflowed", "FusedAdam's overflow flag")


class ZeRO3Offloaded(NamedTuple):
    """ZeRO-3 while forward and the last backward of a step run."""

    plain: ZeRO3

    def play(self, noted: Noted, out: Out) -> None:
        """Gather and reduce. The order of modules is known from a previous step."""
        order = [event.visited for event in noted.events if isinstance(event, Begins)]
        play(Leaving(self.plain, noted, order, out))


class Leaving(Step):
    """One forward and backward whose gradients leave for the host."""

    norms: tuple[object, ...] = ()

    def keep_own(self) -> None:
        """Copy the rank's part of each gradient of the bucket to the host, in the order of the parameters."""
        for i, _ in sorted(self.bucket, key=lambda one: one[0]):
            part = -(-self.sizes[i] // self.how.ranks)
            _back = self._block("a gradient's part, read back from the host", part)
            _in_fp64 = self._block("a gradient's part in fp64 for its norm", min(part, AT_A_TIME), fp64)
            norm = self._block("norm of a gradient", 1, fp64)
            del _in_fp64
            self.norms = (*self.norms, norm)
            del norm
            if self.how.dtype is not fp32:
                _in_fp32 = self._block("a gradient's part in fp32", part, fp32)
                del _in_fp32
            del _back

    def ends_backward(self) -> None:
        self.norms = ()  # the step's rows have these


def on_gpu(model: Model, setup: Setup, held: Holdings, kept: list[Row], over: ZeRO3) -> Holdings:
    """Return what a rank holds on the GPU; `held` is what it holds without offload, and `kept` the weights that stay
    whole."""
    always = [
        row
        for row in held.always
        if row.component not in ("optimizer_states", "gradients") and row.name not in _ON_HOST
    ]
    norms = sum(len(group.parts) for group in sub_groups_of(model, setup))
    life = "until the step is over"
    noted = block("temporaries", "norms of gradients", "numbers", norms, fp64, life, STAGE_3)
    checked = block("temporaries", "the norm that is sent, and its check", "bytes", _CHECK, uint8, life, STAGE_3)
    if setup.offload_optimizer == "nvme":
        from memcalc.engines.deepspeed.swapped import ZeRO3Swapped, of_sub_groups, staying_rows

        groups = of_sub_groups(model, setup)
        staying = staying_rows(groups)
        step = max([*kept, noted, *staying], [noted, checked, *staying], key=nbytes_of)
        swapped = ZeRO3Swapped(over, tuple(groups))
        return held._replace(always=tuple(always), step=tuple(step), over=swapped, order=None)
    step = max([*kept, noted], [noted, checked], key=nbytes_of)
    return held._replace(always=tuple(always), step=tuple(step), over=ZeRO3Offloaded(over), order=None)


def on_host(model: Model, setup: Setup) -> list[HostRow]:
    """Return what the ranks of a node keep on the host between steps."""
    ranks = min(setup.gpus, setup.gpus_per_node)
    dtype, of, always = setup.compute_dtype, "parameters/dp", "always"
    groups = [sum(group.parts) for group in sub_groups_of(model, setup)]
    in_files: list[HostRow] = []
    whole, one = (sum(groups),) * ranks, (1,) * ranks
    if setup.offload_optimizer == "nvme":
        from memcalc.engines.deepspeed.swapped import of_sub_groups
        from memcalc.engines.deepspeed.swapped import on_host as buffers_and_files

        in_files = buffers_and_files(model, setup, ranks)
        groups = [one.elements for one in of_sub_groups(model, setup) if not one.is_in_files]
    each = tuple(groups) * ranks
    return [
        *in_files,
        HostRow("pinned", "gradients", of, whole, dtype, always, STAGE_3),
        HostRow("pinned", "gradients of the sub-groups in fp32", of, each, fp32, always, STAGE_3),
        HostRow("paged", "fp32 weights of the sub-groups", of, each, fp32, always, STAGE_3),
        HostRow("paged", "exp_avg", of, each, fp32, always, CPU_ADAM),
        HostRow("paged", "exp_avg_sq", of, each, fp32, always, CPU_ADAM),
        HostRow("paged", "the last norm", "numbers", one, fp32, always, STAGE_3),
        HostRow("paged", "whether a gradient overflowed", "numbers", one, boolean, always, STAGE_3),
    ]
