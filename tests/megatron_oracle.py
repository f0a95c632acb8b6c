"""Megatron-Core's own GPTModel on rank 0 of a fake process group, under fake tensors, on the CPU.

Its local layers are taken (Transformer Engine runs on GPUs only), with functions that save and allocate what the fused
kernels do in the place of the kernels; CUDA's random states are left out.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron_stand_ins import LayerNorm, RMSNorm
from oracle import LiveBytes
from records import on_record
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from memcalc.families.base.architecture import Architecture

Calls = Counter[tuple[str, str, int]]
"""(phase, collective, bytes of the full tensor) -> calls."""

_NAMES = {
    "allreduce_": "all_reduce",
    "_allgather_base_": "all_gather",
    "allgather_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_": "reduce_scatter",
    "alltoall_base_": "all_to_all",
    "send": "send",
    "recv_": "receive",
}


def _bytes(argument: Any) -> int:
    leaves = torch.utils._pytree.tree_leaves(argument)
    return sum(leaf.nbytes for leaf in leaves if isinstance(leaf, torch.Tensor))


class Mode(LiveBytes):
    def __init__(self) -> None:
        super().__init__()
        self.phase = ""
        self.calls: Calls = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            kind = _NAMES[func._schema.name.removeprefix("c10d::")]
            self.calls[self.phase, kind, max(map(_bytes, args[:2]))] += 1
        return super().__torch_dispatch__(func, types, args, kwargs)


class _Norm(torch.nn.Module):
    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(hidden_size, dtype=torch.bfloat16))
        layer = config.normalization == "LayerNorm"
        self.bias = torch.nn.Parameter(torch.empty(hidden_size, dtype=torch.bfloat16)) if layer else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return RMSNorm.apply(x, self.weight) if self.bias is None else LayerNorm.apply(x, self.weight, self.bias)


class NoRandomStates:
    def fork(self, *_: Any) -> Any:
        return contextlib.nullcontext()


@contextlib.contextmanager
def one_rank(tensor_parallel: int) -> Iterator[None]:
    import megatron.core.parallel_state as state
    from megatron.core.tensor_parallel import random

    dist.init_process_group("fake", rank=0, world_size=tensor_parallel, store=FakeStore())
    named = [m for n, m in sys.modules.items() if n.startswith("megatron") and hasattr(m, "get_cuda_rng_tracker")]
    with contextlib.ExitStack() as stack:
        for patched in (
            mock.patch("torch.cuda.current_device", lambda: torch.device("cpu")),
            mock.patch.object(random, "_get_cuda_rng_state", lambda *_, **__: None),
            mock.patch.object(random, "_set_cuda_rng_state", lambda *_, **__: None),
            *(mock.patch.object(module, "get_cuda_rng_tracker", lambda *_: NoRandomStates()) for module in named),
        ):
            stack.enter_context(patched)
        state.initialize_model_parallel(tensor_model_parallel_size=tensor_parallel, create_gloo_process_groups=False)
        try:
            yield
        finally:
            state.destroy_model_parallel()
            state.destroy_global_memory_buffer()
            dist.destroy_process_group()


@dataclass
class Ran:
    """One forward and backward: parameters, bytes saved in between, collectives."""

    parameters: dict[str, tuple[int, ...]]
    saved: int
    calls: Calls
    flops: dict[str, int]


def _config(a: Architecture, tensor_parallel: int, sequence_parallel: bool) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(
        num_layers=a.layers,
        hidden_size=a.hidden,
        num_attention_heads=a.heads,
        num_query_groups=a.kv_heads,
        kv_channels=a.head_dim,
        ffn_hidden_size=a.ffn,
        tensor_model_parallel_size=tensor_parallel,
        sequence_parallel=sequence_parallel,
        params_dtype=torch.bfloat16,
        bf16=True,
        gated_linear_unit=a.gated,
        activation_func=torch.nn.functional.silu if a.gated else torch.nn.functional.gelu,
        normalization="RMSNorm" if a.rms_norm else "LayerNorm",
        add_bias_linear=a.linear_bias,
        add_qkv_bias=a.qkv_bias,
        qk_layernorm=a.qk_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        perform_initialization=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
    )


@on_record
def gpt_model(
    a: Architecture, *, tensor_parallel: int, sequence_parallel: bool, vocab: int, batch: int, seq: int, alone: str = ""
) -> Ran:
    """A step of one micro-batch; `vocab` is the padded one. `alone`: the "embedding" or the "head", a stage without layers."""
    import megatron.core.transformer.transformer_block as block
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel

    mode = Mode()
    with one_rank(tensor_parallel), mock.patch.object(block, "LayerNormImpl", _Norm):
        spec = get_gpt_layer_local_spec(normalization="RMSNorm" if a.rms_norm else None, qk_layernorm=a.qk_norm)
        spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = _Norm
        if a.qk_norm:
            attention = spec.submodules.self_attention.submodules
            attention.q_layernorm = attention.k_layernorm = _Norm
        layers = block.TransformerBlockSubmodules([], _Norm) if alone else spec
        with FakeTensorMode(allow_non_fake_inputs=True):
            torch.set_default_dtype(torch.bfloat16)
            model = GPTModel(
                _config(a, tensor_parallel, sequence_parallel), layers, vocab, a.positions or seq, parallel_output=True,
                share_embeddings_and_output_weights=a.tied,
                position_embedding_type="rope" if a.positions is None else "learned_absolute",
                pre_process=alone != "head", post_process=alone != "embedding",
            ).train()  # fmt: skip
            torch.set_default_dtype(torch.float32)
            ids = torch.zeros((batch, seq), dtype=torch.int64)
            mask = torch.ones((1, 1, seq, seq), dtype=torch.bool)
            for tensor in [*model.parameters(), *model.buffers(), ids, mask]:
                mode.register(tensor)
            shard = seq // tensor_parallel if sequence_parallel else seq
            with mode:
                return _step(mode, model, ids, mask, (shard, batch, a.hidden))


def _step(mode: Mode, model: Any, ids: torch.Tensor, mask: torch.Tensor, between: tuple[int, ...]) -> Ran:
    saved = 0
    for _ in range(2):
        gc.collect()
        mode.calls = Counter()
        mode.flops.clear()
        start, mode.phase = mode.now, "forward"
        if not model.pre_process:
            model.set_input_tensor(torch.empty(between, dtype=torch.bfloat16, requires_grad=True))
        out = model(ids, ids, mask, labels=ids)
        if model.post_process:
            out = out.float().mean()
        gc.collect()
        saved = mode.now - start
        mode.phase = "backward"
        out.backward(None if model.post_process else torch.empty(between, dtype=torch.bfloat16))
        for parameter in model.parameters():
            parameter.grad = None
        del out
        if not model.pre_process:
            model.decoder.input_tensor = None
    return Ran({name: tuple(p.shape) for name, p in model.named_parameters()}, saved, mode.calls, mode.counted)
