"""Kernels behind the functions that programs call: a choice of the setup, not a flag inside a program.

`hf` is transformers' own code; `fused` is Liger-Kernel as it patches transformers; `megatron` is Megatron-Core with
Transformer Engine. The loss is a separate choice: `eager` (transformers'), `fused` (Liger's, or Transformer Engine's
with Megatron's kernels), `liger` (Liger's, over fp32 logits), `chunked` (torch's linear_cross_entropy), `flash`
(flash-attn's, over half-precision logits), `vocab-parallel` (Megatron's), `vocab-parallel-fused` (Megatron's, compiled).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from memcalc.core.dims import workload_size
from memcalc.families import support_of, supporting

if TYPE_CHECKING:
    from memcalc.core.dtypes import DType
    from memcalc.core.rows import Basis, Row

_TORCH: Final = "transformers' forward; torch tools/autograd/derivatives.yaml"
_LIGER: Final = "Liger-Kernel 0.8.5 src/liger_kernel/ops"
_CHUNKED: Final = "torch 2.13 nn/modules/linear_cross_entropy.py"
_FLASH: Final = "flash-attn 2.8.3 flash_attn/ops/triton/cross_entropy.py"
_LOSS_PARALLEL: Final = f"{_TORCH}; torch/distributed/tensor/parallel/loss.py"
_MEGATRON: Final = "Megatron-Core 0.16.1 megatron/core/fusions; Transformer Engine 2.11"

DEFAULT_LOSS: Final = {"hf": "eager", "fused": "fused", "megatron": "vocab-parallel"}


class Kernels(NamedTuple):
    """The functions that a run calls in place of transformers'."""

    replaced: tuple[tuple[Callable[..., Any], Callable[..., Any]], ...] = ()
    source: str = _TORCH
    """The sources that say what the functions save and allocate."""
    basis: Basis = "exact"
    chunks: Callable[[int, int, int], Hashable] | None = None
    """(tokens, vocab, hidden) -> the sizes of the chunks of a chunked loss. They are no polynomials."""
    reads_head: bool = False
    """True if the loss takes the head's weight and does not call the head."""


TRANSFORMERS: Final = Kernels()


def refusal(kernels: str, model_type: str, config: Any, liger_parts: str | None = None) -> str | None:
    """Return the reason why a model cannot have these kernels; None if it can. `liger_parts` names what of Liger's is on, as
    in `choose`."""
    support = support_of(model_type)
    if kernels == "fused":
        from memcalc.kernels.liger import ACTIVATIONS, LARGEST

        if support.liger is None:
            return f"Liger-Kernel leaves {model_type} as it is, or its kernels for it are not modelled; allowed: hf"
        from memcalc.kernels.liger_parts import chosen_parts

        if not {"swiglu", "geglu"} & set(chosen_parts(liger_parts, model_type)):
            return None
        if config.intermediate_size > LARGEST:
            return f"Liger's kernels take rows of up to {LARGEST}, intermediate_size is {config.intermediate_size}; allowed: hf"
        return _activation(config.hidden_act, ACTIVATIONS[support.liger])
    if kernels == "megatron":
        if not support.megatron_kernels:
            types = ", ".join(supporting(lambda s: s.megatron_kernels))
            return f"not modelled for {model_type}, only for {types}; allowed: hf"
        return _activation(getattr(config, support.activation_field), support.megatron_activations)
    return None


def _activation(name: str, allowed: tuple[str, ...] | None) -> str | None:
    if allowed is None or name in allowed:
        return None
    return f"they compute {' or '.join(allowed)}, and the model's activation is {name}; allowed: hf"


def losses(kernels: str, model_type: str) -> tuple[str, ...]:
    """Return the names of the cross-entropies that a model can have with these kernels."""
    if kernels == "megatron":
        return ("vocab-parallel", "vocab-parallel-fused", "fused")
    support = support_of(model_type)
    fused = ("fused",) if support.liger is not None else ()
    chunked = ("chunked",) if support.chunked_loss else ()
    flash = ("flash",) if fused or chunked else ()
    liger = ("liger",) if fused and support.liger_loss else ()
    return ("eager", *fused, *chunked, *flash, *liger)


@cache
def choose(
    model_type: str, kernels: str, cross_entropy: str, *, selective: bool = False, liger_parts: str | None = None
) -> Kernels:
    """Return the kernels of a run. `selective` is Megatron's recomputation of core attention only. `liger_parts` names what
    of Liger's is on with fused kernels (`memcalc.kernels.liger_parts`); None: all.
    """
    if (kernels, cross_entropy) == ("hf", "eager"):
        return TRANSFORMERS
    replaced: dict[Callable[..., Any], Callable[..., Any]] = {}
    if kernels == "megatron":
        from memcalc.kernels import megatron

        replaced |= megatron.REPLACED
        replaced |= megatron.SELECTIVE if selective else {}
        replaced |= megatron.LOSSES[cross_entropy]
        return Kernels(tuple(replaced.items()), f"{_MEGATRON}; {_TORCH}", "modelled")
    from memcalc.families.base.blocks import causal_lm_loss, lm_head_loss
    from memcalc.kernels import chunked_loss, flash_loss, liger, liger_loss, loss_parallel
    from memcalc.kernels.liger_parts import chosen_parts

    if cross_entropy == "vocab-parallel":
        return Kernels(((causal_lm_loss, loss_parallel.causal_lm_loss),), _LOSS_PARALLEL, "exact")

    sources = [_TORCH]
    if kernels == "fused":
        patches = support_of(model_type).liger
        assert patches is not None
        for part in chosen_parts(liger_parts, model_type):
            replaced |= liger.PATCHES[patches][part]
        sources.insert(0, _LIGER)
    chunks = None
    if cross_entropy == "fused":
        replaced[lm_head_loss], chunks = liger.lm_head_loss, liger.loss_chunk
        sources.insert(0, _LIGER)
    elif cross_entropy == "flash":
        replaced[causal_lm_loss] = flash_loss.causal_lm_loss
        sources.insert(0, _FLASH)
    elif cross_entropy == "liger":
        replaced[causal_lm_loss] = liger_loss.causal_lm_loss
        sources.insert(0, _LIGER)
    elif cross_entropy == "chunked":
        replaced[lm_head_loss], chunks = chunked_loss.lm_head_loss, chunked_loss.loss_chunks
        sources.insert(0, _CHUNKED)
    return Kernels(tuple(replaced.items()), "; ".join(dict.fromkeys(sources)), "modelled", chunks, chunks is not None)


def loss_in(cross_entropy: str | None, program: Any, computes: DType, buffers: DType) -> DType:
    """Return the dtype of the loss of a model that computes in one dtype and has floating-point buffers of another."""
    if cross_entropy == "chunked" and program.takes_losses:
        return computes
    return program.loss_in(computes, buffers)


def kept_by_kernels(kernels: str, attention: str | None, program: Any, dtype: DType) -> tuple[Row, ...]:
    """Return rows of buffers that kernels keep from step to step: one buffer of scores for Megatron's eager
    attention."""
    if kernels != "megatron" or attention != "eager":
        return ()
    from memcalc.core.rows import Row

    batch, seq = workload_size(1, 1)
    source = "Megatron-Core 0.16.1 megatron/core/transformer/dot_product_attention.py, get_global_memory_buffer"
    return (
        Row(
            "buffers",
            "attention scores buffer",
            (batch, program.heads, seq, seq),
            dtype,
            basis="modelled",
            source=source,
        ),
    )
