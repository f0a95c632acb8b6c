"""HF's Trainer as it was, on one GPU: what two of its published runs allocate, in order.

Written from today's modules, with what was otherwise:

- transformers 4.45's loss (`GraniteForCausalLM.forward`): logits are cast to fp32, and all but each sequence's last are copied.
  Its checkpoints are reentrant (`use_reentrant` not given), over an embedding's output that wants a gradient. 4.48's are the
  same.
- torch 1.10: `zero_grad` fills gradients with zeros and keeps them, softmax saves its input beside its result (transformers'
  `softmax_backward_data` has both signatures), dropout's mask has a byte an element, and AdamW goes weight by weight.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch
import transformers
from oracle import cuda_kernels, not_traced
from records import on_record
from storage_events import Event, EventMode, played, renumbered
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

import memcalc
from memcalc.validate.autocast import cuda_lists_on_the_cpu
from memcalc.validate.checks import fields_of
from memcalc.validate.quantized import four_bit_products_of_cuda, quantize, quantized_states
from memcalc.validate.tuning import cast_like_the_base
from memcalc.validate.untouched import Untouched

STEPS = 3

Loss = Callable[[Any, torch.Tensor], torch.Tensor]


@on_record
def granite_of_4_45(fields: dict[str, Any], batch: int, seq_len: int) -> list[Event]:
    """Three steps in bf16 with clipping and AdamW, foreach; every layer is recomputed."""

    def loss_of(model: Any, ids: torch.Tensor) -> torch.Tensor:
        logits = model.lm_head(model.model(input_ids=ids).last_hidden_state) / model.config.logits_scaling
        logits = logits.float()
        shifted = logits[..., :-1, :].contiguous().view(-1, logits.shape[-1])
        return F.cross_entropy(shifted, ids[..., 1:].contiguous().view(-1))

    with _fake() as mode:
        config = transformers.AutoConfig.for_model(**fields, use_cache=False)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.enable_input_require_grads()
        _steps(mode, model, loss_of, [(batch, seq_len)], foreach=True, gradients_stay=False, recomputed=True)
    return renumbered(mode.events)


@on_record
def mistral_with_lora_of_4_48(batch: int, seq_len: int) -> list[Event]:
    """Three steps of Mistral-7B in bf16 with peft's adapters of rank 16 on q, k, v and o, dropout 0.1, clipping and AdamW,
    foreach; every layer is recomputed. The frame of the model's forward holds the last hidden state and the logits while the
    loss copies them."""
    import peft

    def loss_of(model: Any, ids: torch.Tensor) -> torch.Tensor:
        hidden = model.model(input_ids=ids).last_hidden_state
        logits = model.lm_head(hidden)
        return _causal_loss(logits, ids)

    with _fake() as mode:
        config = transformers.AutoConfig.for_model(**fields_of(memcalc.load_model("mistral-7b")), use_cache=False)
        model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.enable_input_require_grads()
        targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
        with cast_like_the_base():
            peft.get_peft_model(model, peft.LoraConfig(r=16, lora_dropout=0.1, target_modules=targets))
        _steps(mode, model, loss_of, [(batch, seq_len)], foreach=True, gradients_stay=False, recomputed=True)
    return renumbered(mode.events)


@on_record
def mistral_in_nf4_of_4_48(batch: int, seq_len: int, workspace: int) -> int:
    """The most bytes allocated, with cuBLAS's workspace, of the same steps with the base in nf4, its scales quantised too, under
    the Trainer's `bf16=True`: autocast around forward, and accelerate's copy of the logits in fp32 (convert_outputs_to_fp32).

    Real tensors that nobody touches, as bitsandbytes' parameters cannot be fake. The order in which garbage is collected differs
    from run to run, so the events are not what is recorded."""
    import peft

    setup = memcalc.estimate(
        "mistral-7b", lora_rank=16, precision="bf16-autocast", base_dtype="bf16", quantize="nf4", double_quant=True
    ).setup

    def loss_of(model: Any, ids: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            hidden = model.model(input_ids=ids).last_hidden_state
            logits = model.lm_head(hidden)
            loss = _causal_loss(logits, ids)
        _given_back = logits.float()
        return loss

    with Untouched(), cuda_kernels(), not_traced(), cuda_lists_on_the_cpu(), four_bit_products_of_cuda(setup):
        mode = EventMode()
        config = transformers.AutoConfig.for_model(**fields_of(memcalc.load_model("mistral-7b")), use_cache=False)
        model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model = quantize(model, setup)
        model.enable_input_require_grads()
        targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
        with cast_like_the_base():
            peft.get_peft_model(model, peft.LoraConfig(r=16, lora_dropout=0.1, target_modules=targets))
        for tensor in quantized_states(model):
            mode.register(tensor)
        _steps(mode, model, loss_of, [(batch, seq_len)], foreach=True, gradients_stay=False, recomputed=True)
    return played(renumbered(mode.events), workspace).most_allocated


def _causal_loss(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """ForCausalLMLoss of transformers 4.48 (loss/loss_utils.py)."""
    logits = logits.float()
    shifted = logits[..., :-1, :].contiguous()
    return F.cross_entropy(shifted.view(-1, logits.shape[-1]), ids[..., 1:].contiguous().view(-1))


@on_record
def bert_of_4_15(batch: int, micro_batches: int, seq_len: int, recomputed: bool) -> list[Event]:
    """Three steps of bert-large as a classifier in fp32."""

    def loss_of(model: Any, ids: torch.Tensor) -> torch.Tensor:
        return model(input_ids=ids, labels=ids.new_zeros(ids.shape[0])).loss

    with _fake() as mode, patch.object(F, "dropout", _dropout), patch.object(F, "softmax", _softmax):
        sizes = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
        config = transformers.BertConfig(**sizes, attn_implementation="eager", use_cache=False)
        model = transformers.BertForSequenceClassification(config)
        shapes = [(batch, seq_len)] * micro_batches
        _steps(mode, model, loss_of, shapes, foreach=False, gradients_stay=True, recomputed=recomputed)
    return renumbered(mode.events)


@contextlib.contextmanager
def _fake() -> Iterator[EventMode]:
    with FakeTensorMode(allow_non_fake_inputs=True), cuda_kernels(), not_traced():
        yield EventMode()


def _steps(
    mode: EventMode,
    model: Any,
    loss_of: Loss,
    shapes: list[tuple[int, int]],
    *,
    foreach: bool,
    gradients_stay: bool,
    recomputed: bool,
) -> None:
    model.train()
    if recomputed:
        model.gradient_checkpointing_enable({"use_reentrant": True})
    optimizer = torch.optim.AdamW(model.parameters(), foreach=foreach)
    for tensor in (*model.parameters(), *model.buffers()):
        mode.register(tensor)
    with mode:
        for _ in range(STEPS):
            for shape in shapes:
                loss_of(model, torch.zeros(shape, dtype=torch.int64)).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=foreach)
            optimizer.step()
            optimizer.zero_grad(set_to_none=not gradients_stay)
            gc.collect()


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        result = torch.softmax(x, -1)
        ctx.save_for_backward(x, result)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        x, result = ctx.saved_tensors
        return torch._softmax_backward_data(grads[0], result, -1, x.dtype)


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        result = torch.empty_like(x)
        ctx.save_for_backward(torch.empty_like(x, dtype=torch.bool))
        return result

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(grads[0])


def _softmax(x: torch.Tensor, dim: int = -1, **_: Any) -> torch.Tensor:
    assert dim in (-1, x.dim() - 1)
    return _Softmax.apply(x)  # type: ignore[return-value]


def _dropout(x: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    return _Dropout.apply(x) if training and p else x  # type: ignore[return-value]
