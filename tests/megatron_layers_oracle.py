"""Layers of Megatron-Core's own GPTModel, as a stage without embedding and head: what a step saves and allocates.

Megatron's fused kernels and Transformer Engine's, which run on GPUs, have stand-ins; which tensors come together, and in which
layout attention gets them, is the real code's.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from megatron_oracle import Mode, one_rank
from megatron_stand_ins import GeLU, LayerNorm, MaskedSoftmax, RMSNorm, Rotated
from records import on_record
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import Function

from memcalc.families.base.architecture import Architecture


class Norm(torch.nn.Module):
    """Transformer Engine's norms, which pack their input (pytorch/ops/basic)."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(hidden_size, dtype=torch.bfloat16))
        layer = config.normalization == "LayerNorm"
        self.bias = torch.nn.Parameter(torch.empty(hidden_size, dtype=torch.bfloat16)) if layer else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        return RMSNorm.apply(x, self.weight) if self.bias is None else LayerNorm.apply(x, self.weight, self.bias)


class BiasActivation(Function):
    """BiasSwiGLUFunction, SwiGLUFunction and GeLUFunction: they save their inputs. One gradient is of input and bias."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, bias: torch.Tensor | None, width: int) -> torch.Tensor:
        ctx.save_for_backward(x, bias)
        return torch.empty((*x.shape[:-1], width), dtype=x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, bias = ctx.saved_tensors
        made = torch.empty_like(x)
        return made, None if bias is None else made, None


def _squared_relu(x: torch.Tensor) -> torch.Tensor:
    """squared_relu, compiled (jit_fuser): it saves its input."""
    return BiasActivation.apply(x, None, x.shape[-1])


class BiasDropoutAdd(Function):
    """bias_dropout_add_fused_train: one kernel, and the mask of its dropout."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor, p: float) -> torch.Tensor:
        ctx.p, ctx.biased = p, bias is not None
        ctx.save_for_backward(*([torch.empty(x.shape, dtype=torch.bool)] if p else []))
        return torch.empty_like(residual)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        _mask = ctx.saved_tensors
        of_x = torch.empty_like(grad) if ctx.p else grad
        return of_x, of_x if ctx.biased else None, grad, None


