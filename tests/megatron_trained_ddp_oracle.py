"""What Megatron-Core's DistributedDataParallel and its optimizers hold and send for weights of which some are frozen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from megatron_ddp_oracle import Sent, _Mode, _OnCPU, _one_rank

Shape = tuple[int, ...]


@dataclass
class Held:
    """What is sent in a step, and the elements of the buffers of parameters (with the distributed optimizer) and gradients, and
    of the fp32 main weights."""

    sent: Sent
    parameters: int
    gradients: int
    mains: int


class _Weights(torch.nn.Module):
    def __init__(self, weights: Sequence[tuple[Shape, bool, bool]], shared: bool) -> None:
        super().__init__()
        for i, (shape, trains, is_expert) in enumerate(weights):
            weight = torch.nn.Parameter(torch.empty(shape, dtype=torch.bfloat16), requires_grad=trains)
            weight.allreduce = not is_expert or not shared  # type: ignore[attr-defined]
            self.register_parameter(f"weight_{i}", weight)


def held_for(weights: Sequence[tuple[Shape, bool, bool]], *, world_size: int, zero: int, **degrees: int) -> Held:
    """`weights`: shape, whether it trains, whether it is an expert's."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer.transformer_config import TransformerConfig

    with _one_rank(world_size, **degrees), _OnCPU():
        config = TransformerConfig(num_layers=1, hidden_size=64, num_attention_heads=4, bf16=True)
        how = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            use_distributed_optimizer=bool(zero),
            num_distributed_optimizer_instances=degrees.get("num_distributed_optimizer_instances", 1),
        )
        shared = degrees.get("expert_model_parallel_size", 1) > 1
        model = DistributedDataParallel(config, how, _Weights(weights, shared))
        adam = OptimizerConfig(lr=1e-3, bf16=True, use_distributed_optimizer=bool(zero))
        optimizer = get_megatron_optimizer(adam, [model], use_gloo_process_groups=False)
        with _Mode() as mode:
            model.finish_grad_sync()
            optimizer.prepare_grads()
            optimizer.get_grad_norm()
            if zero:
                model.start_param_sync(force_sync=True)
        buffers = [*model.buffers, *model.expert_parallel_buffers]
        parameters = sum(b.param_data.numel() for b in buffers if b.param_data is not None)
        groups = [g for one in optimizer.chained_optimizers for g in one.optimizer.param_groups]
        mains = sum(p.numel() for group in groups for p in group["params"])
        return Held(mode.sent, parameters, sum(b.grad_data.numel() for b in buffers), mains)
