"""transformers' own expert parallelism under `fully_shard` (distributed/expert_parallel.py and fsdp.py), with even routing.

A fake process group moves nothing, and AllToAllEP reads back how many rows come. So copy i of a rank's tokens goes to expert
i modulo their number, whatever the router says, and every rank is taken to send what this one does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from math import prod
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import _disable_current_modes


@contextlib.contextmanager
def even_routing() -> Iterator[None]:
    """Every rank sends an equal part of its copies of tokens to each expert."""
    from transformers.distributed import expert_parallel

    dispatch, exchange = expert_parallel.AllToAllEP._dispatch_tokens, expert_parallel.all_to_all_single

    def dispatch_evenly(self: Any, hidden_states: Any, top_k_index: torch.Tensor, top_k_weights: Any) -> Any:
        with _disable_current_modes():
            experts = self.num_local_experts * self.ep_mesh.size()
            top_k_index.data.copy_(torch.arange(top_k_index.numel()).remainder(experts).view(top_k_index.shape))
        return dispatch(self, hidden_states, top_k_index, top_k_weights)

    def all_send_the_same(received: torch.Tensor, sent: torch.Tensor, **how: Any) -> None:
        exchange(received, sent, **how)
        with _disable_current_modes():
            received.copy_(sent[:1].expand(received.shape))

    expert_parallel.AllToAllEP._dispatch_tokens = dispatch_evenly
    expert_parallel.all_to_all_single = all_send_the_same
    try:
        yield
    finally:
        expert_parallel.AllToAllEP._dispatch_tokens, expert_parallel.all_to_all_single = dispatch, exchange


def experts_apart(model: Any, of: tuple[int, ...], ranks: int, **how: Any) -> DeviceMesh:
    """The experts over `ranks`, and each layer's under `fully_shard` on the ranks that have the same
    (maybe_distribute_model, apply_fully_sharded_data_parallelism). Returns the mesh of the ranks that have different ones.
    `of`: (ranks,) or (replicas, ranks), the data-parallel ranks.
    """
    from transformers.distributed import DistributedConfig
    from transformers.distributed.expert_parallel import apply_expert_parallelism

    replicas, shards = (1, *of)[-2:]
    config = DistributedConfig(dp_replicate_size=replicas, fsdp_size=shards, ep_size=ranks)
    plan = model._resolve_parallel_plans(config)[1]
    dense = init_device_mesh("cpu", (prod(of), 1), mesh_dim_names=("fsdp", "tp"))
    experts = init_device_mesh(
        "cpu", (replicas, config.efsdp_size, ranks), mesh_dim_names=("dp_replicate", "efsdp", "ep")
    )
    apply_expert_parallelism(model, experts["ep"], dense["tp"], plan)
    same = experts["efsdp"] if replicas == 1 else experts["dp_replicate", "efsdp"]
    for name, module in model.named_modules():
        if plan.get(name) == "ep_dispatch_experts":
            fully_shard(module, **how | {"mesh": same})
            module.set_gradient_divide_factor(float(config.dp_size))
            if config.efsdp_size > 1:
                module.set_force_sum_reduction_for_comms(True)
    return experts["ep"]
