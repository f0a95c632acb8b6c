"""DeepSpeed's ZeRO-3 with its parameters on the host and no optimizer, as it runs a forward: what it gathers and releases."""

from __future__ import annotations

import contextlib
from typing import Any
from unittest.mock import patch

import torch
from deepspeed_oracle import ranks
from oracle import build


def gathers(config: dict[str, Any], seq_len: int = 4, **options: int) -> tuple[list[list[str]], int, int]:
    """Return the parameters of each gather of a forward, the most elements that are gathered at once, those of small parameters
    included, and the elements that a forward copies from the host. The order of modules is known from earlier forwards."""
    import deepspeed
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator as Coordinator

    made: list[list[str]] = []
    live: dict[str, int] = {}
    most = copied = 0
    fetch, release = (
        Coordinator._PartitionedParameterCoordinator__all_gather_params_,
        (  # type: ignore[attr-defined]
            Coordinator._PartitionedParameterCoordinator__release_param  # type: ignore[attr-defined]
        ),
    )

    def noted(self: Any, params: Any, forward: bool, quantize: bool) -> None:
        nonlocal most, copied
        new = sorted((names[id(p)], p.ds_numel) for p in params if p.ds_status.name == "NOT_AVAILABLE")
        if new:
            made.append([name for name, _ in new])
            live.update(new)
            copied += sum(size for _, size in new)
            most = max(most, sum(live.values()))
        fetch(self, params, forward, quantize)

    def released(self: Any, param: Any, *args: Any) -> None:
        release(self, param, *args)
        if param.ds_status.name == "NOT_AVAILABLE":
            live.pop(names[id(param)], None)

    with contextlib.ExitStack() as stack:
        stack.enter_context(ranks(1))
        model = build(config, "sdpa", torch.float32).eval()
        names = {id(p): name for name, p in model.named_parameters()}
        given = {"stage": 3, "offload_param": {"device": "cpu", "pin_memory": False}, **options}
        engine, *_ = deepspeed.initialize(
            model=model,
            config={"train_micro_batch_size_per_gpu": 1, "zero_optimization": given, "bf16": {"enabled": True}},
        )
        names |= {id(p): name.removeprefix("module.") for name, p in engine.named_parameters()}
        prefix = "_PartitionedParameterCoordinator__"
        stack.enter_context(patch.object(Coordinator, f"{prefix}all_gather_params_", noted))
        stack.enter_context(patch.object(Coordinator, f"{prefix}release_param", released))
        ids = torch.zeros((1, seq_len), dtype=torch.int64)
        with torch.no_grad():
            for _ in range(3):
                made.clear()
                copied = 0
                most = sum(live.values())
                engine(input_ids=ids)
        result = [list(one) for one in made], most, copied
        engine.destroy()
    return result
