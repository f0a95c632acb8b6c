# pyright: basic
"""Experts over ranks: transformers' own expert parallelism under `fully_shard` (distributed/mixin.py,
expert_parallel.py and fsdp.py), and the routing of tokens to experts, there and in DeepSpeed's AutoEP.

A fake process group sends nothing, and AllToAllEP reads back how many rows come. So copy i of a rank's tokens goes to
expert i modulo their number, whatever the router says, and every rank is taken to send what this one does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import _disable_current_modes

from memcalc.validate import auto_ep
from memcalc.validate.versions import refuse_older

if TYPE_CHECKING:
    from memcalc.setup.setup import Setup


@contextlib.contextmanager
def even_routing(busiest: int = 1, *, alone: bool = True) -> Iterator[None]:
    """Let every rank send an equal part of its copies of tokens to each expert, the other ranks `busiest` times that to
    the first, within a block. `alone`: there are no other ranks."""
    from transformers.distributed import expert_parallel

    real: Any = expert_parallel
    dispatch, exchange = real.AllToAllEP._dispatch_tokens, real.all_to_all_single

    def dispatch_evenly(self: Any, hidden_states: Any, top_k_index: torch.Tensor, top_k_weights: Any) -> Any:
        with _disable_current_modes():
            experts = self.num_local_experts * self.ep_mesh.size()
            copies = torch.arange(top_k_index.numel(), device=top_k_index.device)
            top_k_index.data.copy_(copies.remainder(experts).view(top_k_index.shape))
            del copies
        return dispatch(self, hidden_states, top_k_index, top_k_weights)

    def all_send_the_same(received: torch.Tensor, sent: torch.Tensor, **how: Any) -> None:
        exchange(received, sent, **how)
        with _disable_current_modes():
            received.copy_(sent[:1].expand(received.shape))
            received[:, 0] *= busiest

    real.AllToAllEP._dispatch_tokens = dispatch_evenly
    if alone:
        real.all_to_all_single = all_send_the_same
    try:
        yield
    finally:
        real.AllToAllEP._dispatch_tokens, real.all_to_all_single = dispatch, exchange


@contextlib.contextmanager
def routing(setup: Setup, *, alone: bool) -> Iterator[None]:
    """Route tokens to the experts of a setup as evenly as estimated, within a block. `alone`: the other ranks are not
    running."""
    with contextlib.ExitStack() as stack:
        if setup.ep > 1 and setup.engine == "deepspeed":
            stack.enter_context(balanced_routing())
            stack.enter_context(auto_ep.known_to_transformers())
            if alone:
                stack.enter_context(auto_ep.alone())
        elif setup.ep > 1:
            try:
                stack.enter_context(even_routing(alone=alone))
            except ImportError:
                refuse_older("ep", setup.ep)
        yield


@contextlib.contextmanager
def balanced_routing() -> Iterator[None]:
    """Choose expert e for the copies e, e + experts, e + 2·experts, … of tokens, whatever the router says, within a
    block."""
    original = torch.topk

    def topk(scores: torch.Tensor, k: int, dim: int = -1, **kwargs: Any) -> Any:
        chosen = original(scores, k, dim=dim, **kwargs)
        with _disable_current_modes():
            indices = torch.arange(chosen.indices.numel()).remainder(scores.shape[-1])
            chosen.indices.data.copy_(indices.view(chosen.indices.shape))
        return chosen

    torch.topk = topk
    try:
        yield
    finally:
        torch.topk = original


def share_experts(model: Any, device: str, config: Any, split: DeviceMesh | None = None, **how: Any) -> DeviceMesh:
    """Spread the experts over the ranks of `config` (a DistributedConfig), and run `fully_shard(**how)` for each
    layer's experts over the ranks that have the same ones.

    `split` is the mesh of tensor parallelism. Returns the mesh of ranks with different experts.
    """
    from transformers.distributed.expert_parallel import apply_expert_parallelism

    plan = model._resolve_parallel_plans(config)[1]
    if split is None:
        split = init_device_mesh(device, (config.dp_size, 1), mesh_dim_names=("fsdp", "tp"))["tp"]
    sizes = (config.dp_replicate_size, config.efsdp_size, config.ep_size)
    experts = init_device_mesh(device, sizes, mesh_dim_names=("dp_replicate", "efsdp", "ep"))
    apply_expert_parallelism(model, experts["ep"], split, plan)
    replicated = config.dp_replicate_size > 1
    apart: dict[str, Any] = how | {"mesh": experts["dp_replicate", "efsdp"] if replicated else experts["efsdp"]}
    for name, module in model.named_modules():
        if plan.get(name) == "ep_dispatch_experts":
            fully_shard(module, **apart)
            module.set_gradient_divide_factor(float(config.dp_size))
            if config.efsdp_size > 1:
                module.set_force_sum_reduction_for_comms(True)
    return experts["ep"]