class Masked(Function):
    """torch's dropout on a GPU."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(torch.empty(x.shape, dtype=torch.bool))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        _mask = ctx.saved_tensors
        return torch.empty_like(grad)


class Dropout(torch.nn.Module):
    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Masked.apply(x) if self.p else x


class FusedAttention(Function):
    """FusedAttnFunc. Gradients of one chunk of memory are views of one chunk."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = torch.empty((*q.shape[:3], v.shape[3]), dtype=q.dtype)
        ctx.save_for_backward(q, k, v, out, torch.empty((q.shape[1], q.shape[2], q.shape[0], 1), dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        q, k, v, _out, _logsumexp = ctx.saved_tensors
        if q.untyped_storage()._cdata == v.untyped_storage()._cdata:
            chunk = torch.empty((*q.shape[:3], 3, q.shape[3]), dtype=q.dtype)
            out = tuple(chunk[..., i, :] for i in range(3))
        else:
            out = tuple(torch.empty(x.shape, dtype=x.dtype) for x in (q, k, v))
        tokens, batch, heads, width = q.shape
        _sums = torch.empty((batch, heads, tokens), dtype=torch.float32)
        _accumulated = torch.empty((batch, tokens, heads, -(-width // 32) * 32), dtype=torch.float32)
        _of_each_head = [torch.empty(q.shape, dtype=q.dtype) for _ in range(2) if k.shape[2] != heads]
        return out


class TEAttention(torch.nn.Module):
    """DotProductAttention of Transformer Engine: tensors that are neither one chunk nor three are made contiguous
    (get_qkv_layout)."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def forward(self, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> torch.Tensor:
        three = query, key, value
        chunks = {x.untyped_storage()._cdata for x in three}
        if len(chunks) > 1 or query.shape != key.shape:
            three = tuple(x.contiguous() for x in three)
        return FusedAttention.apply(*three).flatten(2)


def _activation(x: torch.Tensor, bias: torch.Tensor | None, *_: Any) -> torch.Tensor:
    return BiasActivation.apply(x, bias, x.shape[-1])


def _gated(x: torch.Tensor, bias: torch.Tensor | None, *_: Any) -> torch.Tensor:
    return BiasActivation.apply(x, bias, x.shape[-1] // 2)


@contextlib.contextmanager
def _fused_kernels(attention: str) -> Iterator[None]:
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.transformer import attention as attentions
    from megatron.core.transformer import dot_product_attention as core
    from megatron.core.transformer import mlp

    def added(x_with_bias: Any, residual: torch.Tensor, prob: float) -> torch.Tensor:
        return BiasDropoutAdd.apply(x_with_bias[0], x_with_bias[1], residual, prob)

    with contextlib.ExitStack() as stack:
        for patched in (
            mock.patch.object(mlp, "bias_gelu_impl", _activation),
            mock.patch.object(mlp, "bias_swiglu_impl", _gated),
            mock.patch.object(gpt_layer_specs, "get_bias_dropout_add", lambda *_: added),
            mock.patch.object(attentions, "apply_rotary_pos_emb", lambda x, angles, *_, **__: Rotated.apply(x, angles)),
            mock.patch.object(core.FusedScaleMaskSoftmax, "forward", lambda _, x, *__: MaskedSoftmax.apply(x)),
            mock.patch("torch.nn.Dropout", Dropout),
        ):
            stack.enter_context(patched)
        if attention == "sdpa":
            stack.enter_context(mock.patch.object(LocalSpecProvider, "core_attention", lambda _: TEAttention))
        yield


@dataclass
class Ran:
    """A forward and a backward: parameters, bytes saved, and the highest bytes of both, above those before."""

    parameters: dict[str, tuple[int, ...]]
    saved: int
    forward: int
    backward: int


@on_record
def layers_step(a: Architecture, *, attention: str, tp: int, batch: int, seq: int) -> Ran:
    """`tp` ranks share sequences between layers. A GELU without biases is torch's own."""
    import megatron.core.transformer.transformer_block as block
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    mode = Mode()
    with one_rank(tp), mock.patch.object(block, "LayerNormImpl", Norm), _fused_kernels(attention):
        spec = get_gpt_layer_local_spec(normalization="RMSNorm" if a.rms_norm else None, qk_layernorm=a.qk_norm)
        spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = Norm
        if a.qk_norm:
            of_attention = spec.submodules.self_attention.submodules
            of_attention.q_layernorm = of_attention.k_layernorm = Norm
        gelu = torch.nn.functional.gelu if a.linear_bias else GeLU.apply
        ungated = _squared_relu if a.squared_relu else gelu
        fuses_bias = (a.gated or a.linear_bias) and not a.squared_relu
        config = TransformerConfig(
            num_layers=a.layers, hidden_size=a.hidden, num_attention_heads=a.heads, num_query_groups=a.kv_heads,
            kv_channels=a.head_dim, ffn_hidden_size=a.ffn, tensor_model_parallel_size=tp, sequence_parallel=tp > 1,
            params_dtype=torch.bfloat16, bf16=True, gated_linear_unit=a.gated,
            activation_func=torch.nn.functional.silu if a.gated else ungated,
            normalization="RMSNorm" if a.rms_norm else "LayerNorm", add_bias_linear=a.linear_bias, add_qkv_bias=a.qkv_bias,
            qk_layernorm=a.qk_norm, hidden_dropout=a.hidden_dropout, attention_dropout=a.attention_dropout,
            use_cpu_initialization=True, perform_initialization=False, bias_activation_fusion=fuses_bias,
            masked_softmax_fusion=False, bias_dropout_fusion=True, gradient_accumulation_fusion=False,
        )  # fmt: skip
        with FakeTensorMode(allow_non_fake_inputs=True):
            torch.set_default_dtype(torch.bfloat16)
            model = GPTModel(
                config, spec, 128, a.positions or seq, parallel_output=True, pre_process=False, post_process=False,
                position_embedding_type="rope" if a.positions is None else "learned_absolute",
            ).train()  # fmt: skip
            torch.set_default_dtype(torch.float32)
            ids = torch.zeros((batch, seq), dtype=torch.int64)
            mask = torch.ones((1, 1, seq, seq), dtype=torch.bool)
            for parameter in model.parameters():
                parameter.register_post_accumulate_grad_hook(_without_gradient)
            for tensor in [*model.parameters(), *model.buffers(), ids, mask]:
                mode.register(tensor)
            with mode:
                return _second_step(mode, model, ids, mask, (seq // tp, batch, a.hidden))


def _without_gradient(parameter: torch.Tensor) -> None:
    parameter.grad = None  # its hook adds it to the main gradients


def _second_step(mode: Mode, model: Any, ids: torch.Tensor, mask: torch.Tensor, shape: tuple[int, ...]) -> Ran:
    """Rotary angles and global buffers are there from the first step on."""
    saved = forward = backward = 0
    for _ in range(2):
        gc.collect()
        start, mode.phase = mode.now, "forward"
        mode.begin()
        model.set_input_tensor(torch.empty(shape, dtype=torch.bfloat16, requires_grad=True))
        out = model(ids, ids, mask)
        gc.collect()
        saved, forward, mode.phase = mode.now - start, mode.highest - start, "backward"
        mode.begin()
        out.backward(torch.empty(shape, dtype=torch.bfloat16))
        backward = mode.highest - start
        del out
        model.decoder.input_tensor = None
    return Ran({name: tuple(p.shape) for name, p in model.named_parameters()}, saved, forward, backward)
