"""Megatron-Core's own GPTModel of which a part trains: what a stage without embedding and head saves, allocates and sends.

`te`: its linear layers are Transformer Engine's stand-ins, which may have adapters; otherwise they are Megatron-Core's own.
"""

from __future__ import annotations

import contextlib
import gc
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from megatron_layers_oracle import Norm, _fused_kernels, _without_gradient
from megatron_lora_stand_ins import TELayerNormColumnParallelLinear, TERowParallelLinear, adapted
from megatron_oracle import Calls, Mode, one_rank
from torch._subclasses.fake_tensor import FakeTensorMode

from memcalc.families.base.architecture import Architecture

TARGETS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
_FUSED = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
}


@dataclass
class Ran:
    """A forward and a backward: the weights that train and the frozen ones, bytes saved, the highest bytes of both above those
    before, and what is sent in each."""

    trained: dict[str, tuple[int, ...]]
    frozen: dict[str, tuple[int, ...]]
    saved: int
    forward: int
    backward: int
    calls: Calls


def paper_name(name: str) -> str:
    """Return the name of a weight as GPTModel on paper has it."""
    name = name.replace(".to_wrap.", ".")
    for fused, own in _FUSED.items():
        name = name.replace(fused, own)
    return name


def _config(a: Architecture, tp: int, sequence_parallel: bool, recomputes: bool) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    full: Any = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return TransformerConfig(
        num_layers=a.layers, hidden_size=a.hidden, num_attention_heads=a.heads, num_query_groups=a.kv_heads,
        kv_channels=a.head_dim, ffn_hidden_size=a.ffn, tensor_model_parallel_size=tp, sequence_parallel=sequence_parallel,
        params_dtype=torch.bfloat16, bf16=True, gated_linear_unit=a.gated,
        activation_func=torch.nn.functional.silu if a.gated else torch.nn.functional.gelu,
        normalization="RMSNorm" if a.rms_norm else "LayerNorm", add_bias_linear=a.linear_bias, add_qkv_bias=a.qkv_bias,
        qk_layernorm=a.qk_norm, hidden_dropout=a.hidden_dropout, attention_dropout=a.attention_dropout,
        use_cpu_initialization=True, perform_initialization=False, bias_activation_fusion=True,
        masked_softmax_fusion=False, bias_dropout_fusion=True, gradient_accumulation_fusion=False,
        **(full if recomputes else {}),
    )  # fmt: skip


@contextlib.contextmanager
def _without_random_states() -> Iterator[None]:
    from megatron.core.tensor_parallel import random

    with (
        mock.patch.object(random, "_get_all_rng_states", tuple),
        mock.patch.object(random, "_set_all_rng_states", lambda *_: None),
        mock.patch.object(random, "_fork_rng", contextlib.nullcontext),
    ):
        yield


@contextlib.contextmanager
def _spec(a: Architecture, te: bool, attention: str = "sdpa") -> Iterator[Any]:
    import megatron.core.transformer.transformer_block as block
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.identity_op import IdentityOp

    with mock.patch.object(block, "LayerNormImpl", Norm), _fused_kernels(attention):
        spec = get_gpt_layer_local_spec(normalization="RMSNorm" if a.rms_norm else None, qk_layernorm=a.qk_norm)
        of_attention, mlp = spec.submodules.self_attention.submodules, spec.submodules.mlp.submodules
        if a.qk_norm:
            of_attention.q_layernorm = of_attention.k_layernorm = Norm
        spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = IdentityOp if te else Norm
        if te:
            of_attention.linear_qkv = mlp.linear_fc1 = TELayerNormColumnParallelLinear
            of_attention.linear_proj = mlp.linear_fc2 = TERowParallelLinear
        yield spec


def _adapt(model: Any, targets: tuple[str, ...], rank: int, dropout: float) -> None:
    for layer in model.decoder.layers:
        for owner in (layer.self_attention, layer.mlp):
            for name in TARGETS:
                if name in targets and hasattr(owner, name):
                    setattr(owner, name, adapted(getattr(owner, name), rank, dropout))


