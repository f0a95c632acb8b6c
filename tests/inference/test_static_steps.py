"""Prefill and decode with a StaticCache against transformers' own forwards: each step's peak and its cache, to the byte."""

from __future__ import annotations

import paper
import pytest
from cases import Case, step_cases
from inference.states_oracle import generated_with_states
from inference.static_oracle import statically_generated
from inference.test_steps import CASES

import memcalc

NEW = 3
DEFAULT = ("llama", "gemma3_text", "opt", "mpt")


def compare(case: Case, prompt: int, attention: str) -> None:
    real = statically_generated(case.fields, case.batch, prompt, prompt + NEW, NEW, attention=attention)
    report = memcalc.infer(
        dict(case.fields), batch_size=case.batch, prompt_len=prompt, new_tokens=NEW, attention=attention, cache="static"
    )
    assert report.kv_cache + report.state_cache == real[-1].held
    assert report.prefill_peak == real[0].peak
    assert report.decode_peak == max(real[1].peak, real[-1].peak) == max(step.peak for step in real[1:])


def longest_prompt(case: Case) -> int:
    return min(case.seq, (paper.program_of(case.fields).positions_limit or 10**6) - NEW)


def takes_one(case: Case) -> bool:
    return paper.program_of(case.fields).no_static_cache is None


@pytest.mark.parametrize("model_type", DEFAULT)
def test_a_static_cache(model_type: str) -> None:
    case = step_cases(model_type)[0]
    compare(case, longest_prompt(case), paper.program_of(case.fields).attention_kinds[0])


@pytest.mark.slow
@pytest.mark.parametrize("case", [p for p in CASES if takes_one(p.values[0])])
def test_every_family(case: Case) -> None:
    """A prompt of its own length, one that is shorter than any window, and a single token."""
    for attention in paper.program_of(case.fields).attention_kinds[:2]:
        for prompt in (longest_prompt(case), 3, 1):
            compare(case, prompt, attention)


@pytest.mark.slow
@pytest.mark.parametrize("prompt", [1, 2, 9, 10, 11, 25])
def test_every_side_of_a_window(prompt: int) -> None:
    """gpt-oss has a window of 10 tokens in every other layer: not full, just full, and full from the prompt on."""
    compare(step_cases("gpt_oss")[0], prompt, "eager")
    compare(step_cases("gemma3_text")[0], prompt, "sdpa")


@pytest.mark.parametrize(("model_type", "prompt"), [("recurrent_gemma", 9), ("recurrent_gemma", 3), ("dbrx", 7)])
def test_states_and_experts(model_type: str, prompt: int) -> None:
    case = step_cases(model_type)[0]
    real = generated_with_states(case.fields, case.batch, prompt, NEW, attention="sdpa", longest=prompt + NEW)
    report = memcalc.infer(
        dict(case.fields), batch_size=case.batch, prompt_len=prompt, new_tokens=NEW, cache="static", attention="sdpa"
    )
    assert report.kv_cache + report.state_cache == real[-1].held
    assert report.prefill_peak == real[0].peak
    assert report.decode_peak == max(real[1].peak, real[-1].peak)


@pytest.mark.parametrize("model_type", ["minimax", "rwkv", "t5"])
def test_what_is_refused(model_type: str) -> None:
    with pytest.raises(memcalc.InputError, match="--cache static"):
        memcalc.infer(dict(step_cases(model_type)[0].fields), cache="static")


def test_positions_as_long_as_the_tokens_seen() -> None:
    """Falcon adds alibi, one position for each token seen, to a mask of the cache's whole length: the real code fails."""
    case = next(case for case in step_cases("falcon") if case.fields.get("alibi"))
    with pytest.raises(RuntimeError, match="broadcast"):
        statically_generated(case.fields, case.batch, 5, 5 + NEW, NEW, attention="eager")
    with pytest.raises(memcalc.InputError, match="--cache static: a falcon with alibi fails"):
        memcalc.infer(dict(case.fields), cache="static")


def test_a_note_says_that_steps_are_not_compiled() -> None:
    report = memcalc.infer("llama-7b", cache="static", gpu="a100-80gb")
    assert any("disable_compile=True" in note and "not known" in note for note in report.notes)
    assert report.fits is None
    assert memcalc.infer("llama-2-70b", cache="static", gpu="t4").fits is False


@pytest.mark.parametrize("model_type", ["gemma3_text", "llama"])
def test_a_run_answers_for_other_batches(model_type: str) -> None:
    fields = dict(step_cases(model_type)[0].fields)
    two, seven = (memcalc.infer(fields, batch_size=n, prompt_len=9, new_tokens=3, cache="static") for n in (2, 7))
    assert two.needs(7) == seven.needs()
