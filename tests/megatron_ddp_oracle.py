"""What Megatron-Core's DistributedDataParallel, its buffers and its optimizers send for weights of given shapes: one rank of a
`fake` process group of any size."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from records import on_record
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

Sent = list[tuple[str, int, int]]
"""A collective's name, the bytes of the full tensor, the size of its group."""

_KINDS: Mapping[str, tuple[str, int]] = {
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
    "allreduce_": ("all_reduce", 0),
    "allreduce_coalesced_": ("all_reduce", 0),
    "allgather_into_tensor_coalesced_": ("all_gather", 0),
}


class _Mode(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.sent: Sent = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            kind, whole = _KINDS[func._schema.name.removeprefix("c10d::")]
            group = next(dist.ProcessGroup.unbox(a) for a in args if isinstance(a, torch.ScriptObject))
            self.sent.append((kind, sum(t.nbytes for t in args[whole]), group.size()))
        return func(*args, **(kwargs or {}))


class _Weights(torch.nn.Module):
    """`allreduce` as megatron/core/extensions/transformer_engine.py sets it: False of experts that ranks share."""

    def __init__(
        self, dense: Sequence[tuple[int, ...]], experts: Sequence[tuple[int, ...]], shared: bool, dtype: torch.dtype
    ) -> None:
        super().__init__()
        for i, shape in enumerate([*dense, *experts]):
            weight = torch.nn.Parameter(torch.empty(shape, dtype=dtype))
            weight.allreduce = i < len(dense) or not shared  # type: ignore[attr-defined]
            self.register_parameter(f"weight_{i}", weight)


class _OnCPU(TorchFunctionMode):
    """Optimizers ask for CUDA tensors, and whether weights are such."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        out = func(*args, **kwargs)
        return out.replace("torch.", "torch.cuda.") if func is torch.Tensor.type and isinstance(out, str) else out


@contextlib.contextmanager
def _one_rank(world_size: int, **degrees: int) -> Iterator[None]:
    import megatron.core.parallel_state as state

    dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
    try:
        with (
            mock.patch("torch.cuda.current_device", lambda: torch.device("cpu")),
            mock.patch("torch.cuda.Stream", lambda **_: None),
        ):
            state.initialize_model_parallel(create_gloo_process_groups=False, **degrees)
            yield
    finally:
        state.destroy_model_parallel()
        dist.destroy_process_group()


@on_record
def sent_for(
    dense: Sequence[tuple[int, ...]],
    experts: Sequence[tuple[int, ...]],
    *,
    world_size: int,
    zero: int,
    fp16: bool,
    **degrees: int,
) -> Sent:
    """What a step sends for the gradients, for their norm and, with the distributed optimizer, for the updated weights."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer.transformer_config import TransformerConfig

    with _one_rank(world_size, **degrees), _OnCPU():
        config = TransformerConfig(num_layers=1, hidden_size=64, num_attention_heads=4, fp16=fp16, bf16=not fp16)
        how = DistributedDataParallelConfig(
            grad_reduce_in_fp32=not fp16,  # as megatron/training/arguments.py sets it
            use_distributed_optimizer=bool(zero),
            num_distributed_optimizer_instances=degrees.get("num_distributed_optimizer_instances", 1),
        )
        shared = degrees.get("expert_model_parallel_size", 1) > 1
        model = DistributedDataParallel(
            config, how, _Weights(dense, experts, shared, torch.float16 if fp16 else torch.bfloat16)
        )
        adam = OptimizerConfig(lr=1e-3, fp16=fp16, bf16=not fp16, use_distributed_optimizer=bool(zero))
        optimizer = get_megatron_optimizer(adam, [model], use_gloo_process_groups=False)
        with _Mode() as mode:
            model.finish_grad_sync()
            optimizer.prepare_grads()
            optimizer.get_grad_norm()
            if zero:
                model.start_param_sync(force_sync=True)
    return mode.sent
