"""RWKV, RecurrentGemma and DBRX against transformers' own forwards: each step's peak, and what is kept after it, to the byte."""

from __future__ import annotations

import paper
import pytest
from cases import Case, step_cases
from inference.states_oracle import generated_with_states

import memcalc

CASES = [
    case
    for model_type in ("rwkv", "recurrent_gemma", "dbrx")
    for case in step_cases(model_type)
    if paper.program_of(case.fields).cacheless is None
]


def compare(case: Case, batch: int, prompt: int, attention: str) -> None:
    real = generated_with_states(case.fields, batch, prompt, 3, attention=attention)
    for new in range(4):
        report = memcalc.infer(
            dict(case.fields), batch_size=batch, prompt_len=prompt, new_tokens=new, attention=attention
        )
        assert report.kv_cache + report.state_cache == real[new].held
        assert report.prefill_peak == real[0].peak
        assert report.decode_peak == (max(real[1].peak, real[new].peak) if new else None)


@pytest.mark.parametrize(
    "case",
    [
        step_cases("rwkv")[0],
        *(pytest.param(step_cases(name)[0], marks=pytest.mark.slow) for name in ("recurrent_gemma", "dbrx")),
    ],
    ids=lambda c: c.id,
)
def test_a_step_of_each(case: Case) -> None:
    compare(case, case.batch, case.seq, paper.program_of(case.fields).attention_kinds[0])


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
@pytest.mark.parametrize(("batch", "prompt"), [(1, 5), (2, 2), (3, 3), (5, 7), (1, 1), (3, 1)])
def test_batches_and_prompts(case: Case, batch: int, prompt: int) -> None:
    """RWKV's decode steps have batch x batch tokens: its state has no dim for them, and the sum broadcasts."""
    program = paper.program_of(case.fields)
    for attention in program.attention_kinds[:2]:
        if prompt < program.shortest_prompt:
            with pytest.raises(RuntimeError, match="Sizes of tensors must match"):
                generated_with_states(case.fields, batch, prompt, 0, attention=attention)
            with pytest.raises(memcalc.InputError, match="--prompt-len 1"):
                memcalc.infer(dict(case.fields), batch_size=batch, prompt_len=prompt)
        else:
            compare(case, batch, prompt, attention)


@pytest.mark.parametrize("model_type", ["dbrx", "rwkv"])
def test_the_largest_batch_where_each_batch_is_run(model_type: str) -> None:
    """An expert's rows, and RWKV's batch x batch tokens, are no polynomials in the batch."""
    fields = dict(step_cases(model_type)[0].fields)
    report = memcalc.infer(fields, prompt_len=40, new_tokens=2, gpu="1GB")
    most = report.max_sequences
    assert most is not None
    fits = [memcalc.infer(fields, prompt_len=40, new_tokens=2, gpu="1GB", batch_size=most + i).fits for i in (0, 1)]
    assert fits == [True, False]


def test_notes_say_what_is_particular() -> None:
    rwkv = dict(step_cases("rwkv")[0].fields)
    assert any("mixes the sequences" in note for note in memcalc.infer(rwkv, batch_size=2).notes)
    assert not any("mixes the sequences" in note for note in memcalc.infer(rwkv).notes)
    assert any("evenly among the experts" in note for note in memcalc.infer(dict(step_cases("dbrx")[0].fields)).notes)
