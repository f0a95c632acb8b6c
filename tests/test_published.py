"""Published numbers, each to half of its last printed digit."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest
from published_runs import SIMUMAX_RUNS, PublishedRun

import memcalc
from memcalc.device.shown import MEGATRON_ERROR
from memcalc.units import GIB

GB = 10**9
STATES = ("parameters", "gradients", "optimizer_states")


def states(report: memcalc.Report) -> int:
    """Bytes of the model states."""
    return sum(report.total(component) for component in STATES)


def is_printed_as(value: int, unit: int, text: str) -> bool:
    """Whether `value` in `unit` is within half of the last digit of `text`."""
    printed = Decimal(text)
    half = Decimal(1).scaleb(int(printed.as_tuple().exponent)) / 2
    return abs(Decimal(value) / unit - printed) <= half


def test_half_of_the_last_digit() -> None:
    assert is_printed_as(1_875_000_000, GB, "1.88")
    assert not is_printed_as(1_874_000_000, GB, "1.88")
    assert is_printed_as(120_400_000_000, GB, "120")
    assert not is_printed_as(120_600_000_000, GB, "120")


# --- ZeRO (Rajbhandari et al. 2020, arXiv 1910.02054), table 1: GB of model states for stages 1, 2 and 3

ZERO: list[tuple[str, int, tuple[str, str, str]]] = [
    ("7.5B", 1, ("120", "120", "120")),
    ("7.5B", 4, ("52.5", "41.3", "30")),
    ("7.5B", 16, ("35.6", "21.6", "7.5")),
    ("7.5B", 64, ("31.4", "16.6", "1.88")),
    ("7.5B", 256, ("30.4", "15.4", "0.47")),
    ("7.5B", 1024, ("30.1", "15.1", "0.12")),
    ("128B", 64, ("536", "284", "32")),
    ("1T", 1024, ("4011", "2013", "15.6")),
]
CUT = {"4011", "2013"}
"""Digits that the table cuts instead of rounding: 4 000 + 12 000/1024 is 4011.7, 2 000 + 14 000/1024 is 2013.7."""


@pytest.mark.parametrize(("params", "gpus", "printed"), ZERO)
def test_zero_paper(params: str, gpus: int, printed: tuple[str, str, str]) -> None:
    for zero, text in enumerate(printed, start=1):
        size = states(memcalc.estimate(params=params, gpus=gpus, zero=zero))
        if text in CUT:
            assert size // GB == int(text)
        else:
            assert is_printed_as(size, GB, text)


@pytest.mark.parametrize(("params", "gigabytes"), [("7.5B", "120"), ("7B", "112"), ("1.5B", "24"), ("1T", "16000")])
def test_sixteen_bytes_per_parameter(params: str, gigabytes: str) -> None:
    assert is_printed_as(states(memcalc.estimate(params=params)), GB, gigabytes)


# --- what interviews ask


def test_seven_billion_by_component() -> None:
    report = memcalc.estimate(params="7B")
    assert [report.total(component) // GB for component in STATES] == [14, 14, 84]


@pytest.mark.parametrize("gpus", [2, 8, 64, 1000])
def test_zero_formulas(gpus: int) -> None:
    count = 64 * 10**6
    by_stage = [states(memcalc.estimate(params=count, gpus=gpus, zero=zero, engine="deepspeed")) for zero in range(4)]
    assert by_stage == [
        16 * count,
        4 * count + 12 * count // gpus,
        2 * count + 14 * count // gpus,
        16 * count // gpus,
    ]


@pytest.mark.parametrize(
    ("precision", "each"),
    [
        ("fp32", {"parameters": 4, "gradients": 4, "optimizer_states": 8, "buffers": 4}),
        ("fp16-mixed", {"parameters": 2, "gradients": 2, "optimizer_states": 12, "buffers": 2}),
    ],
)
def test_ddp_with_its_buckets(precision: str, each: dict[str, int]) -> None:
    """20 bytes a parameter in fp32, 18 with 16-bit weights and an fp32 master."""
    report = memcalc.estimate(params="1B", gpus=8, precision=precision)
    assert report.setup.engine == "ddp"
    assert {component: report.total(component) // GB for component in each} == each
    assert report.peak == sum(each.values()) * GB


# --- the contract's table of bytes per parameter


@pytest.mark.parametrize(
    ("precision", "bytes_each"),
    [
        ("bf16-mixed", (2, 2, 12)),
        ("fp16-mixed", (2, 2, 12)),
        ("fp32", (4, 4, 8)),
        ("bf16", (2, 2, 4)),
        ("fp16", (2, 2, 4)),
        ("bf16-autocast", (4, 4, 8)),
        ("fp16-autocast", (4, 4, 8)),
    ],
)
def test_precisions_of_a_bare_count(precision: str, bytes_each: tuple[int, int, int]) -> None:
    report = memcalc.estimate(params="1B", precision=precision)
    assert tuple(report.total(component) // GB for component in STATES) == bytes_each
    assert report.peak == sum(bytes_each) * GB


@pytest.mark.parametrize(
    ("options", "bytes_each"),
    [
        ({}, (2, 2, 12)),
        ({"precision": "fp16-mixed"}, (2, 2, 12)),
        ({"precision": "fp32"}, (4, 4, 8)),
        ({"precision": "bf16"}, (2, 2, 4)),
        ({"precision": "bf16-autocast"}, (4, 4, 8)),
        ({"gpus": 8}, (2, 2, 12)),
        ({"gpus": 8, "precision": "fp32"}, (4, 4, 8)),
        ({"gpus": 8, "precision": "fp16-autocast"}, (4, 4, 8)),
        ({"gpus": 8, "precision": "fp16"}, (2, 2, 4)),
        ({"gpus": 8, "engine": "deepspeed"}, (2, 2, 12)),
        ({"gpus": 8, "engine": "deepspeed", "precision": "fp16-mixed"}, (2, 2, 12)),
    ],
)
def test_precisions_of_a_model(options: dict[str, Any], bytes_each: tuple[int, int, int]) -> None:
    model = memcalc.load_model("llama-7b")
    report = memcalc.estimate(model, **options)
    for component, each in zip(STATES, bytes_each, strict=True):
        assert report.total(component) == each * model.num_parameters, component


@pytest.mark.parametrize(("precision", "itemsize"), [("bf16-mixed", 2), ("fp32", 4), ("bf16-autocast", 4)])
def test_ddp_buckets_of_a_model(precision: str, itemsize: int) -> None:
    model = memcalc.load_model("llama-7b")
    alone, many = (memcalc.estimate(model, gpus=gpus, precision=precision) for gpus in (1, 8))
    assert many.total("buffers") - alone.total("buffers") == itemsize * model.num_parameters


@pytest.mark.parametrize(("zero", "share"), [(1, (8, 8, 1)), (3, (1, 1, 1))])
def test_deepspeed_shards_of_a_model(zero: int, share: tuple[int, int, int]) -> None:
    """Every weight of llama-7b divides by 8, so nothing is padded. Eighths of 2, 2 and 12 bytes a parameter."""
    model = memcalc.load_model("llama-7b")
    report = memcalc.estimate(model, gpus=8, zero=zero)
    for component, eighths, each in zip(STATES, share, (2, 2, 12), strict=True):
        if zero == 1 and component == "gradients":
            assert report.total(component) >= each * model.num_parameters // 8  # the engine's own, tests/engines
            continue
        assert report.total(component) == each * model.num_parameters * eighths // 8, component


# --- AICB (aliyun/aicb), its workload of Llama-7B under ZeRO-3: bytes gathered in each pass, and reduce-scattered


@pytest.mark.parametrize("gpus", [8, 64, 1024])
def test_aicb_llama_7b(gpus: int) -> None:
    """AICB's workload gathers every parameter before each use: nothing is kept, nothing is gathered ahead."""
    nothing_kept = {"param_persistence_threshold": 0, "max_live_parameters": 0, "max_reuse_distance": 0}
    report = memcalc.estimate("llama-7b", gpus=gpus, zero=3, **nothing_kept)
    payloads = {(c.collective, c.phase): c.payload for c in report.collectives if c.phase != "step"}
    assert payloads == {
        ("all_gather", "forward"): 13_476_831_232,
        ("all_gather", "backward"): 13_476_831_232,
        ("reduce_scatter", "backward"): 13_476_831_232,
    }


