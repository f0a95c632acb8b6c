"""Layers of Megatron-Core's own GPTModel with MLASelfAttention on one rank: what a step saves and allocates.

The stand-ins are those of `megatron_layers_oracle`, and two for the fused kernels of rotary positions
(core/fusions/fused_mla_yarn_rope_apply.py).
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from megatron_layers_oracle import (
    Norm,
    Ran,
    _fused_kernels,  # pyright: ignore[reportPrivateUsage]
    _second_step,  # pyright: ignore[reportPrivateUsage]
    _without_gradient,  # pyright: ignore[reportPrivateUsage]
)
from megatron_oracle import Mode, one_rank
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import Function

from memcalc.families.base.architecture import Architecture


class _Queries(Function):
    """ApplyMLARotaryEmbQ: in place, forward and backward."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(q)
        return q

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad.contiguous()


class _KeysAndValues(Function):
    """ApplyMLARotaryEmbKV: keys with their positions, and values, in new tensors."""

    @staticmethod
    def forward(ctx: Any, kv: torch.Tensor, positions: torch.Tensor, widths: tuple[int, int, int]) -> Any:
        rope, nope, width = widths
        ctx.shapes = kv.shape, positions.shape
        lead = kv.shape[:-1]
        return torch.empty((*lead, nope + rope), dtype=kv.dtype), torch.empty((*lead, width), dtype=kv.dtype)

    @staticmethod
    def backward(ctx: Any, key: torch.Tensor, value: torch.Tensor) -> Any:
        key, value = key.contiguous(), value.contiguous()
        return *(torch.empty(shape, dtype=key.dtype) for shape in ctx.shapes), None


class _NotHere:
    """Transformer Engine's layers, of which no layer here is one."""


def _queries(q: torch.Tensor, *_: Any) -> torch.Tensor:
    return _Queries.apply(q)


def _keys_and_values(kv: torch.Tensor, positions: torch.Tensor, _cos: Any, _sin: Any, *widths: Any) -> Any:
    return _KeysAndValues.apply(kv, positions, widths[:3])


def latent_step(a: Architecture, *, batch: int, seq: int) -> Ran:
    """A stage without embedding and head; `a.latent` has the widths."""
    import megatron.core.transformer.multi_latent_attention as latents
    import megatron.core.transformer.transformer_block as block
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    assert a.latent is not None
    mode = Mode()
    with (
        one_rank(1), mock.patch.object(block, "LayerNormImpl", Norm), _fused_kernels("sdpa"),
        mock.patch.object(latents, "fused_apply_mla_rope_for_q", _queries),
        mock.patch.object(latents, "fused_apply_mla_rope_for_kv", _keys_and_values),
        mock.patch.multiple(latents, Linear=_NotHere, TELinear=_NotHere, TEColumnParallelLinear=_NotHere),
    ):  # fmt: skip
        spec = get_gpt_layer_local_spec(multi_latent_attention=True, qk_layernorm=a.latent.normed)
        spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = Norm
        if a.latent.normed:
            of_attention = spec.submodules.self_attention.submodules
            of_attention.q_layernorm = of_attention.kv_layernorm = Norm
        config = MLATransformerConfig(
            num_layers=a.layers, hidden_size=a.hidden, num_attention_heads=a.heads, ffn_hidden_size=a.ffn,
            q_lora_rank=a.latent.q_rank, kv_lora_rank=a.latent.kv_rank, qk_head_dim=a.latent.nope_dim,
            qk_pos_emb_head_dim=a.latent.rope_dim, v_head_dim=a.latent.v_dim, apply_rope_fusion=True,
            params_dtype=torch.bfloat16, bf16=True, gated_linear_unit=a.gated,
            activation_func=torch.nn.functional.silu if a.gated else torch.nn.functional.gelu,
            normalization="RMSNorm" if a.rms_norm else "LayerNorm", add_bias_linear=a.linear_bias,
            qk_layernorm=a.latent.normed, hidden_dropout=a.hidden_dropout, attention_dropout=a.attention_dropout,
            use_cpu_initialization=True, perform_initialization=False, bias_activation_fusion=True,
            masked_softmax_fusion=False, bias_dropout_fusion=True, gradient_accumulation_fusion=False,
        )  # fmt: skip
        with FakeTensorMode(allow_non_fake_inputs=True):
            torch.set_default_dtype(torch.bfloat16)
            model = GPTModel(
                config, spec, 128, seq, parallel_output=True, pre_process=False, post_process=False,
                position_embedding_type="learned_absolute" if a.positions is not None else "rope",
            ).train()  # fmt: skip
            torch.set_default_dtype(torch.float32)
            ids = torch.zeros((batch, seq), dtype=torch.int64)
            mask = torch.ones((1, 1, seq, seq), dtype=torch.bool)
            for parameter in model.parameters():
                parameter.register_post_accumulate_grad_hook(_without_gradient)
            for tensor in [*model.parameters(), *model.buffers(), ids, mask]:
                mode.register(tensor)
            with mode:
                return _second_step(mode, model, ids, mask, (seq, batch, a.hidden))
