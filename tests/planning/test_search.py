"""`memcalc.plan`: the plans are estimates, and the best of all layouts."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

import pytest

import memcalc
from memcalc.planning.bounds import Bound
from memcalc.planning.evaluation import Evaluator
from memcalc.planning.layouts import Layout, Space
from memcalc.planning.plan import base_of, limits_of
from memcalc.planning.printed import lines_of
from memcalc.planning.refusals import refusals_of
from memcalc.planning.search import outside_of
from memcalc.setup.resolved import resolve
from memcalc.timing.step import StepTime
from memcalc.units import show_bytes

SMALL: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 2048, "intermediate_size": 5504, "num_hidden_layers": 8,
    "num_attention_heads": 16, "num_key_value_heads": 8, "vocab_size": 32000, "max_position_embeddings": 4096,
}  # fmt: skip
EXPERTS: dict[str, Any] = {
    **SMALL, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 2048,
}  # fmt: skip
QUESTIONS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (SMALL, {"gpus": 4, "engine": "megatron", "global_batch_size": 16, "seq_len": 2048}),
    (SMALL, {"gpus": 2, "global_batch_size": 8, "seq_len": 1024, "max_micro_batch_size": 2}),
    (EXPERTS, {"gpus": 4, "engine": "megatron", "global_batch_size": 8, "seq_len": 1024, "max_micro_batch_size": 4}),
    (SMALL, {"gpus": 4, "engine": "fsdp1", "global_batch_size": 16, "seq_len": 1024}),
]
GPU = "rtx4090"


def every_layout(config: Any, question: dict[str, Any], gpu: str = GPU) -> tuple[Evaluator, list[Any], dict[str, Any]]:
    """All layouts of a question, invalid ones too, and what evaluates them."""
    most, fixed = limits_of({name: value for name, value in question.items() if name != "gpus"})
    model = memcalc.load_model(config)
    base = base_of(fixed, model)
    space = Space(fixed, most, model.layers, model.program.routed[1], base.global_batch_size or 1, 8)
    return Evaluator(model, base, fixed), list(space.layouts(gpu, question["gpus"])), fixed


def bounds_of(evaluator: Evaluator, layout: Layout) -> tuple[Bound, ...]:
    """Return every bound of a layout."""
    looks = evaluator.floor, evaluator.shared, evaluator.unrecomputed, evaluator.probed, evaluator.sent
    return tuple(look(layout) for look in looks)


@pytest.mark.slow
@pytest.mark.parametrize(("config", "question"), QUESTIONS)
def test_the_search_finds_the_best_of_all_layouts(config: dict[str, Any], question: dict[str, Any]) -> None:
    found = memcalc.plan(config, gpu=GPU, **question)
    evaluator, layouts, _ = every_layout(config, question)
    fitting: list[tuple[float, int]] = []
    too_large = 0
    for order, layout in enumerate(layouts):
        if evaluator.refusal(layout):
            continue
        report = memcalc.estimate(evaluator.model, **evaluator.setup_options(layout))
        if report.peak + outside_of(layout) > report.gpu.capacity:  # type: ignore[union-attr]
            too_large += 1
        elif isinstance(report.time, StepTime):
            fitting.append((report.time.seconds, order))
    fitting.sort()
    best = [layouts[order] for _, order in fitting[: len(found.plans)]]
    assert [one.layout for one in found.plans] == best
    counts = found.to_dict()["layouts"]
    assert counts["enumerated"] == len(layouts)
    parts = ("invalid", "too_large", "misses_target", "unknown", "slower")
    assert sum(counts[part] for part in parts) + len(found.plans) == len(layouts)
    assert counts["too_large"] <= too_large


def test_what_fits_and_misses_the_target_is_not_told_as_too_large() -> None:
    """gpt2-xl's states are too large for one of two GPUs; on the other a step fits, and takes too long."""
    asked = {"gpus": 1, "global_batch_size": 8, "seq_len": 1024, "engine": "none"}
    found = memcalc.plan("gpt2-xl", gpu=(GPU, "h100-80gb"), tokens="1T", days=1, **asked)
    assert not found.plans
    assert found.to_dict()["layouts"]["too_large"] > 0
    assert found.no_fit is None
    assert found.best_missing is not None
    (line,) = (line for line in lines_of(found, 200) if "the target is 1 day" in line)
    assert line.startswith("it fits, but misses the target")


