"""Which ZeRO stages go with an engine (one that shards nothing has none), and DeepSpeed's sizes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from memcalc.inputs.options import Options, refuse

if TYPE_CHECKING:
    from collections.abc import Mapping


def check_stage(options: Options, engine: str, *, states_only: bool) -> None:
    """InputError where `engine`, given or chosen, has nothing that the stage could shard. The states of a bare size, which have
    no engine's buffers, are those of the ZeRO paper's table, which begins with one GPU."""
    stage = options.zero
    if states_only and options.gpus == 1 and options.engine is None:
        return
    if not stage:
        return
    engines = ("deepspeed", "fsdp2") if stage > 1 else ("deepspeed",)
    if options.engine is None and engine == "none":
        named = " or ".join(f"--engine {name} --zero {stage}" for name in engines)
        why = "1 GPU has none to shard with, and which engine's buffers it has all the same is not said"
        refuse("zero", stage, f"{why}; allowed: 0, more --gpus, or {named}")
    if engine in ("none", "ddp"):
        refuse("zero", stage, f"engine {engine} shards nothing; allowed: 0, or --engine {' or '.join(engines)}")
    if options.optimizer == "sgd" and engine != "fsdp2":
        refuse("zero", stage, "optimizer sgd keeps no state that ZeRO could shard; allowed: 0, or another --optimizer")


ZERO_SIZES: Final[Mapping[str, tuple[int, int]]] = {
    "reduce_bucket_size": (1, 500_000_000),
    "max_live_parameters": (3, 1_000_000_000),
    "max_reuse_distance": (3, 1_000_000_000),
    "param_persistence_threshold": (3, 100_000),
    "prefetch_bucket_size": (3, 50_000_000),
    "sub_group_size": (3, 1_000_000_000),
}
"""The lowest stage that has it, and DeepSpeed's default (deepspeed/runtime/zero/config.py), in elements."""


def zero_sizes(options: Options, engine: str) -> dict[str, int | None]:
    """DeepSpeed's sizes, in elements; None where the engine or the stage has no such thing."""
    out: dict[str, int | None] = {}
    for name, (stage, default) in ZERO_SIZES.items():
        given: int | None = getattr(options, name)
        used = engine == "deepspeed" and options.zero >= stage and options.pp == 1
        if given is not None and not used:
            stages = "--zero 3" if stage == 3 else "--zero 1, 2 or 3"
            refuse(name, given, f"is DeepSpeed's; allowed: with --engine deepspeed and {stages}")
        out[name] = (default if given is None else given) if used else None
    return out
