"""DeepSpeed's sizes of ZeRO's buckets and thresholds, in elements, and the number of its reduce buckets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from memcalc.inputs.options import NOT_YET, PLUS_PLUS, Options, refuse

if TYPE_CHECKING:
    from memcalc.inputs.model import Model

ZERO_SIZES: Final[Mapping[str, tuple[int, int]]] = {
    "reduce_bucket_size": (1, 500_000_000),
    "max_live_parameters": (3, 1_000_000_000),
    "max_reuse_distance": (3, 1_000_000_000),
    "param_persistence_threshold": (3, 100_000),
    "prefetch_bucket_size": (3, 50_000_000),
    "sub_group_size": (3, 1_000_000_000),
}
"""The lowest stage that uses a size, and DeepSpeed's default in elements (deepspeed/runtime/zero/config.py)."""


def zero_sizes(options: Options, engine: str) -> dict[str, int | None]:
    out: dict[str, int | None] = {}
    for name, (stage, default) in ZERO_SIZES.items():
        given: int | None = getattr(options, name)
        used = engine == "deepspeed" and options.zero >= stage and options.pp == 1
        if given is not None and not used:
            stages = "--zero 3" if stage == 3 else "--zero 1, 2 or 3"
            refuse(name, given, f"is an option of DeepSpeed; allowed: with --engine deepspeed and {stages}")
        out[name] = (default if given is None else given) if used else None
    return out


NVME_SIZES: Final[Mapping[str, tuple[str, int]]] = {
    "nvme_optimizer_buffer_count": ("offload_optimizer", 4),
    "nvme_buffer_count": ("offload_params", 5),
    "nvme_buffer_size": ("offload_params", 100_000_000),
    "nvme_max_in_cpu": ("offload_params", 1_000_000_000),
    "nvme_threads": ("offload_optimizer or offload_params", 1),
}
"""The offload that uses a size, and DeepSpeed's default (deepspeed/runtime/zero/offload_config.py, swap_tensor/constants.py)."""


def nvme_sizes(options: Options, engine: str) -> dict[str, int | None]:
    """Return the sizes of swapping to files; None where nothing is in files."""
    out: dict[str, int | None] = {}
    for name, (of, default) in NVME_SIZES.items():
        given: int | None = getattr(options, name)
        used = engine == "deepspeed" and any(getattr(options, one) == "nvme" for one in of.split(" or "))
        if given is not None and not used:
            allowed = " or ".join(f"--{one.replace('_', '-')} nvme" for one in of.split(" or "))
            refuse(name, given, f"is of DeepSpeed's files; allowed: with {allowed}")
        out[name] = (default if given is None else given) if used else None
    return out


def overlap_comm_of(options: Options, engine: str) -> bool | None:
    """Return whether reductions overlap with backward; None where DeepSpeed decides: stage 3 always overlaps. Raise InputError
    where a given value is not modelled."""
    given = options.overlap_comm
    if engine != "deepspeed" or not options.zero:
        if given is not None:
            refuse("overlap_comm", given, "is an option of DeepSpeed; allowed: with --engine deepspeed and --zero 2")
        return None
    if options.zero == 3:
        if given is False:
            refuse("overlap_comm", given, f"with --zero 3 {NOT_YET}leave it out")
        return None
    if given and options.zero == 1:
        refuse("overlap_comm", given, f"with --zero 1, which then reduces while backward runs, {NOT_YET}off")
    if given and max(options.tp, options.pp) > 1:
        refuse("overlap_comm", given, f"with --tp or --pp {NOT_YET}off")
    return bool(given)


def zero_plus_plus_of(options: Options, engine: str, precision: str, model: Model | None) -> dict[str, Any]:
    """Return the options of ZeRO++. Raises InputError for what is not done with one that is on."""
    given = {name: getattr(options, name) for name in PLUS_PLUS}
    if given != PLUS_PLUS:
        from memcalc.setup.zero_plus_plus import check_zero_plus_plus

        check_zero_plus_plus(options, engine, precision, model)
    return given
