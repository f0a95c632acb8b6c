"""The copies of ZeRO-3 between the GPU and the host in a step, if the host has the weights.

A weight's part goes to the GPU for each of its all-gathers. Without the optimizer on the host the update ends on the GPU in
fp32; `copy_` to the host's 16-bit part waits, so torch moves fp32 and casts it on the host (aten/src/ATen/native/cuda/Copy.cu,
copy_kernel_cuda). With it, each reduced gradient's part goes to the host, is read back for its norm, and goes once more in
fp32 with the last micro-batch (stage3.py: partition_grads, _offload_grad_partition_at_boundary).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal

from memcalc.core.dims import numel
from memcalc.core.dtypes import boolean, fp16, fp32
from memcalc.engines.deepspeed.sub_groups import sub_groups_of
from memcalc.engines.deepspeed.zero_layout import STAGE_3, sizes_of, thresholds_of, unreached
from memcalc.offload.transfers import Transfer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from memcalc.core.tensor import Sent
    from memcalc.inputs.model import Model
    from memcalc.setup.setup import Setup

_PARAMETERS: Final = "deepspeed/runtime/zero/partition_parameters.py"


def of_run(model: Model, setup: Setup, sent: Sequence[Sent]) -> list[Transfer]:
    """Return what a rank copies in a step whose run has sent `sent`."""
    out = [*_parts_of_gathers(setup, sent), *_small(model, setup)]
    trained = sum(sum(group.parts) for group in sub_groups_of(model, setup))
    if setup.offload_optimizer == "none":
        return [*out, Transfer("updated weights", "step", "to the host", trained, 1, fp32, STAGE_3)]
    sizes, many, dtype = sizes_of(model), setup.micro_batches, setup.compute_dtype
    reduced = trained - sum(-(-sizes[i] // setup.shards) for i in unreached(model))
    norms = len(sub_groups_of(model, setup))
    return [
        *out,
        Transfer("gradients", "backward", "to the host", reduced, many, dtype, STAGE_3),
        Transfer("gradients, read back", "backward", "to the GPU", reduced, many, dtype, STAGE_3),
        *_in_fp32(model, setup, reduced),
        *_overflow(setup),
        Transfer("norms", "step", "to the host", norms, 1, fp32, STAGE_3),
    ]


def _in_fp32(model: Model, setup: Setup, reduced: int) -> list[Transfer]:
    """Return the copies of reduced gradients in fp32. Those that have no file, unlike their sub-group, wait for the update."""
    if setup.offload_optimizer != "nvme":
        return [Transfer("gradients in fp32", "backward", "to the host", reduced, 1, fp32, STAGE_3)]
    from memcalc.engines.deepspeed.swapped import of_sub_groups

    idle = unreached(model)
    late = sum(
        part - one.written(part)
        for one in of_sub_groups(model, setup)
        for i, part in zip(one.places, one.parts, strict=True)
        if one.is_in_files and i not in idle
    )
    return [
        Transfer("gradients in fp32", "backward", "to the host", reduced - late, 1, fp32, STAGE_3),
        Transfer("gradients in fp32 that have no file", "step", "to the host", late, 1, fp32, STAGE_3),
    ]


def _overflow(setup: Setup) -> list[Transfer]:
    """Return the copy of fp16's flag of an overflow, which all ranks reduce (has_overflow)."""
    flag = Transfer("whether a gradient overflowed", "step", "to the GPU", 1, 1, boolean, STAGE_3)
    return [flag] if setup.compute_dtype is fp16 else []


def _parts_of_gathers(setup: Setup, sent: Sequence[Sent]) -> list[Transfer]:
    out: list[Transfer] = []
    phases: tuple[Literal["forward", "backward"], ...] = ("forward", "backward")
    for phase in phases:
        gathered = sum(numel(one.shape)[0] for one in sent if (one.kind, one.phase) == ("all_gather", phase))
        if own := gathered // setup.shards:
            many, dtype = setup.micro_batches, setup.compute_dtype
            out.append(Transfer("own parts of weights", phase, "to the GPU", own, many, dtype, _PARAMETERS))
    return out


def _small(model: Model, setup: Setup) -> list[Transfer]:
    """Return the copies of the weights that stay whole on the GPU, after the update."""
    most = thresholds_of(setup).persistence
    own = sum(-(-n // setup.shards) for n in sizes_of(model) if n <= most)
    name = "own parts of small weights"
    return [Transfer(name, "step", "to the GPU", own, 1, setup.compute_dtype, _PARAMETERS)] if own else []
