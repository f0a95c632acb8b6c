"""A reward model beside GRPO's policy: its weights, and the peak of the phase in which it scores, against TRL's own
`_calculate_rewards` over transformers' AutoModelForSequenceClassification, to the byte."""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import transformers
from cases import step_cases
from tasks.grpo_oracle import grpo, trainer_of
from validate.test_fake import LLAMA, QWEN3

import memcalc
from memcalc.inference.rewarding import REWARD
from memcalc.inference.rollout import phases
from memcalc.kernels.attention_on_gpu import fused_kernels
from memcalc.tasks.reward_model import NAME, TYPES
from memcalc.tracing.modules import quiet
from memcalc.tracing.realism import collected_by_hand
from memcalc.validate.attention_kernels import kernels_of_cuda
from memcalc.validate.live import Live, whole_shapes_uncounted
from memcalc.validate.realism import cuda_kernels, not_traced
from memcalc.validate.reference import configuration, to_run
from memcalc.validate.untouched import Untouched

SIZES: dict[str, Any] = {"task": "grpo", "micro_batch_size": 2, "seq_len": 24, "completion_len": 6, "precision": "bf16"}


class Reader:
    """A tokenizer of texts that have `tokens` tokens each."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens

    def __call__(self, text: list[str], **_: Any) -> dict[str, torch.Tensor]:
        shape = len(text), self.tokens
        return {
            "input_ids": torch.zeros(shape, dtype=torch.int64),
            "attention_mask": torch.ones(shape, dtype=torch.int64),
        }


class Measured:
    """The bytes of a reward model, and the most bytes above them and the policy's own while it scores."""

    def __init__(self, report: memcalc.Report, fields: dict[str, Any], dtype: Any, kept: int) -> None:
        s, live = report.setup, Live()
        together, completion = s.micro_batch_size * s.steps_per_generation, s.completion_len
        with contextlib.ExitStack() as stack:
            for context in (
                grpo(), Untouched(), not_traced(padded=False, encoder_decoder=False), cuda_kernels(fused_kernels(s.gpu)),
                collected_by_hand(), whole_shapes_uncounted(), quiet(), kernels_of_cuda(),
            ):  # fmt: skip
                stack.enter_context(context)
            config = configuration(fields["model_type"], fields)
            config.num_labels, config.use_cache, config.pad_token_id = 1, True, 0
            model = to_run(config, s.attention, dtype, transformers.AutoModelForSequenceClassification).eval()
            model.config.use_cache = True  # as in a configuration
            for tensor in (*model.parameters(), *model.buffers()):
                live.register(tensor)
            self.model = live.now
            module = importlib.import_module("trl.trainer.grpo_trainer")
            for one in (module, importlib.import_module("trl.extras.profiling")):
                stack.enter_context(patch.object(one, "profiling_context", lambda *_: contextlib.nullcontext()))
            stack.enter_context(patch.object(module, "gather", lambda x: x))
            parent = module.GRPOTrainer.__mro__[1]
            stack.enter_context(patch.object(parent, "_prepare_inputs", lambda _, x: x))
            stack.enter_context(patch.object(torch.Tensor, "__bool__", lambda _: False))  # no reward is missing
            trainer: Any = trainer_of(s, model, None)
            vars(trainer).update(
                reward_funcs=[model], reward_processing_classes=[Reader(s.seq_len)], reward_func_names=["model"],
                state=None, _log_completion_extra=None, _log_metric=None, environments=None, chat_template_kwargs={},
            )  # fmt: skip
            gc.collect()
            with live, torch.no_grad():
                live.begin()
                prompt = torch.zeros((together, s.seq_len - completion), dtype=torch.int64)
                answer = torch.zeros((together, completion), dtype=torch.int64)
                masks = [torch.ones_like(prompt), torch.ones_like(answer)]
                number = masks[1].sum()
                both = torch.cat([prompt, answer], dim=1), torch.cat(masks, dim=1)
                earlier = [torch.zeros((together, completion)) for _ in range(kept)]
                texts = [""] * together
                with torch.enable_grad():
                    trainer._calculate_rewards([{} for _ in texts], texts, texts, [[] for _ in texts])
                del number, both, earlier
                self.peak = live.highest - self.model


def both(
    folder: Path, fields: dict[str, Any], options: dict[str, Any], kept: int = 0
) -> tuple[memcalc.Report, Measured]:
    (folder / "config.json").write_text(json.dumps(fields))
    report = memcalc.estimate(LLAMA, **SIZES | options, reward_model=str(folder))
    return report, Measured(report, fields, report.setup.compute_dtype, kept)


def check(report: memcalc.Report, real: Measured) -> None:
    found = {one.name: one.nbytes for one in phases(report.model, report.setup, report.rank.holdings.buffer_dtype)}
    assert sum(row.nbytes for row in report.rank.holdings.always if row.name.startswith(NAME)) == real.model
    assert found[REWARD] == real.peak


CASES: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "llama": (LLAMA, {}, 0),
    "qwen3, several micro-batches together": (QWEN3, {"steps_per_generation": 3, "beta": 0.1}, 2),
    "old log-probabilities and a reference": (QWEN3, {"num_iterations": 2, "beta": 0.1}, 2),
    "fp32": (LLAMA, {"precision": "fp32"}, 0),
    "longer": (LLAMA, {"seq_len": 90, "completion_len": 60}, 0),
}


@pytest.mark.parametrize("name", CASES)
def test_rewards(name: str, tmp_path: Path) -> None:
    fields, options, kept = CASES[name]
    check(*both(tmp_path, fields, options, kept))


@pytest.mark.parametrize("family", [pytest.param(one, marks=pytest.mark.slow) for one in TYPES])
def test_types(family: str, tmp_path: Path) -> None:
    case = step_cases(family)[0]
    options = {"micro_batch_size": case.batch, "seq_len": case.seq, "completion_len": case.seq // 2}
    check(*both(tmp_path, case.fields, options))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another task": ({"task": "sft", "completion_len": None}, "scores what --task grpo generates; allowed: with --task grpo"),
    "autocast": ({"precision": "bf16-autocast"}, "with --precision bf16-autocast is not modelled by this version"),
    "eager": ({"attention": "eager"}, "with --attention eager is not modelled by this version"),
    "a type": ({"reward_model": "gpt2"}, "--reward-model gpt2: of a gpt2 is not modelled by this version; allowed: llama, "),
    "no such model": ({"reward_model": "no-such-model"}, "--reward-model no-such-model: "),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    options, message = REFUSED[name]
    with pytest.raises(memcalc.InputError) as refused:
        memcalc.estimate(LLAMA, **{**SIZES, "reward_model": "llama-7b", **options})
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_it_is_whole_on_every_gpu() -> None:
    """And nothing else of the training step moves."""
    options = {**SIZES, "gpus": 4, "zero": 2, "precision": "bf16-mixed"}
    without, beside = memcalc.estimate(LLAMA, **options), memcalc.estimate(LLAMA, **options, reward_model="llama-7b")
    added = sum(row.nbytes for row in beside.rank.holdings.always if row.name.startswith(NAME))
    assert added >= 2 * (6_738_415_616 - 32000 * 4096 + 4096)
    assert beside.phases["step"] - without.phases["step"] == added
