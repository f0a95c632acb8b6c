"""Megatron-Core's own GPTModel with layers of multi-token prediction: what a step of its last stage saves and allocates.

Its layers have the stand-ins of `megatron_layers_oracle` for kernels that run on GPUs. MultiTokenPredictionBlock, the output
layer and the loss are the real code's.
"""

from __future__ import annotations

import gc
from typing import Any
from unittest import mock

import torch
from megatron_layers_oracle import Norm, Ran, _fused_kernels, _without_gradient  # pyright: ignore[reportPrivateUsage]
from megatron_oracle import Mode, one_rank
from torch._subclasses.fake_tensor import FakeTensorMode

from memcalc.families.base.architecture import Architecture


def predicting_step(a: Architecture, *, tp: int, batch: int, seq: int, first: bool) -> Ran:
    """`first`: the stage has the embedding and the whole model; else it receives hidden states. `tp` ranks share sequences
    between layers."""
    import megatron.core.transformer.transformer_block as block
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
    from megatron.core.transformer.transformer_config import TransformerConfig

    mode = Mode()
    MTPLossLoggingHelper.tracker = {}
    with one_rank(tp), mock.patch.object(block, "LayerNormImpl", Norm), _fused_kernels("sdpa"):
        spec = get_gpt_layer_local_spec(normalization="RMSNorm" if a.rms_norm else None)
        spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = Norm
        config = TransformerConfig(
            num_layers=a.layers, hidden_size=a.hidden, num_attention_heads=a.heads, num_query_groups=a.kv_heads,
            kv_channels=a.head_dim, ffn_hidden_size=a.ffn, tensor_model_parallel_size=tp, sequence_parallel=tp > 1,
            params_dtype=torch.bfloat16, bf16=True, gated_linear_unit=a.gated, mtp_num_layers=a.mtp,
            activation_func=torch.nn.functional.silu if a.gated else torch.nn.functional.gelu,
            normalization="RMSNorm" if a.rms_norm else "LayerNorm", add_bias_linear=a.linear_bias, add_qkv_bias=a.qkv_bias,
            hidden_dropout=a.hidden_dropout, attention_dropout=a.attention_dropout,
            use_cpu_initialization=True, perform_initialization=False, bias_activation_fusion=True,
            masked_softmax_fusion=False, bias_dropout_fusion=True, gradient_accumulation_fusion=False,
        )  # fmt: skip
        of_layers = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False)
        for layer in of_layers.layer_specs:
            layer.submodules.enorm = layer.submodules.hnorm = layer.submodules.layer_norm = Norm
        with FakeTensorMode(allow_non_fake_inputs=True):
            torch.set_default_dtype(torch.bfloat16)
            model = GPTModel(
                config, spec, a.vocab, a.positions or seq, parallel_output=True, pre_process=first, post_process=True,
                share_embeddings_and_output_weights=a.tied, mtp_block_spec=of_layers,
                position_embedding_type="rope" if a.positions is None else "learned_absolute",
            ).train()  # fmt: skip
            torch.set_default_dtype(torch.float32)
            ids = torch.zeros((batch, seq), dtype=torch.int64)
            mask = torch.ones((1, 1, seq, seq), dtype=torch.bool)
            for parameter in model.parameters():
                parameter.register_post_accumulate_grad_hook(_without_gradient)
            loss_mask = torch.ones((batch, seq))
            for tensor in [*model.parameters(), *model.buffers(), ids, mask, loss_mask]:
                mode.register(tensor)
            with mode:
                between = (seq // tp, batch, a.hidden)
                try:
                    return _second_step(mode, model, (ids, mask, loss_mask), between, first=first)
                finally:
                    MTPLossLoggingHelper.tracker = {}


def _second_step(
    mode: Mode, model: Any, given: tuple[torch.Tensor, ...], shape: tuple[int, ...], *, first: bool
) -> Ran:
    """Rotary angles and global buffers are there from the first step on."""
    saved = forward = backward = 0
    ids, mask, loss_mask = given
    for _ in range(2):
        gc.collect()
        start, mode.phase = mode.now, "forward"
        mode.begin()
        if not first:
            model.set_input_tensor(torch.empty(shape, dtype=torch.bfloat16, requires_grad=True))
        out = model(ids, ids, mask, labels=ids, loss_mask=loss_mask)
        out = torch.sum(out.view(-1) * torch.ones(out.numel()))
        gc.collect()
        saved, forward, mode.phase = mode.now - start, mode.highest - start, "backward"
        mode.begin()
        out.backward()
        backward = mode.highest - start
        del out
        model.decoder.input_tensor = None
    return Ran({name: tuple(p.shape) for name, p in model.named_parameters()}, saved, forward, backward)