def test_a_plan_is_as_wide_as_the_terminal() -> None:
    found = memcalc.plan(SMALL, gpu=GPU, tokens="1B", price=2.5, top=2, **QUESTIONS[0][1])
    for columns in (45, 50, 80, 140):
        lines = lines_of(found, columns)
        assert max(map(len, lines)) <= columns
        text = " ".join(" ".join(lines).split())
        for one in found.plans:
            assert f"costs {one.cost:,.2f}" in text
            assert show_bytes(one.document["memory"]["device"]) in text


def test_a_plan_is_the_estimate_of_its_setup() -> None:
    found = memcalc.plan(SMALL, gpu=GPU, **QUESTIONS[0][1])
    for one, document in zip(found.plans, found.to_dict()["plans"], strict=True):
        report = memcalc.estimate(SMALL, **one.options).to_dict()
        assert document["setup"] == report["setup"]
        assert document["time"] == report["time"]
        assert document["fit"] == report["fit"]
        assert document["memory"] == {name: report["memory"][name] for name in ("peak", "reserved", "device")}


@pytest.mark.slow
@pytest.mark.parametrize(("config", "question"), QUESTIONS)
def test_no_bound_is_above_the_exact_number(config: dict[str, Any], question: dict[str, Any]) -> None:
    evaluator, layouts, _ = every_layout(config, question)
    valid = [layout for layout in layouts if not evaluator.refusal(layout)]
    for layout in valid[:: max(1, len(valid) // 80)]:
        exact = evaluator.exact(layout)
        if exact.why_not:
            continue
        for bound in bounds_of(evaluator, layout):
            assert bound.nbytes + outside_of(layout) <= exact.nbytes, layout
            assert not exact.fits or bound.seconds <= exact.seconds, layout


def test_no_bound_of_a_real_model_is_above_the_exact_number() -> None:
    question = {"gpus": 8, "engine": "megatron", "global_batch_size": 64, "seq_len": 2048}
    evaluator, layouts, _ = every_layout("llama-7b", question, "a100-80gb")
    valid = [layout for layout in layouts if not evaluator.refusal(layout)]
    for layout in valid[::20]:
        exact = evaluator.exact(layout)
        for bound in bounds_of(evaluator, layout):
            assert bound.nbytes + outside_of(layout) <= exact.nbytes, layout
            assert not exact.fits or bound.seconds <= exact.seconds, layout


def test_no_bound_of_few_micro_batches_in_chunks_is_above_the_exact_number() -> None:
    """In one round of micro-batches each chunk's gradients are reduced before the next chunk's backward begins."""
    question = {"gpus": 4, "engine": "fsdp2", "global_batch_size": 8, "seq_len": 128}
    evaluator, layouts, _ = every_layout({**SMALL, "num_hidden_layers": 24}, question, "h100-80gb")
    chunked = [layout for layout in layouts if layout.virtual_stages > 1 and layout.pp * layout.micro_batch_size >= 8]
    for layout in [layout for layout in chunked if not evaluator.refusal(layout)][::10]:
        exact = evaluator.exact(layout)
        for bound in bounds_of(evaluator, layout):
            assert bound.nbytes + outside_of(layout) <= exact.nbytes, layout
            assert not exact.fits or bound.seconds <= exact.seconds, layout


def test_no_bound_of_many_short_kernels_is_above_the_exact_number() -> None:
    """The CPU starts FSDP2's reductions once in a step, however many micro-batches there are."""
    config = SMALL | {"num_hidden_layers": 12, "hidden_size": 1024, "intermediate_size": 2816}
    question = {"gpus": 8, "engine": "fsdp2", "global_batch_size": 8, "seq_len": 2048, "precision": "bf16"}
    evaluator, layouts, _ = every_layout(config, question, "h100-80gb")
    several = [one for one in layouts if (one.pp, one.cp, one.tp, one.zero, one.recompute) == (1, 4, 2, 2, "none")]
    for layout in [one for one in several if not evaluator.refusal(one)]:
        assert evaluator.probed(layout).seconds <= evaluator.exact(layout).seconds, layout


@pytest.mark.parametrize(("config", "engine"), [(SMALL, "fsdp2"), (SMALL, "megatron"), (EXPERTS, "megatron")])
def test_the_bound_of_layouts_of_the_same_degrees_is_above_none_of_theirs(config: dict[str, Any], engine: str) -> None:
    question = {"gpus": 4, "engine": engine, "global_batch_size": 16, "seq_len": 1024}
    evaluator, _, fixed = every_layout(config, question)
    space = Space(fixed, limits_of({})[0], 8, evaluator.model.program.routed[1], 16, 8)
    for degrees in space.degrees(GPU, 4):
        group = evaluator.group(degrees)
        for _, layout, bound in evaluator.members(group):
            assert group.bound.nbytes <= bound.nbytes, layout
            assert group.bound.seconds <= bound.seconds * (1 + 1e-12), layout


def test_processes_find_the_same() -> None:
    alone, several = (memcalc.plan(SMALL, gpu=GPU, jobs=jobs, **QUESTIONS[0][1]) for jobs in (1, 2))
    assert [one.layout for one in alone.plans] == [one.layout for one in several.plans]


def test_ctrl_c_leaves_the_best_so_far() -> None:
    asked: list[int] = []

    def stop(done: int, _all: int) -> None:
        asked.append(done)
        if done >= 3:
            raise KeyboardInterrupt

    found = memcalc.plan(SMALL, gpu=GPU, progress=stop, **QUESTIONS[0][1])
    assert asked
    assert not found.complete
    assert not found.to_dict()["complete"]
    assert 0 < len(found.plans) <= 3


def test_the_front_has_no_plan_that_another_beats() -> None:
    found = memcalc.plan(SMALL, gpu=GPU, top=20, **QUESTIONS[0][1])
    front = [found.plans[i] for i in found.pareto]
    assert front[0] is found.plans[0]
    for one, other in pairwise(front):
        assert one.seconds <= other.seconds
        assert one.device > other.device


def test_a_model_that_fits_nowhere_says_by_how_much() -> None:
    found = memcalc.plan("llama-2-70b", gpu="rtx4090", gpus=2, global_batch_size=4, seq_len=1024, engine="megatron")
    assert not found.fits
    near = found.to_dict()["no_fit"]
    report = memcalc.estimate("llama-2-70b", global_batch_size=4, seq_len=1024, **near["options"])
    assert near["needs"] == report.peak + sum(item.nbytes for item in report.outside)
    assert near["over_by"] == near["needs"] - report.gpu.capacity  # type: ignore[union-attr]


@pytest.mark.parametrize("config", [SMALL, EXPERTS])
def test_a_layout_is_refused_if_its_estimate_is(config: dict[str, Any]) -> None:
    evaluator, layouts, fixed = every_layout(config, {"gpus": 8, "global_batch_size": 16, "seq_len": 1024})
    space = Space(fixed, limits_of({})[0], 8, evaluator.model.program.routed[1], 16, 8)
    lines = {}
    for degrees in space.degrees(GPU, 8):
        refusals = refusals_of(degrees, evaluator.refusal)
        own = {layout: refusals.line(layout) for layout in degrees.layouts()}
        assert refusals.refused() == Counter(filter(None, own.values()))
        assert refusals.valid() == len(degrees) - refusals.refused().total()
        lines |= own
    assert [*lines] == layouts
    for layout in layouts:
        line = ""
        try:
            resolve(evaluator.base._replace(**layout._asdict()), evaluator.model)
        except memcalc.InputError as error:
            line = str(error)
        assert bool(evaluator.refusal(layout)) == bool(lines[layout]) == bool(line), layout
