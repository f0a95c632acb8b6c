"""TRL's rollout over transformers' models without data: `generate` and the trainer's log-probabilities, with their peaks."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from tasks.grpo_oracle import grpo, trainer_of, with_head
from transformers import GenerationConfig

import memcalc
from memcalc.kernels.attention_on_gpu import fused_kernels
from memcalc.tracing.modules import quiet
from memcalc.tracing.realism import collected_by_hand, gpu_dropout
from memcalc.validate.attention_kernels import kernels_of_cuda
from memcalc.validate.autocast import cuda_lists_on_the_cpu
from memcalc.validate.checks import fields_of
from memcalc.validate.live import Live, whole_shapes_uncounted
from memcalc.validate.preference import triton_of_a_gpu
from memcalc.validate.realism import cuda_kernels, not_traced
from memcalc.validate.reference import build
from memcalc.validate.untouched import Untouched


def _drawn(probs: torch.Tensor, num_samples: int) -> torch.Tensor:
    """`torch.multinomial` of one sample as Distributions.cpp has it."""
    q = torch.empty_like(probs).exponential_()
    return torch.argmax(torch.div(probs, q, out=q), dim=-1, keepdim=True)


def _measured(report: memcalc.Report, run: Callable[[Any, Live], None], *, reference: bool = False) -> int:
    """The most bytes above the weights and buffers."""
    setup, live = report.setup, Live()
    with contextlib.ExitStack() as stack:
        for context in (
            grpo(), Untouched(), not_traced(padded=False, encoder_decoder=False), cuda_kernels(fused_kernels(setup.gpu)),
            gpu_dropout(), collected_by_hand(), whole_shapes_uncounted(), quiet(), kernels_of_cuda(), triton_of_a_gpu(),
            patch.object(torch, "multinomial", _drawn),
        ):  # fmt: skip
            stack.enter_context(context)
        if setup.autocast_dtype is not None:
            stack.enter_context(cuda_lists_on_the_cpu())
        own = report.model.whole if reference else report.model
        of = setup._replace(lora_rank=0) if reference else setup
        model = build(of, own, fields_of(report.model))
        with_head(setup, model, metrics=not reference)
        model.generation_config.use_cache = True  # as a checkpoint's own
        for tensor in (*model.parameters(), *model.buffers()):
            live.register(tensor)
        base = live.now
        gc.collect()
        with live, torch.no_grad():
            live.begin()
            run(model, live)
            return live.highest - base


def generated(report: memcalc.Report) -> int:
    """The peak of `generate`."""
    s = report.setup
    prompt = s.seq_len - s.completion_len
    config = GenerationConfig(
        max_new_tokens=s.completion_len, do_sample=True, temperature=1.0, top_p=1.0, top_k=0, repetition_penalty=1.0,
        disable_compile=True, pad_token_id=0, bos_token_id=1, eos_token_id=[2],
    )  # fmt: skip

    def run(model: Any, live: Live) -> None:
        shape = (s.micro_batch_size * s.steps_per_generation, prompt)
        inputs = {
            "input_ids": torch.zeros(shape, dtype=torch.int64),
            "attention_mask": torch.ones(shape, dtype=torch.int64),
        }
        model.train()
        if model.is_gradient_checkpointing:  # as `_unwrap_model_for_generation` does
            model.gradient_checkpointing_disable()
        model.generate(**inputs, generation_config=config)

    return _measured(report, run)


def scored(report: memcalc.Report, *, reference: bool = False, kept: int = 0) -> int:
    """The peak of `_get_per_token_logps_and_entropies` in parts of a micro-batch, with what its caller holds."""
    s = report.setup
    together, completion = s.micro_batch_size * s.steps_per_generation, s.completion_len

    def run(model: Any, live: Live) -> None:
        trainer = trainer_of(s, model, None)
        prompt = torch.zeros((together, s.seq_len - completion), dtype=torch.int64)
        answer = torch.zeros((together, completion), dtype=torch.int64)
        masks = [torch.ones_like(prompt), torch.ones_like(answer)]
        number = masks[1].sum()
        ids, mask = torch.cat([prompt, answer], dim=1), torch.cat(masks, dim=1)
        earlier = [torch.zeros((together, completion)) for _ in range(kept)]
        with model.disable_adapter() if reference and s.lora_rank else contextlib.nullcontext():
            trainer._get_per_token_logps_and_entropies(model, ids, mask, completion, batch_size=s.micro_batch_size)
        del number, earlier

    return _measured(report, run, reference=reference and not s.lora_rank)
