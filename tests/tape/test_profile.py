"""A profile that is extended in depth and in batch and sequence equals a run of just that size."""

from __future__ import annotations

from typing import Any

import paper
import pytest
from cases import step_cases

from memcalc.core.dims import evaluate
from memcalc.core.dtypes import bf16, fp32
from memcalc.core.selective import per_op
from memcalc.engines.fsdp2.step import Sharding
from memcalc.families import FAMILIES
from memcalc.tape.profile import Choices, Moment, Profile, full_profile, profile

DEPTH_FIELDS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")


def deeper(family: str, depth: int) -> dict[str, Any]:
    """The last case's configuration with more layers, one list entry a layer where it has lists."""
    fields = dict(step_cases(family)[-1].fields)
    layers = next((fields[name] for name in DEPTH_FIELDS if name in fields), None)
    for name, value in fields.items():
        if name in DEPTH_FIELDS:
            fields[name] = depth
        elif name == "attention_types":
            fields[name] = [[["global"], depth - 6], [["local"], 6]]
        elif isinstance(value, list) and len(value) == layers:
            fields[name] = (value * depth)[:depth]
    return fields


def highest(moments: tuple[Moment, ...], batch: int, seq: int, gradients: int) -> int:
    return max(evaluate(m.poly, batch, seq) + gradients * m.gradients for m in moments)


def peaks(of: Profile, batch: int, seq: int) -> list[int]:
    moments = (of.forward, of.backward, (of.saved,))
    return [highest(each, batch, seq, gradients) for each in moments for gradients in (0, 1)]


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(("depth", "batch", "seq"), [(12, 1, 24), (15, 3, 40)])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_profile_is_a_run_of_that_depth_and_size(
    family: str, depth: int, batch: int, seq: int, recompute: bool
) -> None:
    program = paper.program_of(deeper(family, depth))
    if recompute and not program.recomputes:
        pytest.skip("transformers does not offer it")
    for attention in program.attention_kinds:
        choices = Choices(bf16, attention, recompute, False)
        short = profile(program, choices, batch, seq)
        for b, s in ((batch, seq), (batch * 2 + 1, 3 * seq)):
            alike = not short.pads_queries or program.remainder(s) == program.remainder(seq)
            if alike and program.branch(b, s) == program.branch(batch, seq):
                whole = full_profile(program, choices, b, s)
                assert peaks(short, b, s) == peaks(whole, b, s)


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3_moe", "zamba2", "t5"])
def test_a_profile_of_kept_results_is_a_run_of_that_depth(family: str) -> None:
    program = paper.program_of(deeper(family, 15))
    choices = Choices(bf16, program.attention_kinds[0], True, False, policy=per_op)
    assert peaks(profile(program, choices, 2, 24), 2, 24) == peaks(full_profile(program, choices, 2, 24), 2, 24)
    full = profile(program, choices._replace(policy=None), 2, 24)
    assert peaks(profile(program, choices, 2, 24), 2, 24) > peaks(full, 2, 24)


@pytest.mark.slow
@pytest.mark.parametrize(("depth", "recompute", "reshards"), [(15, True, True), (15, False, True), (14, True, False)])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_profile_under_fsdp2_is_a_run_of_that_depth(family: str, depth: int, recompute: bool, reshards: bool) -> None:
    program = paper.program_of(deeper(family, depth))
    hooks = Sharding(3, reshards, fp32, fp32, accumulating=False)
    kind = program.attention_kinds[0]
    choices = Choices(bf16, kind, recompute and program.recomputes, False, hooks=hooks)
    short, whole = (made(program, choices, 2, 24) for made in (profile, full_profile))
    assert peaks(short, 2, 24) == peaks(whole, 2, 24)


def test_a_recurrence_at_full_size_peaks_where_its_run_does() -> None:
    """Its steps but the last few are (seq - 3) of something: coefficients below zero."""
    program = paper.program_of({"model_type": "mamba", "num_hidden_layers": 8})
    short = profile(program, Choices(bf16, "eager", False, False), 2, 4096)
    assert any(c < 0 for moment in short.backward for c in moment.poly)
    step = paper.PaperRun(program, 2, 64, bf16, "eager").step()
    real = [step.forward - step.start, step.backward - step.start]
    assert [highest(short.forward, 2, 64, 1), highest(short.backward, 2, 64, 1)] == real


def test_a_lead_of_other_layers_is_no_part_of_the_period() -> None:
    fields = deeper("qwen2", 15) | {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 4}
    program = paper.program_of(fields)
    assert program.pattern() == (4, 1)
    choices = Choices(bf16, "sdpa", False, False)
    assert peaks(profile(program, choices, 2, 16), 2, 16) == peaks(full_profile(program, choices, 2, 16), 2, 16)
