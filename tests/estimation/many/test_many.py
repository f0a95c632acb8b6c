"""`memcalc.many` against `memcalc.estimate`, setup by setup: every number is equal, and what is refused has its line."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from records import examples
from traces import BLOOM, traced

import memcalc
from memcalc.core.unknowns import Undecided
from memcalc.estimation.many import answers, polynomials, question
from memcalc.estimation.many.answers import AXES
from memcalc.hardware.cost import Cost

Options = dict[str, Any]

BATCHES, STEPS = (1, 2, 3, 5, 8), (1, 2, 3, 4, 7, 24)
LENGTHS = (1, 2, 31, 512, 1000, 1026, 2048, 4095, 4096, 4097, 8192)
"""Two of them are on either side of a sliding window; 1 and odd ones go other ways in some kernels."""


def mixed(count: int, seed: int, gpus: tuple[int, ...], shared: int = 1) -> Options:
    """So many setups, drawn from all combinations; `shared`: ranks of a model."""
    random = np.random.default_rng(seed)
    ranks, batch = random.choice(gpus, count), random.choice(BATCHES, count)
    step = np.maximum(ranks // shared, 1) * batch * random.choice(STEPS, count)
    step[::9] += 1  # mostly no multiple
    return {
        "gpus": ranks,
        "micro_batch_size": batch,
        "seq_len": random.choice(LENGTHS, count),
        "global_batch_size": step,
    }


def estimated(model: memcalc.Model, options: Options) -> dict[str, Any] | str:
    """The numbers of one setup, or the line of its refusal."""
    try:
        report = memcalc.estimate(model, **options)
        phases = dict(report.phases)
    except memcalc.InputError as error:
        return str(error)
    out: dict[str, Any] = {**phases, "peak": report.peak, "rank": report.rank.number}
    out["least"] = report.peak + report.workspaces.total
    for axis in AXES:
        own = [c for c in report.collectives if c.axis == axis]
        out[f"payload {axis}"], out[f"wire {axis}"] = sum(c.payload for c in own), sum(c.wire for c in own)
        costs = [cost for c, cost in zip(report.collectives, report.costs, strict=False) if c.axis == axis]
        if report.gpu is not None:
            out[f"seconds {axis}"] = sum(cost.seconds if isinstance(cost, Cost) else np.nan for cost in costs)
    return out


def answered(found: memcalc.Many, place: tuple[int, ...]) -> dict[str, Any] | str:
    """The same of an answer."""
    if found.refused[place]:
        return found.line(*place)
    out: dict[str, Any] = {phase: int(sizes[place]) for phase, sizes in found.phases.items()}
    out |= {"peak": int(found.peak[place]), "rank": int(found.rank[place]), "least": int(found.least_allocated[place])}
    for axis in AXES:
        out[f"payload {axis}"], out[f"wire {axis}"] = int(found.payload[axis][place]), int(found.wire[axis][place])
        if found.seconds is not None:
            out[f"seconds {axis}"] = float(found.seconds[axis][place])
    return out


def check(model: memcalc.Model, found: memcalc.Many) -> int:
    """That every setup has the numbers of its estimate; how many are not refused."""
    for place in np.ndindex(found.refused.shape):
        options = found.options(*place)
        np.testing.assert_equal(answered(found, place), estimated(model, options), err_msg=str(options))
    return int((~found.refused).sum())


ENGINES: tuple[tuple[str, Options, tuple[int, ...], int], ...] = (
    ("none", {"engine": "none"}, (1, 2), 1),
    ("ddp", {"engine": "ddp", "gpu": "a100-80gb"}, (1, 2, 8, 12), 1),
    ("ddp synced", {"engine": "ddp", "sync_each_micro_batch": True}, (2, 16), 1),
    *((f"zero {z}", {"engine": "deepspeed", "zero": z, "gpu": "h100-80gb"}, (2, 6, 16), 1) for z in (0, 1, 2, 3)),
    ("zero 3 cp", {"engine": "deepspeed", "zero": 3, "cp": 2, "recompute": "full"}, (4, 16), 2),
    ("zero 1 tp", {"engine": "deepspeed", "zero": 1, "tp": 2}, (2, 8), 2),
    *((f"fsdp2 {z}", {"engine": "fsdp2", "zero": z, "gpu": "rtx4090"}, (2, 6, 16), 1) for z in (2, 3)),
    ("fsdp2 synced", {"engine": "fsdp2", "sync_each_micro_batch": True, "recompute": "op"}, (8, 16), 1),
    ("fsdp2 hybrid", {"engine": "fsdp2", "shard_group": 4, "gpu": "h100-80gb", "gpus_per_node": 4}, (4, 6, 16), 1),
    ("fsdp2 tp", {"engine": "fsdp2", "tp": 2, "sequence_parallel": True}, (4, 8), 2),
    ("fsdp2 cp", {"engine": "fsdp2", "cp": 2}, (4, 8), 2),
    ("megatron", {"engine": "megatron", "tp": 2, "zero": 1, "gpu": "h100-80gb"}, (2, 3, 8, 16), 2),
    ("megatron eager", {"engine": "megatron", "tp": 2, "attention": "eager"}, (2, 8), 2),
    ("megatron unfused", {"engine": "megatron", "tp": 2, "attention": "unfused", "recompute": "selective"}, (2, 8), 2),
    ("megatron pp", {"engine": "megatron", "pp": 4, "gpu": "h100-80gb", "recompute": "full"}, (4, 8, 16), 4),
    ("megatron interleaved", {"engine": "megatron", "pp": 2, "schedule": "interleaved", "virtual_stages": 2}, (8,), 2),
    ("megatron gpipe", {"engine": "megatron", "pp": 2, "schedule": "gpipe", "cp": 2}, (8,), 4),
    ("recompute", {"recompute": "full", "precision": "bf16-autocast"}, (1, 8), 1),
    ("chunked loss", {"cross_entropy": "chunked", "optimizer": "lion"}, (1, 8), 1),
    ("padded", {"padded": True, "attention": "eager", "precision": "fp32"}, (1, 4), 1),
)


@pytest.mark.parametrize(("name", "options", "gpus", "shared"), ENGINES, ids=[one[0] for one in ENGINES])
def test_every_engine(name: str, options: Options, gpus: tuple[int, ...], shared: int) -> None:
    model = memcalc.load_model("llama-3.1-8b")
    count = examples(40)
    assert check(model, memcalc.many(model, **mixed(count, len(name), gpus, shared), **options)) > count // 5


MODELS: tuple[tuple[str, Options], ...] = (
    ("mistral-7b-v0.1", {"engine": "fsdp2"}),  # a window of 4096 tokens
    ("mistral-7b-v0.1", {"engine": "megatron", "zero": 1}),
    ("gemma-2-2b", {"engine": "deepspeed", "zero": 2}),
    ("mixtral-8x7b", {"engine": "deepspeed", "zero": 2, "ep": 2}),  # the padding of experts' rows goes by the tokens
    ("mixtral-8x7b", {"engine": "fsdp2", "tp": 2, "ep": 2, "kernels": "hf"}),
    ("deepseek-v2-lite", {"engine": "megatron", "ep": 2}),  # tables that grow with the sequence
    ("mamba-130m", {"engine": "ddp"}),  # a loop over tokens
    ("gpt2", {"engine": "deepspeed", "zero": 1}),  # 1024 positions
    ("t5-small", {"engine": "deepspeed", "zero": 3}),
    ("gpt-oss-20b", {"engine": "none"}),
)


@pytest.mark.parametrize(("name", "options"), MODELS)
def test_models(name: str, options: Options) -> None:
    model = memcalc.load_model(name)
    gpus = (1,) if options["engine"] == "none" else (4, 12)
    count = examples(30)
    assert check(model, memcalc.many(model, **mixed(count, 1, gpus, options.get("tp", 1)), **options)) > count // 6


PIPELINES: tuple[Options, ...] = (
    {"engine": "fsdp2", "pp": 2},
    {"engine": "fsdp2", "pp": 2, "schedule": "gpipe"},
    {"engine": "deepspeed", "pp": 2, "zero": 1},
)


@pytest.mark.parametrize("options", PIPELINES)
def test_pipelines_whose_runs_are_of_all_micro_batches(options: Options) -> None:
    model = memcalc.load_model("llama-7b")
    numbers = {"micro_batch_size": [[1], [3]], "seq_len": [[512], [1000]], "global_batch_size": [6, 12, 24, 25]}
    assert check(model, memcalc.many(model, gpus=4, **numbers, **options)) > 3


def test_sizes_that_are_no_polynomials() -> None:
    model = memcalc.load_model("mixtral-8x7b")
    options: Options = {"gpus": 4, "engine": "megatron", "ep": 2, "expert_imbalance": 1.5}
    assert check(model, memcalc.many(model, micro_batch_size=[[1], [2], [3]], seq_len=[64, 100], **options)) == 6


@pytest.mark.slow
def test_a_traced_model() -> None:
    """Its sizes are those of a batch and a sequence; an engine that sees no gradient has its bucket at some of its moments."""
    model = traced(BLOOM)
    options: Options = {"gpus": 4, "engine": "deepspeed", "zero": 2, "reduce_bucket_size": 3000}
    assert check(model, memcalc.many(model, micro_batch_size=[[1], [2]], seq_len=[16, 24], **options)) == 4


def test_a_model_without_sequences() -> None:
    model = memcalc.load_model("resnet-50")
    found = memcalc.many(model, micro_batch_size=[1, 2, 64], gpus=[[1], [8]])
    assert check(model, found) == 6
    assert found.line(1, 2) == ""


def test_layouts_in_arrays() -> None:
    """Every whole number may be an array: what is no number of a polynomial makes groups."""
    model = memcalc.load_model("llama-7b")
    found = memcalc.many(
        model, gpus=8, zero=[0, 1, 2, 3, 4], micro_batch_size=[[1], [2]], tp=[[[1]], [[2]]], pp_rank=[0]
    )
    assert found.refused.shape == (2, 2, 5)
    assert check(model, found) > 5


@pytest.mark.parametrize(
    "options",
    [
        {"engine": "fsdp2", "zero": 1},
        {"engine": "megatron", "tp": 3},
        {"engine": "megatron", "pp": 2, "schedule": "interleaved", "virtual_stages": 2},
        {"engine": "fsdp2", "pp": 2},
        {"engine": "megatron", "tp": 2, "attention": "eager"},
    ],
)
def test_where_most_are_refused_the_others_are_found(options: Options) -> None:
    model = memcalc.load_model("llama-7b")
    numbers = {
        "micro_batch_size": [[[1]], [[4]]],
        "seq_len": [[8192], [1001], [16], [512]],
        "global_batch_size": [20, 24, 32],
    }
    found = memcalc.many(model, gpus=8, **numbers, **options)
    assert found.refused.any()
    check(model, found)


def test_what_is_refused_fits_nowhere() -> None:
    found = memcalc.many("llama-7b", gpus=[1, 8], zero=3, gpu="h100-80gb")
    assert found.refused.tolist() == [True, False]
    assert (found.peak < 10**12).tolist() == (found.least_allocated < 10**12).tolist() == [False, True]
    assert (
        (sum(found.wire.values()) < 10**12).tolist() == (sum(found.payload.values()) < 10**12).tolist() == [False, True]
    )
    assert found.seconds is not None
    assert [bool(np.isnan(axis[0])) for axis in found.seconds.values()] == [True] * 5
    assert found.rank.tolist() == [-1, 0]


def test_a_layout_that_is_refused_whatever_the_numbers_costs_a_look(monkeypatch: pytest.MonkeyPatch) -> None:
    resolved = list[int]()
    resolve = question.resolve

    def counted(*given: Any) -> Any:
        resolved.append(1)
        return resolve(*given)

    monkeypatch.setattr(question, "resolve", counted)
    found = memcalc.many("llama-7b", engine="fsdp2", zero=1, **mixed(200, 4, (8,)))
    assert found.refused.all()
    assert len(resolved) == 2


def test_a_single_setup_is_an_array_of_no_dims() -> None:
    model = memcalc.load_model("llama-7b")
    found = memcalc.many(model, gpus=8, seq_len=512)
    assert found.peak.shape == ()
    assert found.seconds is None
    assert check(model, found) == 1
    assert memcalc.many(model, gpus=[]).peak.shape == (0,)


def test_numbers_that_64_bits_have_no_room_for() -> None:
    """They are refused with a line of their own, and the others are exact."""
    model = memcalc.load_model("llama-7b")
    found = memcalc.many(
        model, attention="eager", seq_len=[10**8, 3 * 10**7, 10**7, 512], micro_batch_size=[10**7, 1, 1, 2]
    )
    assert found.refused.tolist() == [True, False, False, False]
    assert "63 bits" in found.line(0)
    assert [int(n) for n in found.peak[1:]] == [
        memcalc.estimate(model, **found.options(place)).peak for place in (1, 2, 3)
    ]
    assert found.peak.max() > 2**62


def test_what_stays_open_is_asked_for_fewer_setups(monkeypatch: pytest.MonkeyPatch) -> None:
    """A collective that loops over micro-batches, or that looks at the tokens: down to one setup at a time if need be."""
    model = memcalc.load_model("llama-7b")
    with_numbers, asked = answers._with_numbers, list[Any]()

    def looking(setup: Any, *numbers: Any) -> Any:
        asked.append(numbers)
        assert len(range(numbers[2])) or numbers[1] % 7 == numbers[0] % 5
        return with_numbers(setup, *numbers)

    monkeypatch.setattr(answers, "_with_numbers", looking)
    found = memcalc.many(model, **mixed(30, 2, (8,)), engine="ddp")
    monkeypatch.undo()
    assert check(model, found) > 10
    assert len(asked) > 6
    with pytest.raises(Undecided):
        range(polynomials.unknown(2, (1, 1, 3)))


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"seq_len": [1, 2.5]}, "--seq-len [1, 2.5]: allowed: an array of whole numbers"),
        (
            {"seq_len": [[1], [2, 3]]},
            "--seq-len [[1], [2, 3]]: rows have different lengths; allowed: an array of whole numbers",
        ),
        ({"seq_len": [2**70]}, f"--seq-len [{2**70}]: allowed: an array of whole numbers"),
        ({"seq_len": [True]}, "--seq-len [True]: allowed: an array of whole numbers"),
        ({"engine": ["ddp"]}, "--engine ['ddp']: allowed: one value; arrays are for options that are whole numbers"),
        (
            {"gpus": [1, 2], "seq_len": [1, 2, 3]},
            "--gpus (2,), --seq-len (3,): arrays of these shapes cannot be combined",
        ),
        ({"seq_length": [1]}, "--seq-length: unknown option; did you mean --seq-len, --lengths?"),
        (
            {"engine": "dpd"},
            "--engine dpd: allowed: none, ddp, fsdp2, deepspeed, megatron, fsdp1, data-parallel, parameter-server, "
            "colossalai (did you mean ddp?)",
        ),
    ],
)
def test_what_no_array_could_change_is_an_error(options: Options, line: str) -> None:
    with pytest.raises(memcalc.InputError) as error:
        memcalc.many("llama-7b", **options)
    assert str(error.value) == line