def tuned_step(
    a: Architecture, frozen: Callable[[str], bool] | None, *, tp: int, batch: int, seq: int, sequence_parallel: bool, te: bool,
    targets: tuple[str, ...] = (), rank: int = 8, dropout: float = 0.0, received: bool = True,
    adapt: Callable[[Any], None] | None = None, recomputes: bool = False,
) -> Ran:  # fmt: skip
    """`received`: the stage's input wants a gradient, as a later stage's does. `adapt` makes other adapters of the model.
    `recomputes`: each layer is recomputed, and an input that wants no gradient is made to (megatron/bridge/peft/recompute.py).
    """
    from megatron.core.models.gpt.gpt_model import GPTModel

    mode = Mode()
    with one_rank(tp), _without_random_states(), _spec(a, te) as spec, FakeTensorMode(allow_non_fake_inputs=True):
        torch.set_default_dtype(torch.bfloat16)
        model = GPTModel(
            _config(a, tp, sequence_parallel, recomputes), spec, 128, a.positions or seq, parallel_output=True,
            pre_process=False, post_process=False,
            position_embedding_type="rope" if a.positions is None else "learned_absolute",
        ).train()  # fmt: skip
        torch.set_default_dtype(torch.float32)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(frozen is not None and not frozen(paper_name(name)))
        if adapt is not None:
            adapt(model)
        else:
            _adapt(model, targets, rank, dropout)
        ids = torch.zeros((batch, seq), dtype=torch.int64)
        mask = torch.ones((1, 1, seq, seq), dtype=torch.bool)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(_without_gradient)
        for tensor in [*model.parameters(), *model.buffers(), ids, mask]:
            mode.register(tensor)
        shape = (seq // tp if sequence_parallel else seq, batch, a.hidden)
        with mode:
            saved, forward, backward = _second_step(mode, model, ids, mask, shape, received, recomputes)
    named = {paper_name(name): (tuple(p.shape), p.requires_grad) for name, p in model.named_parameters()}
    of = [{name: shape for name, (shape, trains) in named.items() if trains == which} for which in (True, False)]
    return Ran(of[0], of[1], saved, forward, backward, mode.calls)


def _second_step(
    mode: Mode, model: Any, ids: Any, mask: Any, shape: tuple[int, ...], received: bool, recomputes: bool
) -> tuple[int, int, int]:
    saved = forward = backward = 0
    for _ in range(2):
        gc.collect()
        mode.calls = Counter()
        start, mode.phase = mode.now, "forward"
        mode.begin()
        given = torch.empty(shape, dtype=torch.bfloat16, requires_grad=received)
        model.set_input_tensor(given if received or not recomputes else given.detach().requires_grad_(True))
        del given
        out = model(ids, ids, mask)
        gc.collect()
        saved, forward, mode.phase = mode.now - start, mode.highest - start, "backward"
        mode.begin()
        out.backward(torch.empty(shape, dtype=torch.bfloat16))
        backward = mode.highest - start
        del out
        model.decoder.input_tensor = None
    return saved, forward, backward


@dataclass
class Whole:
    """A step of a whole model: the weights that train, what is sent and FLOPs, by phase."""

    trained: dict[str, tuple[int, ...]]
    calls: Calls
    flops: dict[str, int]


def whole_step(
    a: Architecture, frozen: Callable[[str], bool] | None, *, tp: int, batch: int, seq: int, sequence_parallel: bool, vocab: int,
    targets: tuple[str, ...] = (), rank: int = 8,
) -> Whole:  # fmt: skip
    """With embedding, head and loss, Transformer Engine's stand-ins, and Megatron-Core's own attention."""
    from megatron.core.models.gpt.gpt_model import GPTModel

    mode = Mode()
    with one_rank(tp), _spec(a, te=True, attention="eager") as spec, FakeTensorMode(allow_non_fake_inputs=True):
        torch.set_default_dtype(torch.bfloat16)
        model = GPTModel(
            _config(a, tp, sequence_parallel, recomputes=False), spec, vocab, a.positions or seq, parallel_output=True,
            position_embedding_type="rope" if a.positions is None else "learned_absolute",
            share_embeddings_and_output_weights=a.tied,
        ).train()  # fmt: skip
        torch.set_default_dtype(torch.float32)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(frozen is not None and not frozen(paper_name(name)))
        _adapt(model, targets, rank, 0.0)
        ids = torch.zeros((batch, seq), dtype=torch.int64)
        mask = torch.ones((1, 1, seq, seq), dtype=torch.bool)
        with mode:
            mode.phase = "forward"
            loss = model(ids, ids, mask, labels=ids).float().mean()
            mode.phase = "backward"
            loss.backward()
    trained = {paper_name(name): tuple(p.shape) for name, p in model.named_parameters() if p.requires_grad}
    return Whole(trained, mode.calls, mode.counted)
