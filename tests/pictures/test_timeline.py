"""The timeline: it is the step that the replay plays, and adds up to the report's rows."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from pictured import GPT2, LLAMA, SETUPS, pictured
from records import examples

import memcalc
from memcalc.core.rows import COMPONENTS
from memcalc.device.allocator import CachingAllocator, rounded
from memcalc.device.observer import Observer
from memcalc.estimation.report import Report
from memcalc.pictures.timeline import Timeline, timeline_of


def tensors(timeline: Timeline) -> list[int]:
    """The bytes of tensors at every moment, without workspaces and without what the allocator adds."""
    live = timeline.live()
    return [sum(parts) for parts in zip(*(live[component] for component in COMPONENTS), strict=True)]


SCALARS = 64
"""The bytes by which DeepSpeed's rows and its script may differ at the peak: norms that are counted at other moments."""


def check(report: Report, timeline: Timeline) -> None:
    """Check what holds for every timeline."""
    assert report.played is not None
    earlier = any(note.startswith("an earlier step") for note in timeline.notes)
    assert timeline.peak < report.played.allocated if earlier else timeline.peak == report.played.allocated
    allocated = timeline.allocated()
    assert allocated == [sum(parts) for parts in zip(*timeline.live().values(), strict=True)]
    assert max(allocated) == timeline.peak == allocated[timeline.peak_event]
    assert timeline.peak not in allocated[: timeline.peak_event]
    assert sum(block.size for block in timeline.alive_at(timeline.peak_event)) == timeline.peak
    assert abs(max(tensors(timeline)) - report.peak) <= (SCALARS if report.setup.engine == "deepspeed" else 0)
    assert max(timeline.reserved()) <= report.played.reserved
    assert all(block.size >= rounded(block.nbytes) for block in timeline.blocks)
    check_events(timeline)
    check_spans(timeline)


def check_events(timeline: Timeline) -> None:
    """Every moment but the first is one allocation or free, and blocks never share a byte."""
    at = Counter[int]()
    for block in timeline.blocks:
        at[block.begin] += 1
        at[block.end or 0] += block.end is not None
        assert block.end is None or block.end > block.begin
    assert all(at[moment] == 1 for moment in range(1, timeline.events + 1))
    taken: dict[int, Any] = {}
    for moment in (0, timeline.peak_event, timeline.events):
        taken = {block.address: block for block in timeline.alive_at(moment)}
        assert len(taken) == len(timeline.alive_at(moment))
        places = sorted((block.address, block.size) for block in taken.values())
        assert all(start + size <= after for (start, size), (after, _) in pairwise(places))


def check_spans(timeline: Timeline) -> None:
    """Spans follow each other from the first moment to the last one, and parts are within them."""
    assert timeline.spans[0].first == 0
    assert timeline.spans[-1].last == timeline.events
    assert timeline.spans[-1].phase == "step"
    for span, after in pairwise(timeline.spans):
        assert span.last <= after.first
    for part in timeline.parts:
        assert any(span.first <= part.first <= part.last <= span.last for span in timeline.spans)


@pytest.mark.parametrize("name", SETUPS)
def test_it_is_the_step_that_is_played(name: str) -> None:
    report, timeline = pictured(name)
    check(report, timeline)
    assert max(tensors(timeline)) == report.peak


@pytest.mark.parametrize("name", SETUPS)
def test_at_the_peak_its_components_are_the_reports_or_a_note_says_so(name: str) -> None:
    report, timeline = pictured(name)
    table = Counter[str]()
    for item in report.items:
        table[item.component] += item.at_peak
    live, sums = timeline.live(), tensors(timeline)
    moment = sums.index(max(sums))
    same = all(live[component][moment] == table[component] for component in COMPONENTS)
    assert same or any(note.startswith("a block counts whole") for note in timeline.notes)


@pytest.mark.parametrize("name", ["none", "ddp", "fsdp2", "fsdp2, stages", "deepspeed 1", "deepspeed 3", "megatron"])
def test_saved_activations_are_the_reports(name: str) -> None:
    report, timeline = pictured(name)
    assert max(timeline.live()["saved_activations"]) == report.total("saved_activations")


def test_saved_activations_of_one_micro_batch_are_all_there_when_forward_ends() -> None:
    report, timeline = pictured("none")
    forward = next(span for span in timeline.spans if span.phase == "forward")
    assert timeline.live()["saved_activations"][forward.last] == report.total("saved_activations")


def test_what_is_from_before_the_step_is_alive_at_its_begin() -> None:
    report, timeline = pictured("none")
    live = timeline.live()
    for component in ("parameters", "optimizer_states"):
        assert live[component][0] == report.total(component)
    assert live["gradients"][0] == live["gradients"][-1] == 0
    assert max(live["gradients"]) == report.total("gradients")


def test_the_state_of_a_weight_names_the_layer() -> None:
    _, timeline = pictured("none")
    names = {block.name for block in timeline.blocks}
    for name in ("{}", "{}: exp_avg", "optimizer step: {}: exp_avg_sq_sqrt"):
        assert {name.format(f"model.layers.{i}.mlp.up_proj.weight") for i in range(12)} <= names
    assert not any("*" in block.name for block in timeline.blocks)


