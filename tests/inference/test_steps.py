"""Prefill and decode on paper against transformers' own forwards: each step's peak and its cache, to the byte."""

from __future__ import annotations

from typing import Any

import paper
import pytest
from cases import Case, step_cases
from generation_oracle import generated

import memcalc
from memcalc.core.dims import Dim
from memcalc.core.dtypes import bf16
from memcalc.families import FAMILIES
from memcalc.inference.caches import DynamicCache, windows_of
from memcalc.inference.heights import On, Scale, alive, highest
from memcalc.inference.parallel import Stage
from memcalc.inference.steps import Step, Workload, decode, prefill

NEW = 3
DEFAULT = (
    "llama", "mistral", "gemma3_text", "qwen3_moe", "mixtral", "deepseek_v3", "gpt2", "opt", "falcon", "bloom", "llama4_text",
    "gpt_oss",
)  # fmt: skip
"""The families of a default run; the others are slow ones, as they are many alike."""


WITH_STATES = ("rwkv", "recurrent_gemma", "dbrx")
"""The types whose states no cache object has, or whose bytes depend on routing: tests/inference/test_states.py."""


def decodes(model_type: str) -> bool:
    program = paper.program_of(step_cases(model_type)[0].fields)
    return program.cacheless is None and model_type not in WITH_STATES


ENCODED = ("t5", "bart", "whisper")
"""The decoders behind an encoder, which are called in another way and have a test of their own."""
CASES = [
    pytest.param(case, marks=() if case.model_type in DEFAULT else pytest.mark.slow, id=case.id)
    for model_type in FAMILIES
    if step_cases(model_type) and model_type not in ENCODED and decodes(model_type)
    for case in step_cases(model_type)
]


def on_paper(fields: dict[str, Any], batch: int, prompt: int, attention: str) -> list[tuple[int, int]]:
    """The peak and the cache of the prefill and of each decode step."""
    model = memcalc.load_model(fields)
    work = Workload(bf16, attention, Dim("batch", batch), prompt)
    windows, full = windows_of(model.program)
    weights = 2 * model.num_parameters
    first = prefill(model.program, work, DynamicCache(windows, full))
    steps = [decode(model.program, work, DynamicCache(windows, full, prompt + i), first.cached) for i in range(NEW)]
    return [(weights + highest(whole(step), size).nbytes, cached(step)) for step in (first, *steps)]


size = Scale(1, bf16, bf16).nbytes


def whole(step: Step) -> On:
    return On(step, Stage(range(10**6), True, True))


def cached(step: Step) -> int:
    return sum(size(row) for row in alive(whole(step)) if row.component in ("kv_cache", "state_cache"))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_peaks_and_caches_are_those_of_transformers(case: Case) -> None:
    attention = paper.program_of(case.fields).attention_kinds[0]
    limit = paper.program_of(case.fields).max_seq_len or 10**6
    prompt = min(case.seq, limit - NEW)
    real = generated(case.fields, case.batch, prompt, NEW, attention=attention)
    assert on_paper(dict(case.fields), case.batch, prompt, attention) == [(step.peak, step.held) for step in real]


@pytest.mark.slow
@pytest.mark.parametrize("prompt", [1, 2, 9, 10, 11, 25])
@pytest.mark.parametrize("batch", [1, 3])
def test_every_side_of_a_window(prompt: int, batch: int) -> None:
    """gpt-oss has a window of 10 tokens in every other layer."""
    fields = dict(step_cases("gpt_oss")[0].fields)
    assert fields["sliding_window"] == 10
    real = generated(fields, batch, prompt, NEW, attention="eager")
    assert on_paper(fields, batch, prompt, "eager") == [(step.peak, step.held) for step in real]


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["llama", "gpt2", "qwen2", "gemma"])
def test_eager_attention_and_dropouts_that_are_off(model_type: str) -> None:
    fields = {**step_cases(model_type)[0].fields, "attention_dropout": 0.1}
    real = generated(fields, 2, 9, NEW, attention="eager")
    assert on_paper(fields, 2, 9, "eager") == [(step.peak, step.held) for step in real]


def test_after_a_prompt_a_window_holds_all_of_it() -> None:
    """A layer keeps a view of the last 7 of 20 tokens, whose storage has all; with the next token it has 8."""
    fields = dict(step_cases("gemma3_text")[0].fields)
    assert fields["sliding_window"] == 8
    seen = generated(fields, 1, 20, 1)
    model = memcalc.load_model(fields)
    layers = range(model.layers)
    windows = model.program.cache_windows()
    token = 2 * model.program.kv_heads.size * model.program.head_dim.size * 2
    assert seen[0].held == 20 * token * len(layers) + 8 * len(windows)
    assert seen[0].logical < seen[0].held
    assert seen[1].held == 8 * len(windows) * token + 21 * token * (len(layers) - len(windows)) + 8 * len(windows)
    assert [step.held for step in seen] == [held for _, held in on_paper(fields, 1, 20, "sdpa")[:2]]
