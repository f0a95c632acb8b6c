"""Layers of Megatron-Core's own GPTModel that recompute modules (--recompute-modules), as Transformer Engine's layers are built:
norms that a linear layer follows are that layer's own, so the others are the one before latent attention and the one before
experts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest import mock

import megatron_moe_oracle
import torch
from megatron_latent_oracle import (
    _keys_and_values,  # pyright: ignore[reportPrivateUsage]
    _NotHere,  # pyright: ignore[reportPrivateUsage]
    _queries,  # pyright: ignore[reportPrivateUsage]
)
from megatron_layers_oracle import (
    Norm,
    Ran,
    _fused_kernels,  # pyright: ignore[reportPrivateUsage]
    _second_step,  # pyright: ignore[reportPrivateUsage]
    _without_gradient,  # pyright: ignore[reportPrivateUsage]
)
from megatron_oracle import Mode, one_rank
from oracle import LiveBytes
from torch._subclasses.fake_tensor import FakeTensorMode

from memcalc.families.base.architecture import Architecture


@contextlib.contextmanager
def storages_come_and_go(mode: LiveBytes) -> Iterator[None]:
    """Count what `untyped_storage().resize_` frees and allocates, without doing it, and leave random states out."""
    from megatron.core.tensor_parallel import random

    freed: dict[int, int] = {}
    forget = mode._forget  # pyright: ignore[reportPrivateUsage]

    def resized(storage: torch.UntypedStorage, nbytes: int) -> torch.UntypedStorage:
        key = storage._cdata
        if nbytes == 0 and key not in freed:
            freed[key] = storage.nbytes()
            mode.now -= freed[key]
        elif nbytes and key in freed:
            mode.now += freed.pop(key)
            mode.highest = max(mode.highest, mode.now)
        return storage

    def died(key: int, nbytes: int) -> None:
        forget(key, nbytes)
        mode.now += freed.pop(key, 0)

    with (
        mock.patch.object(torch.UntypedStorage, "resize_", resized),
        mock.patch.object(torch.UntypedStorage, "copy_", lambda storage, *_: storage),
        mock.patch.object(mode, "_forget", died),
        mock.patch.object(random, "_get_all_rng_states", lambda: ()),
        mock.patch.object(random, "_set_all_rng_states", lambda *_: None),
        mock.patch.object(random, "_fork_rng", contextlib.nullcontext),
        mock.patch.object(
            random, "FP8GlobalStateManager", mock.Mock(**{"is_fp8_enabled.return_value": False}), create=True
        ),
        mock.patch.object(random, "activation_recompute_forward", lambda **_: contextlib.nullcontext(), create=True),
        mock.patch.object(random, "fp8_autocast", lambda **_: contextlib.nullcontext(), create=True),
    ):
        yield


def _with_norm(linear: type[torch.nn.Module]) -> type[torch.nn.Module]:
    """Return TELayerNormColumnParallelLinear: a norm and a linear layer."""

    class LayerNormLinear(linear):  # type: ignore[misc, valid-type]
        def __init__(self, fan_in: int, fan_out: int, *, config: Any, **how: Any) -> None:
            super().__init__(fan_in, fan_out, config=config, **how)
            self.norm = Norm(config, fan_in)

        def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            return super().forward(self.norm(x), *args, **kwargs)

    return LayerNormLinear


def recomputing_step(a: Architecture, modules: tuple[str, ...], *, batch: int, seq: int) -> Ran:
    """A stage without embedding and head whose layers have latent attention."""
    with latent_model(a, modules, {}, batch=batch, seq=seq) as (mode, model, ids, mask), mode:
        return _second_step(mode, model, ids, mask, (seq, batch, a.hidden))


@contextlib.contextmanager
def latent_model(
    a: Architecture, modules: tuple[str, ...], more: dict[str, Any], *, batch: int, seq: int, fake: bool = True
) -> Iterator[tuple[Mode, Any, torch.Tensor, torch.Tensor]]:
    """Layers without embedding and head. `more` is of the configuration; without `fake` they are of CPU tensors."""
    import megatron.core.transformer.multi_latent_attention as latents
    import megatron.core.transformer.transformer_block as block
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    assert a.latent is not None
    mode = Mode()
    with (
        one_rank(1), storages_come_and_go(mode), mock.patch.object(block, "LayerNormImpl", Norm), _fused_kernels("sdpa"),
        mock.patch.object(latents, "fused_apply_mla_rope_for_q", _queries),
        mock.patch.object(latents, "fused_apply_mla_rope_for_kv", _keys_and_values),
        mock.patch.multiple(latents, Linear=_NotHere, TELinear=_NotHere, TEColumnParallelLinear=_NotHere),
    ):  # fmt: skip
        spec = get_gpt_layer_local_spec(multi_latent_attention=True, qk_layernorm=a.latent.normed)
        spec.submodules.input_layernorm, spec.submodules.pre_mlp_layernorm = Norm, IdentityOp
        of_attention, normed = spec.submodules.self_attention.submodules, _with_norm(ColumnParallelLinear)
        of_attention.q_layernorm = of_attention.kv_layernorm = IdentityOp
        of_attention.linear_q_up_proj = of_attention.linear_kv_up_proj = normed
        spec.submodules.mlp.submodules.linear_fc1 = normed
        config = MLATransformerConfig(
            num_layers=a.layers, hidden_size=a.hidden, num_attention_heads=a.heads, ffn_hidden_size=a.ffn,
            q_lora_rank=a.latent.q_rank, kv_lora_rank=a.latent.kv_rank, qk_head_dim=a.latent.nope_dim,
            qk_pos_emb_head_dim=a.latent.rope_dim, v_head_dim=a.latent.v_dim, apply_rope_fusion=True,
            params_dtype=torch.bfloat16, bf16=True, gated_linear_unit=a.gated, activation_func=torch.nn.functional.silu,
            normalization="RMSNorm", add_bias_linear=False, qk_layernorm=a.latent.normed, hidden_dropout=a.hidden_dropout,
            attention_dropout=0.0, use_cpu_initialization=True, perform_initialization=False, bias_activation_fusion=True,
            masked_softmax_fusion=False, bias_dropout_fusion=True, gradient_accumulation_fusion=False,
            recompute_granularity="selective" if modules else None, recompute_modules=list(modules) or None, **more,
        )  # fmt: skip
        with FakeTensorMode(allow_non_fake_inputs=True) if fake else contextlib.nullcontext():
            torch.set_default_dtype(torch.bfloat16)
            model = GPTModel(
                config, spec, 128, seq, parallel_output=True, pre_process=False, post_process=False,
                position_embedding_type="rope",
            ).train()  # fmt: skip
            torch.set_default_dtype(torch.float32)
            ids = torch.zeros((batch, seq), dtype=torch.int64)
            mask = torch.ones((1, 1, seq, seq), dtype=torch.bool)
            for parameter in model.parameters():
                parameter.register_post_accumulate_grad_hook(_without_gradient)
            for tensor in [*model.parameters(), *model.buffers(), ids, mask]:
                mode.register(tensor)
            yield mode, model, ids, mask


def recomputing_moe_layer(
    a: Architecture, modules: tuple[str, ...], *, tp: int, ep: int, etp: int, batch: int, seq: int
) -> megatron_moe_oracle.Ran:
    """The layer of `megatron_moe_oracle`, which recomputes modules."""
    from megatron.core.transformer import transformer_config

    mode = Mode()
    config = partial(
        transformer_config.TransformerConfig,
        recompute_granularity="selective" if modules else None, recompute_modules=list(modules) or None,
    )  # fmt: skip
    with (
        mock.patch.object(transformer_config, "TransformerConfig", config),
        mock.patch.object(megatron_moe_oracle, "Mode", lambda: mode),
        storages_come_and_go(mode),
    ):
        return megatron_moe_oracle.moe_layer.__wrapped__(a, tp=tp, ep=ep, etp=etp, batch=batch, seq=seq)  # type: ignore[attr-defined]