def test_layers_of_the_real_stack_run_in_their_order() -> None:
    _, timeline = pictured("none")
    own = [[part.layer for part in timeline.layers if part.phase == phase] for phase in ("forward", "backward")]
    assert own == [[*range(12)], [*reversed(range(12))]]
    saved = [b for b in timeline.blocks if b.component == "saved_activations" and "layers.7.mlp" in b.name]
    (part,) = (part for part in timeline.layers if part.layer == 7 and part.phase == "forward")
    assert saved
    assert all(part.first < block.begin <= part.last for block in saved)


@pytest.mark.parametrize("name", ["megatron, stages", "megatron, interleaved"])
def test_the_turns_of_a_pipeline_are_those_of_its_schedule(name: str) -> None:
    report, timeline = pictured(name)
    kinds = [(span.phase, span.chunk) for span in timeline.spans[:-1]]
    assert kinds == [(turn.kind, turn.chunk) for turn in report.rank.turns]
    for chunk in {span.chunk for span in timeline.spans}:
        forwards, backwards = (
            [span.micro_batch for span in timeline.spans if (span.phase, span.chunk) == (phase, chunk)]
            for phase in ("forward", "backward")
        )
        assert forwards == backwards == [*range(len(forwards))]
    assert timeline.rank == report.rank.number


def test_that_an_earlier_step_allocates_more_is_a_note() -> None:
    report = memcalc.estimate("llama-7b", engine="megatron", gpus=8, tp=2, zero=1, global_batch_size=16)
    timeline = timeline_of(report)
    assert report.played is not None and report.played.allocated > timeline.peak
    assert any(note.startswith("an earlier step allocates 4.50 MiB more") for note in timeline.notes)
    check(report, timeline)


def test_an_observer_changes_no_number() -> None:
    for name in SETUPS:
        report, _ = pictured(name)
        assert report.played is not None
        allocator = CachingAllocator()
        assert report.record(allocator, Observer()) == report.played


def test_the_allocator_fills_what_is_between_the_report_and_the_timeline() -> None:
    report, timeline = pictured("none")
    more = sum(item.nbytes for item in report.overheads if item.component == "allocator")
    assert timeline.peak == report.peak + more


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"engine": "deepspeed", "gpus": 4, "pp": 2, "global_batch_size": 8}, ["--engine deepspeed", "--pp 2"]),
        ({"engine": "fsdp2", "gpus": 4, "pp": 2, "global_batch_size": 16, "schedule": "gpipe"}, ["--schedule gpipe"]),
    ],
)
def test_without_an_order_there_is_none(options: dict[str, Any], words: list[str]) -> None:
    report = memcalc.estimate(dict(LLAMA), **options)
    if report.is_played:
        pytest.skip("the order is known")
    with pytest.raises(memcalc.InputError, match="order of the allocations") as error:
        timeline_of(report)
    assert "\n" not in str(error.value)
    for word in words:
        assert word in str(error.value)


def test_a_bare_number_of_parameters_has_none() -> None:
    with pytest.raises(memcalc.InputError, match=r"--params.*--model"):
        timeline_of(memcalc.estimate(params="1B"))


@st.composite
def setups(draw: st.DrawFn) -> dict[str, Any]:
    """Setups of every engine. Some are refused."""
    engine = draw(st.sampled_from(["none", "ddp", "fsdp2", "deepspeed", "megatron"]))
    one = {"engine": engine, "micro_batch_size": draw(st.integers(1, 2)), "seq_len": draw(st.sampled_from([64, 128]))}
    gpus = 1 if engine == "none" else draw(st.sampled_from([2, 4]))
    tp = draw(st.sampled_from([1, 2])) if engine in ("fsdp2", "megatron") else 1
    pp = draw(st.sampled_from([1, 2])) if engine in ("fsdp2", "megatron") and gpus // tp > 1 else 1
    one |= {"gpus": gpus, "tp": tp, "pp": pp}
    zeros = {"fsdp2": [2, 3], "deepspeed": [0, 1, 2, 3], "megatron": [0, 1]}
    if engine in zeros:
        one["zero"] = draw(st.sampled_from(zeros[engine]))
    if pp > 1:
        one["schedule"] = draw(st.sampled_from(["1f1b", "gpipe", "interleaved"]))
        one |= {"virtual_stages": 2} if one["schedule"] == "interleaved" else {}
    one["recompute"] = draw(st.sampled_from(["none", "full"]))
    one["optimizer"] = draw(st.sampled_from(["adamw", "adamw", "sgd", "lion"]))
    one["precision"] = draw(st.sampled_from(["bf16-mixed", "bf16-mixed", "fp32", "bf16-autocast"]))
    steps = draw(st.sampled_from([4, 8] if pp > 1 else [1, 2, 5]))
    one["global_batch_size"] = one["micro_batch_size"] * gpus // (tp * pp) * steps
    return one


@settings(
    max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow]
)
@given(setups(), st.sampled_from([LLAMA, GPT2]))
def test_every_timeline_adds_up(options: dict[str, Any], model: dict[str, Any]) -> None:
    try:
        report = memcalc.estimate(dict(model), **options)
        timeline = timeline_of(report)
    except memcalc.InputError:
        assume(False)
        return
    check(report, timeline)
