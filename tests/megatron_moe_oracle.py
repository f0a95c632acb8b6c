"""Megatron-Core's MoELayer on rank 0 of a fake process group, on the CPU, over real tensors: routing reads its data.

Its router, dispatcher, grouped and shared experts are the real ones; the kernels of Transformer Engine are stand-ins.
Tokens are spread evenly: what another rank would say of its own is what this one says.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy
import torch
import torch.distributed as dist
from megatron_oracle import Calls, Mode, NoRandomStates
from megatron_stand_ins import GeLU, GroupedProduct, Permuted, SortedChunks, TopK, Unpermuted, WeightedSwiGLU
from records import on_record
from torch.testing._internal.distributed.fake_pg import FakeStore

from memcalc.families.base.architecture import Architecture


class _GroupedLinear(torch.nn.Module):
    """TEGroupedLinear: a weight for every expert, split over the ranks of the experts' tensor parallelism."""

    def __init__(self, experts: int, fan_in: int, fan_out: int, *, tp_comm_buffer_name: str, **how: Any) -> None:
        super().__init__()
        ranks = how["pg_collection"].expt_tp.size()
        if tp_comm_buffer_name == "fc1":
            fan_out //= ranks
        else:
            fan_in //= ranks
        self.width = fan_out
        for i in range(experts):
            weight = torch.empty((fan_out, fan_in), dtype=torch.bfloat16)
            self.register_parameter(f"weight{i}", torch.nn.Parameter(weight))

    def forward(self, x: torch.Tensor, _: Any) -> Any:
        return GroupedProduct.apply(x, self.width, *self.parameters()), None


_KERNELS: dict[str, Any] = {
    "te_general_gemm": None,
    "fused_permute_with_probs": lambda x, probs, where, num_out_tokens: Permuted.apply(x, probs, where, num_out_tokens),
    "fused_unpermute": lambda x, where, merging_probs, restore_shape: Unpermuted.apply(x, where, restore_shape),
    "fused_sort_chunks_by_index": lambda x, *_: SortedChunks.apply(x, None)[0],
    "fused_sort_chunks_by_index_with_probs": lambda x, probs, *_: SortedChunks.apply(x, probs),
}


