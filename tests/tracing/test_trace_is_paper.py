"""Types that have a program: the trace of the real module gives the estimate that the program gives, to the byte."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
from cases import Case, step_cases
from traces import parameter_rows, traced

import memcalc

pytestmark = pytest.mark.slow
CASES = [case for model_type in ("llama", "gpt2", "gemma2", "mixtral", "phi3") for case in step_cases(model_type)]
RUNS = [
    pytest.param(case, attention, recompute, id=f"{case.id}-{attention}-{recompute}")
    for case in CASES
    for attention in memcalc.load_model(case.fields).program.attention_kinds
    for recompute in ("none", "full")
]


def both(fields: dict[str, Any], **options: Any) -> tuple[memcalc.Report, memcalc.Report]:
    return memcalc.estimate(traced(fields), **options), memcalc.estimate(fields, **options)


def sent(report: memcalc.Report) -> list[Any]:
    """Of a trace the dims have no names of their own."""
    shares = [None if c.shares is None else (c.shares.whole, c.shares.of_layers) for c in report.collectives]
    return [(c._replace(source="", shares=None), of) for c, of in zip(report.collectives, shares, strict=True)]


@pytest.mark.parametrize(("case", "attention", "recompute"), RUNS)
def test_every_phase(case: Case, attention: str, recompute: str) -> None:
    """With the dropout that the configuration has: both take a GPU's."""
    trace, paper = both(
        case.fields, micro_batch_size=case.batch, seq_len=case.seq, attention=attention, recompute=recompute
    )
    assert trace.total("saved_activations") == paper.total("saved_activations")
    assert trace.phases == paper.phases
    assert trace.total("buffers") == paper.total("buffers")
    assert parameter_rows(trace) == parameter_rows(paper)
    assert trace.model.weights() == paper.model.weights()
    assert trace.model.active_parameters == paper.model.active_parameters
    assert trace.model.parameters_by_component() == paper.model.parameters_by_component()
    assert (trace.model.layers, trace.setup.seq_len) == (paper.model.layers, paper.setup.seq_len)


LLAMA, GPT2 = (step_cases(model_type)[0].fields for model_type in ("llama", "gpt2"))


@pytest.mark.parametrize("fields", [LLAMA, GPT2], ids=["llama", "gpt2"])
@pytest.mark.parametrize(
    "options",
    [
        {"precision": "fp32"},
        {"precision": "fp16", "optimizer": "muon"},
        {"global_batch_size": 4, "recompute": "full"},
        {"gpus": 4, "zero": 1, "global_batch_size": 16},
    ],
    ids=str,
)
def test_engines_and_optimizers(fields: dict[str, Any], options: dict[str, Any]) -> None:
    trace, paper = both(fields, micro_batch_size=2, seq_len=16, **options)
    assert trace.phases == paper.phases
    assert sent(trace) == sent(paper)
    assert sum(item.at_peak for item in trace.items) == trace.peak


@pytest.mark.parametrize("fields", [LLAMA, GPT2], ids=["llama", "gpt2"])
@pytest.mark.parametrize("options", [{"gpus": 4, "zero": 2}, {"gpus": 4, "zero": 3, "recompute": "full"}], ids=str)
def test_deepspeed_s_later_stages(fields: dict[str, Any], options: dict[str, Any]) -> None:
    """They act within backward, around gradients and modules, where a trace has no place for them: there it has their rows as
    a whole. Of a model below all thresholds its peak is off by a gradient at the most."""
    trace, paper = both(fields, micro_batch_size=2, seq_len=16, **options)
    largest = 2 * max(prod(shape) for _, shape, _ in trace.model.weights())  # of 16 bits
    assert trace.phases["step"] == paper.phases["step"]
    assert abs(trace.phases["backward"] - paper.phases["backward"]) <= largest
    assert sum(item.at_peak for item in trace.items) == trace.peak


def test_the_order_of_gradients() -> None:
    """DDP's buckets close with the gradient that fills them: their number depends on the order."""
    trace, paper = both(LLAMA, micro_batch_size=1, seq_len=16, gpus=2, engine="ddp")
    assert sent(trace) == sent(paper)
    key = ("gradient order", None)
    assert trace.model.profiles[key] == paper.model.profiles[key]
