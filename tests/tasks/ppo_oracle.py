"""An iteration of PPO over transformers' modules, in the order of torch's calls that TRL 1.12 makes
(trl/experimental/ppo/ppo_trainer.py, `train`), with the most bytes of each of its phases."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy
import torch
import transformers

import memcalc
from memcalc.kernels.attention_on_gpu import fused_kernels
from memcalc.tracing.modules import quiet
from memcalc.tracing.realism import collected_by_hand, gpu_dropout
from memcalc.validate.attention_kernels import kernels_of_cuda
from memcalc.validate.autocast import cuda_lists_on_the_cpu
from memcalc.validate.checks import fields_of
from memcalc.validate.dtypes import DTYPES
from memcalc.validate.engines import replicated
from memcalc.validate.fake import process_group
from memcalc.validate.live import Live, whole_shapes_uncounted
from memcalc.validate.optimizers import make_optimizer, on_the_cpu
from memcalc.validate.realism import cuda_kernels, not_traced
from memcalc.validate.reference import build, configuration, nbytes, to_run
from memcalc.validate.untouched import Untouched

PAD, TEMPERATURE = 3, 0.7 + 1e-7
_LOGSUMEXP = torch.ops.aten.logsumexp.default


class OnAGpu(Live):
    """Live, with the temporaries of logsumexp (aten/src/ATen/native/ReduceOps.cpp, logsumexp_out_impl): the largest numbers,
    and what is left of each number above them."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not _LOGSUMEXP:
            return super().__torch_dispatch__(func, types, args, kwargs)
        x, dims = args[0], args[1]
        largest = torch.ops.aten.amax.default(x, dims, True)
        rest = torch.empty_like(x)
        self.register(largest)
        self.register(rest)
        return super().__torch_dispatch__(func, types, args, kwargs)


def drawn(probs: torch.Tensor, num_samples: int) -> torch.Tensor:
    """`torch.multinomial` of one sample as Distributions.cpp has it."""
    q = torch.empty_like(probs).exponential_()
    return torch.argmax(torch.div(probs, q, out=q), dim=-1, keepdim=True)


class PolicyAndValue(torch.nn.Module):
    """Both models that train, as one module."""

    def __init__(self, policy: Any, value_model: Any) -> None:
        super().__init__()
        self.policy, self.value_model = policy, value_model
        self.backbone = getattr(value_model, value_model.base_model_prefix)

    def gradient_checkpointing_disable(self) -> None:
        self.policy.gradient_checkpointing_disable()

    def gradient_checkpointing_enable(self) -> None:
        self.policy.gradient_checkpointing_enable({"use_reentrant": False})

    @property
    def is_gradient_checkpointing(self) -> bool:
        return self.policy.is_gradient_checkpointing

    def forward(self, **given: Any) -> Any:
        output = self.backbone(**given)
        values = self.value_model.score(output.hidden_states[-1])
        return self.policy(**given), values