@contextlib.contextmanager
def _one_rank(tp: int, ep: int, etp: int) -> Iterator[None]:
    import megatron.core.parallel_state as state
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import experts, moe_utils, token_dispatcher

    world = max(tp, ep * etp)
    gather = token_dispatcher.gather_from_sequence_parallel_region

    def gathered(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        out = gather(x, *args, **kwargs)
        return out if x.is_floating_point() else x.repeat(out.shape[0] // x.shape[0])

    def to_cpu(self: Any, point: str, tokens: Any = None) -> Any:
        if point == "before_permutation_1":
            for name in ("input_splits", "output_splits", "output_splits_tp"):
                split = getattr(self, name)
                setattr(self, name, None if split is None else numpy.array(split.tolist()))  # no tensor's bytes
        return tokens

    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    swiglu = "weighted_bias_swiglu_impl"
    with contextlib.ExitStack() as stack:
        for patched in (
            mock.patch("torch.cuda.current_device", lambda: torch.device("cpu")),
            mock.patch("torch.cuda.Stream", lambda *_: None),
            mock.patch("torch.topk", lambda x, k, dim: TopK.apply(x, k)),
            mock.patch.object(random, "_get_cuda_rng_state", lambda *_, **__: None),
            mock.patch.object(random, "get_cuda_rng_tracker", lambda *_: NoRandomStates()),
            mock.patch.object(moe_utils, "HAVE_TE", True),
            *(mock.patch.object(moe_utils, name, kernel, create=True) for name, kernel in _KERNELS.items()),
            mock.patch.object(token_dispatcher, "gather_from_sequence_parallel_region", gathered),
            mock.patch.object(token_dispatcher.MoEAlltoAllTokenDispatcher, "_maybe_dtoh_and_synchronize", to_cpu),
            mock.patch.object(experts, swiglu, lambda x, _, weights, *__: WeightedSwiGLU.apply(x, weights)),
        ):  # fmt: skip
            stack.enter_context(patched)
        state.initialize_model_parallel(
            tensor_model_parallel_size=tp, expert_model_parallel_size=ep, expert_tensor_parallel_size=etp,
            create_gloo_process_groups=False,
        )  # fmt: skip
        try:
            yield
        finally:
            state.destroy_model_parallel()
            state.destroy_global_memory_buffer()
            dist.destroy_process_group()


@dataclass
class Ran:
    """A forward and a backward of one layer: parameters, bytes saved, the highest bytes of both, collectives."""

    parameters: dict[str, tuple[int, ...]]
    saved: int
    forward: int
    backward: int
    calls: Calls


@on_record
def moe_layer(a: Architecture, *, tp: int, ep: int, etp: int, batch: int, seq: int) -> Ran:
    """`seq` tokens of a sequence on every rank."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.mlp import MLPSubmodules
    from megatron.core.transformer.moe.experts import TEGroupedMLP
    from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
    from megatron.core.transformer.moe.router import TopKRouter
    from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_config import TransformerConfig

    e = a.experts
    assert e is not None
    mode = Mode()
    with _one_rank(tp, ep, etp):
        config = TransformerConfig(
            num_layers=1, hidden_size=a.hidden, num_attention_heads=a.heads, ffn_hidden_size=a.ffn,
            tensor_model_parallel_size=tp, expert_model_parallel_size=ep, expert_tensor_parallel_size=etp,
            sequence_parallel=tp > 1, params_dtype=torch.bfloat16, bf16=True, gated_linear_unit=a.gated,
            activation_func=torch.nn.functional.silu if a.gated else GeLU.apply, add_bias_linear=False, num_moe_experts=e.count,
            moe_router_topk=e.per_token, moe_ffn_hidden_size=e.ffn, moe_grouped_gemm=True,
            moe_token_dispatcher_type="alltoall", moe_router_pre_softmax=not e.normalised,
            moe_shared_expert_intermediate_size=e.shared_ffn or None, moe_shared_expert_gate=e.shared_gate,
            moe_router_load_balancing_type="none", use_cpu_initialization=True, perform_initialization=False,
            gradient_accumulation_fusion=False, moe_router_dtype=None, bias_activation_fusion=a.gated,
        )  # fmt: skip
        shared = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
        submodules = MoESubmodules(
            router=TopKRouter,
            experts=ModuleSpec(
                TEGroupedMLP, submodules=MLPSubmodules(linear_fc1=_GroupedLinear, linear_fc2=_GroupedLinear)
            ),
            shared_experts=ModuleSpec(SharedExpertMLP, submodules=shared),
        )
        torch.set_default_dtype(torch.bfloat16)
        layer = MoELayer(config, submodules, pg_collection=ProcessGroupCollection.use_mpu_process_groups()).train()
        torch.set_default_dtype(torch.float32)
        config.moe_permute_fusion = True
        for tensor in [*layer.parameters(), *layer.buffers()]:
            mode.register(tensor)
        with mode:
            return _step(mode, layer, batch, seq, a.hidden)


_SET_ASIDE = (
    "probs", "routing_map", "num_global_tokens_per_local_expert", "tokens_per_expert", "input_splits", "output_splits",
    "output_splits_tp",
)  # fmt: skip


def _step(mode: Any, layer: Any, batch: int, seq: int, hidden: int) -> Ran:
    """What the dispatcher keeps of the last micro-batch, numbers of tokens among it, is set aside."""
    parameters = {name: tuple(p.shape) for name, p in layer.named_parameters()}
    gc.collect()
    x = torch.zeros((seq, batch, hidden), dtype=torch.bfloat16, requires_grad=True)
    start, mode.phase = mode.now, "forward"
    mode.begin()
    out, _bias = layer(x * 1)
    gc.collect()
    dispatcher = layer.token_dispatcher
    for name in _SET_ASIDE:
        setattr(dispatcher, name, None)
    saved, forward = mode.now - start, mode.highest - start
    grad = torch.zeros_like(out)
    mode.phase = "backward"
    mode.begin()
    out.backward(grad)
    backward = mode.highest - start - grad.nbytes
    return Ran(parameters, saved, forward, backward, mode.calls)
