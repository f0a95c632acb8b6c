"""Checks of ZeRO stages: an engine that shards nothing has none."""

from __future__ import annotations

from memcalc.inputs.options import Options, refuse


def check_stage(options: Options, engine: str, *, states_only: bool) -> None:
    """Raise InputError if `engine`, given or chosen, has nothing that the stage could shard.

    A bare number of parameters has only states, without an engine's buffers. These are the states of the ZeRO paper's
    table, which begins with one GPU.
    """
    stage = options.zero
    if states_only and options.gpus == 1 and options.engine is None:
        return
    if not stage:
        return
    engines = ("deepspeed", "fsdp2") if stage > 1 else ("deepspeed",)
    if options.engine is None and engine == "none":
        named = " or ".join(f"--engine {name} --zero {stage}" for name in engines)
        why = "1 GPU has nothing to shard, and the buffers are those of an engine, which is to be named"
        refuse("zero", stage, f"{why}; allowed: 0, more --gpus, or {named}")
    if engine in ("none", "ddp", "colossalai", "data-parallel", "parameter-server"):
        refuse("zero", stage, f"engine {engine} shards nothing; allowed: 0, or --engine {' or '.join(engines)}")
    if options.optimizer == "sgd" and engine != "fsdp2":
        refuse("zero", stage, "optimizer sgd has no states to shard; allowed: 0, or another --optimizer")