# --- Narayanan et al. 2021 (arXiv 2104.04473), table 1: V 51200, s 2048

GPTS = [
    ("1.7", 2304, 24),
    ("3.6", 3072, 30),
    ("7.5", 4096, 36),
    ("18.4", 6144, 40),
    ("39.1", 8192, 48),
    ("145.6", 12288, 80),
    ("1008.0", 25600, 128),
]


@pytest.mark.parametrize(("billions", "hidden", "layers"), GPTS)
def test_narayanan(billions: str, hidden: int, layers: int) -> None:
    model = memcalc.load_model({
        "model_type": "gpt2", "n_embd": hidden, "n_layer": layers, "n_head": 16, "vocab_size": 51200,
        "n_positions": 2048, "tie_word_embeddings": True,
    })  # fmt: skip
    assert is_printed_as(model.num_parameters, GB, billions)
    final_norm = 2 * hidden
    assert model.num_parameters - final_norm == layers * (12 * hidden**2 + 13 * hidden) + (51200 + 2048) * hidden


# --- measured elsewhere


@pytest.mark.parametrize("run", SIMUMAX_RUNS, ids=lambda run: run.name)
def test_measured_elsewhere(run: PublishedRun) -> None:
    """Reserved memory is too low by what NCCL's streams hold, but always nearer than without fragmentation."""
    report = run.estimate()
    assert report.allocated / GIB == pytest.approx(run.allocated, rel=0.001)
    assert run.reserved is not None
    assert -MEGATRON_ERROR / 100 < report.reserved / GIB / run.reserved - 1 < 0
    assert report.reserved > report.allocated
    assert report.fits, "it ran"