def disable_dropout(model: torch.nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0


def model_inputs(query_responses: torch.Tensor) -> dict[str, torch.Tensor]:
    attention_mask = query_responses != PAD
    position_ids = attention_mask.cumsum(1) - attention_mask.long()
    return {
        "input_ids": torch.masked_fill(query_responses, ~attention_mask, 0),
        "attention_mask": attention_mask,
        "position_ids": position_ids,
    }


def forward(model: Any, query_responses: torch.Tensor) -> Any:
    return model(**model_inputs(query_responses), return_dict=True, output_hidden_states=True)


def first_true(bools: torch.Tensor) -> torch.Tensor:
    row_len = bools.size(-1)
    zero_or_index = row_len * (~bools).type(torch.long) + torch.arange(row_len, dtype=torch.long)
    return torch.min(zero_or_index, dim=-1).values


def get_reward(model: Any, query_responses: torch.Tensor, context: int) -> Any:
    backbone = getattr(model, model.base_model_prefix)
    given = model_inputs(query_responses)
    output = backbone(**given, return_dict=True, output_hidden_states=True, use_cache=False)
    logits = model.score(output.hidden_states[-1])
    lengths = first_true(query_responses[:, context:] == PAD) - 1 + context
    return logits, logits[torch.arange(logits.size(0)), lengths].squeeze(-1), lengths


def selective_log_softmax(logits: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    index = index.unsqueeze(-1)
    if logits.dtype == torch.float32:
        selected = torch.gather(logits, dim=-1, index=index)
        logsumexps = torch.stack([torch.logsumexp(row, dim=-1) for row in logits])
        return (selected - logsumexps.unsqueeze(-1)).squeeze(-1)
    out: Any = []
    for row, labels in zip(logits, index, strict=True):
        log_probs = torch.nn.functional.log_softmax(row, dim=-1)
        of_labels = log_probs.gather(dim=-1, index=labels)
        out.append(of_labels)
    out = torch.stack(out)
    return out.squeeze(-1)


def generate(model: Any, queries: torch.Tensor, config: Any) -> Any:
    context = queries.shape[1]
    attention_mask = queries != PAD
    input_ids = torch.masked_fill(queries, ~attention_mask, 0)
    output = model.generate(
        input_ids=input_ids, attention_mask=attention_mask, generation_config=config, return_dict_in_generate=True,
        output_scores=True,
    )  # fmt: skip
    logits = torch.stack(output.scores, 1)
    return torch.cat((queries, output.sequences[:, context:]), dim=1), logits


def padded(tensors: list[torch.Tensor], value: int) -> torch.Tensor:
    shape = numpy.max([t.shape for t in tensors], 0).tolist()
    output = torch.full((len(tensors), *shape), value, dtype=tensors[0].dtype)
    for i, t in enumerate(tensors):
        output[i][tuple(slice(0, n) for n in t.shape)] = t
    return output


@torch.no_grad()
def batch_generation(model: Any, queries: torch.Tensor, chunk: int, config: Any) -> Any:
    query_responses, logitss = [], []
    size = queries.shape[0]
    for i in range(0, size, chunk):
        query = queries[i : i + chunk]
        query_response, logits = generate(model, query, config)
        query_responses.append(query_response)
        logitss.append(logits)
    padded_responses = padded(query_responses, PAD)
    padded_logits = padded(logitss, 0)
    padded_responses = padded_responses.view(-1, padded_responses.shape[-1])[:size]
    padded_logits = padded_logits.view(-1, *padded_logits.shape[2:])[:size]
    return padded_responses, padded_logits


def masked_mean(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return (values * mask).sum() / mask.sum()


def masked_whiten(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    mean = masked_mean(values, mask)
    centered = values - masked_mean(values, mask)
    variance = masked_mean(centered**2, mask)
    mask_sum = mask.sum()
    variance = variance * (mask_sum / (mask_sum - 1))
    return (values - mean) * torch.rsqrt(variance + 1e-8)


class Models(SimpleNamespace):
    """The models of an iteration: `wrapper` of policy and value model, `wrapped` by an engine, `reference`, `reward`."""


class Meter:
    """The most bytes of each phase of the last iteration."""

    def __init__(self, live: Live) -> None:
        self.live, self.phase = live, ""
        self.peaks: dict[str, int] = {}

    def enter(self, phase: str) -> None:
        if self.phase:
            self.peaks[self.phase] = max(self.peaks.get(self.phase, 0), self.live.highest)
        gc.collect()
        self.phase = phase
        self.live.begin()
        self.live.numbers_are_ones = phase == "step"


def iterations(s: Any, models: Any, optimizer: Any, meter: Any, count: int = 2) -> None:
    """Run `count` iterations; the last one is measured."""
    wrapper, model, ref_policy = models.wrapper, models.wrapped, models.reference
    chunk, micro = s.rollout_batch_size, s.micro_batch_size
    local = micro * s.micro_batches
    mini = local // s.num_mini_batches
    response, context_length = s.completion_len, s.seq_len - s.completion_len
    config = transformers.GenerationConfig(
        max_new_tokens=response, temperature=TEMPERATURE, top_k=0.0, top_p=1.0, do_sample=True
    )
    stats = [torch.zeros((s.num_iterations, s.num_mini_batches, s.micro_batches)) for _ in range(7)]
    for _update in range(count):
        meter.peaks.clear()
        meter.enter("generate")
        data = {
            name: torch.ones((local, context_length), dtype=torch.int64) for name in ("input_ids", "attention_mask")
        }
        with torch.no_grad():
            queries = data["input_ids"]
            responses, postprocessed_responses, logprobs, ref_logprobs = [], [], [], []
            scores, sequence_lengths, values = [], [], []
            with without_checkpoints(wrapper.policy):
                query_responses, logitss = batch_generation(wrapper.policy, queries, chunk, config)
            meter.enter("score")
            for i in range(0, local, chunk):
                query = queries[i : i + chunk]
                query_response = query_responses[i : i + chunk]
                resp = query_response[:, context_length:]
                logits = logitss[i : i + chunk]
                logprob = selective_log_softmax(logits, resp)
                del logits
                if ref_policy is None:
                    with wrapper.policy.disable_adapter():
                        ref_output = forward(wrapper.policy, query_response)
                else:
                    ref_output = forward(ref_policy, query_response)
                ref_logits = ref_output.logits[:, context_length - 1 : -1]
                ref_logits /= TEMPERATURE
                ref_logprob = selective_log_softmax(ref_logits, resp)
                del ref_output, ref_logits
                postprocessed_response = resp
                postprocessed_query_response = torch.cat((query, postprocessed_response), 1)
                sequence_length = first_true(postprocessed_response == PAD) - 1
                full_value, _, _ = get_reward(wrapper.value_model, query_response, context_length)
                value = full_value[:, context_length - 1 : -1].squeeze(-1)
                _, score, _ = get_reward(models.reward, postprocessed_query_response, context_length)
                responses.append(resp)
                postprocessed_responses.append(postprocessed_response)
                logprobs.append(logprob)
                ref_logprobs.append(ref_logprob)
                sequence_lengths.append(sequence_length)
                scores.append(score)
                values.append(value)
            responses = torch.cat(responses, 0)
            postprocessed_responses = torch.cat(postprocessed_responses, 0)
            logprobs = torch.cat(logprobs, 0)
            ref_logprobs = torch.cat(ref_logprobs, 0)
            sequence_lengths = torch.cat(sequence_lengths, 0)
            scores = torch.cat(scores, 0)
            values = torch.cat(values, 0)
            del logprob, ref_logprob, full_value, value, score
            gc.collect()
            contain_eos_token = torch.any(postprocessed_responses == PAD, dim=-1)
            response_idxs = torch.arange(responses.shape[1]).repeat(responses.shape[0], 1)
            padding_mask = response_idxs > sequence_lengths.unsqueeze(1)
            logprobs = torch.masked_fill(logprobs, padding_mask, 1.0)
            ref_logprobs = torch.masked_fill(ref_logprobs, padding_mask, 1.0)
            sequence_lengths_p1 = sequence_lengths + 1
            padding_mask_p1 = response_idxs > (sequence_lengths_p1.unsqueeze(1))
            values = torch.masked_fill(values, padding_mask_p1, 0)
            logr = ref_logprobs - logprobs
            kl = -logr
            non_score_reward = -0.05 * kl
            rewards = non_score_reward.clone()
            actual_start = torch.arange(rewards.size(0))
            actual_end = torch.where(sequence_lengths_p1 < rewards.size(1), sequence_lengths_p1, sequence_lengths)
            rewards[actual_start, actual_end] += scores
            lastgaelam: Any = 0
            advantages_reversed = []
            gen_length = responses.shape[1]
            for t in reversed(range(gen_length)):
                nextvalues = values[:, t + 1] if t < gen_length - 1 else 0.0
                delta = rewards[:, t] + 1.0 * nextvalues - values[:, t]
                lastgaelam = delta + 1.0 * 0.95 * lastgaelam
                advantages_reversed.append(lastgaelam)
            advantages = torch.stack(advantages_reversed[::-1], axis=1)
            returns = advantages + values
            advantages = masked_whiten(advantages, ~padding_mask)
            advantages = torch.masked_fill(advantages, padding_mask, 0)
        for epoch in range(s.num_iterations):
            b_inds = numpy.random.permutation(local)
            done = 0
            for of_mini, mini_start in enumerate(range(0, local, mini)):
                mini_inds = b_inds[mini_start : mini_start + mini]
                for of_micro, micro_start in enumerate(range(0, mini, micro)):
                    done += 1
                    with models.around(done < s.micro_batches):
                        meter.enter("forward")
                        inds = mini_inds[micro_start : micro_start + micro]
                        mb_advantage = advantages[inds]
                        mb_responses = responses[inds]
                        mb_query_responses = query_responses[inds]
                        mb_logprobs = logprobs[inds]
                        mb_return = returns[inds]
                        mb_values = values[inds]
                        output, vpred_temp = forward(model, mb_query_responses)
                        logits = output.logits[:, context_length - 1 : -1]
                        logits /= TEMPERATURE
                        new_logprobs = selective_log_softmax(logits, mb_responses)
                        new_logprobs = torch.masked_fill(new_logprobs, padding_mask[inds], 1.0)
                        vpred = vpred_temp[:, context_length - 1 : -1].squeeze(-1)
                        vpred = torch.masked_fill(vpred, padding_mask_p1[inds], 0)
                        vpredclipped = torch.clamp(vpred, mb_values - 0.2, mb_values + 0.2)
                        vf_losses1 = torch.square(vpred - mb_return)
                        vf_losses2 = torch.square(vpredclipped - mb_return)
                        vf_loss_max = torch.max(vf_losses1, vf_losses2)
                        vf_loss = 0.5 * masked_mean(vf_loss_max, ~padding_mask_p1[inds])
                        vf_clipfrac = masked_mean((vf_losses2 > vf_losses1).float(), ~padding_mask_p1[inds])
                        logprobs_diff = new_logprobs - mb_logprobs
                        ratio = torch.exp(logprobs_diff)
                        pg_losses = -mb_advantage * ratio
                        pg_losses2 = -mb_advantage * torch.clamp(ratio, 0.8, 1.2)
                        pg_loss_max = torch.max(pg_losses, pg_losses2)
                        pg_loss = masked_mean(pg_loss_max, ~padding_mask[inds])
                        loss = pg_loss + 0.1 * vf_loss
                        meter.enter("backward")
                        loss.backward()
                        meter.enter("step")
                        if done == s.micro_batches:
                            optimizer.step()
                            optimizer.zero_grad(set_to_none=True)
                        meter.live.numbers_are_ones = False
                        with torch.no_grad():
                            pg_clipfrac = masked_mean((pg_losses2 > pg_losses).float(), ~padding_mask[inds])
                            prob_dist = torch.nn.functional.softmax(logits, dim=-1)
                            entropy = torch.logsumexp(logits, dim=-1) - torch.sum(prob_dist * logits, dim=-1)
                            approxkl = 0.5 * (logprobs_diff**2).mean()
                            place = epoch, of_mini, of_micro
                            stats[0][place] = approxkl
                            stats[1][place] = pg_clipfrac
                            stats[2][place] = pg_loss
                            stats[3][place] = vf_loss
                            stats[4][place] = vf_clipfrac
                            stats[5][place] = entropy.mean()
                            stats[6][place] = ratio.mean()
                del (
                    output, vpred_temp, logits, new_logprobs, vpred, vpredclipped, vf_losses1, vf_losses2, vf_loss, vf_clipfrac,
                    logprobs_diff, ratio, pg_losses, pg_losses2, pg_loss_max, pg_loss, loss, pg_clipfrac, prob_dist, entropy,
                    approxkl, mb_return, mb_advantage, mb_values, mb_responses, mb_query_responses, mb_logprobs,
                )  # fmt: skip
        meter.enter("")
        with torch.no_grad():
            rlhf_reward = non_score_reward.sum(1).mean() + scores.mean()  # noqa: F841  (stays until the next one)
        del kl, scores, non_score_reward
        gc.collect()
        del (
            query_responses, responses, postprocessed_responses, logprobs, ref_logprobs, values, sequence_lengths,
            contain_eos_token, sequence_lengths_p1, response_idxs, padding_mask, padding_mask_p1, rewards, actual_start,
            actual_end, advantages, returns,
        )  # fmt: skip
        meter.phase = ""


@contextlib.contextmanager
def without_checkpoints(policy: Any) -> Iterator[None]:
    enabled = policy.is_gradient_checkpointing
    if enabled:
        policy.gradient_checkpointing_disable()
    yield
    if enabled:
        policy.gradient_checkpointing_enable({"use_reentrant": False})


class Measured(SimpleNamespace):
    """Bytes: of the trained weights, of the optimizer's states, the peak of each phase, and what stays of a forward."""


def in_fp32(model: Any, dtype: torch.dtype) -> None:
    """Wrap the forward as accelerate's prepare_model does with mixed precision."""
    from accelerate.utils import convert_outputs_to_fp32

    own = model.forward
    model.forward = convert_outputs_to_fp32(torch.autocast("cpu", dtype)(own))


@contextlib.contextmanager
def on_a_gpu(s: Any) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for context in (
            Untouched(), not_traced(padded=False, encoder_decoder=False), cuda_kernels(fused_kernels(s.gpu)), gpu_dropout(),
            collected_by_hand(), whole_shapes_uncounted(), quiet(), kernels_of_cuda(),
            patch.object(torch, "multinomial", drawn),
        ):  # fmt: skip
            stack.enter_context(context)
        if s.autocast_dtype is not None:
            stack.enter_context(cuda_lists_on_the_cpu())
        yield


def made(report: memcalc.Report, of: Any = PolicyAndValue) -> Models:
    """The models of a report's setup, policy and value model in a wrapper."""
    s, model = report.setup, report.model
    fields = fields_of(model)
    policy: Any = build(s, model, fields)
    alone = s._replace(lora_rank=0, recompute="none", recompute_layers=None, input_require_grads=False)
    reference = None if s.lora_rank else build(alone, model.whole, fields).eval()

    def scoring(of: dict[str, Any], dtype: Any) -> Any:
        config = configuration(of["model_type"], of)
        config.num_labels, config.use_cache, config.pad_token_id = 1, True, PAD
        out = to_run(config, s.attention, dtype, transformers.AutoModelForSequenceClassification)
        out.config.use_cache = True
        return out

    value, reward = (scoring(fields, s.compute_dtype) for _ in range(2))
    for one in (policy, reference, value, reward):
        if one is not None:
            disable_dropout(one)
            one.config.use_cache = True
    for one in (policy, reference):
        if one is not None:
            one.generation_config.use_cache = True
            one.generation_config.eos_token_id = None
            one.generation_config.pad_token_id = PAD
    wrapper = of(policy, value).train()
    if s.autocast_dtype is not None:
        in_fp32(wrapper, DTYPES[s.autocast_dtype])
    reward.eval()
    return Models(
        wrapper=wrapper,
        wrapped=wrapper,
        reference=reference,
        reward=reward,
        around=lambda follows: contextlib.nullcontext(),
    )


def measured(report: memcalc.Report, run: Any = iterations, of: Any = PolicyAndValue) -> Measured:
    """The bytes of the last of two iterations. In its second step DDP makes its buckets again."""
    s, live = report.setup, OnAGpu()
    with on_a_gpu(s), contextlib.ExitStack() as stack:
        models = made(report, of)
        wrapper = models.wrapper
        for one in (wrapper, models.reference, models.reward):
            for tensor in () if one is None else (*one.parameters(), *one.buffers()):
                live.register(tensor)
        held = live.now
        if s.engine == "ddp":
            stack.enter_context(process_group(s.gpus))
            models.wrapped, models.around = replicated(s, wrapper, live)
        optimizer = make_optimizer(s, wrapper)
        meter = Meter(live)
        gc.collect()
        with live:
            for tensor in getattr(optimizer, "masters", ()):
                live.register(tensor)
            run(s, models, optimizer, meter)
        counters = nbytes(on_the_cpu(optimizer))
        kept = [t for state in optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor)]
        states = nbytes([*kept, *getattr(optimizer, "copies", ())])
        trained = sum(p.nbytes for p in wrapper.parameters())
        return Measured(
            held=held, parameters=trained, states=states - counters,
            peaks={name: peak - counters for name, peak in meter.peaks.items()},
        )  # fmt: skip
