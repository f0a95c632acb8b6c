"""The range of a step's time: five published runs or more, of the kinds that are nearest."""

from __future__ import annotations

import pytest

import memcalc
from memcalc.inputs.files import read_bundled
from memcalc.inputs.gpu import named_gpu
from memcalc.timing.ranges import FILE, range_of

KINDS = read_bundled(FILE)["kinds"]


def runs_in(low: float, high: float, **where: object) -> int:
    """The published runs of the kinds that a range holds."""
    kinds = [kind for kind in KINDS if where.items() <= kind.items()]
    return sum(kind["rows"] for kind in kinds if low <= kind["low"] and kind["high"] <= high)


@pytest.mark.parametrize("engine", ["megatron", "fsdp2"])
@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize("gpu", ["h100-80gb", "a100-80gb", "b200", "rtx4090", "v100-32gb"])
@pytest.mark.parametrize("precision", ["bf16-mixed", "fp32"])
def test_a_range_holds_five_runs(engine: str, pp: int, gpu: str, precision: str) -> None:
    setup = memcalc.estimate("gpt2").setup._replace(engine=engine, pp=pp, precision=precision)
    low, high, *_ = range_of(setup, named_gpu(gpu))
    assert runs_in(low, high) >= 5
    assert low <= 1 <= high


def test_one_run_of_a_kind_is_no_range() -> None:
    """Megatron's pipeline on Hopper has one published run: its range is that of all runs on Hopper, of which FSDP2 has most."""
    assert [kind["rows"] for kind in KINDS if (kind["architecture"], kind["pipeline"]) == ("hopper", True)] == [1]
    report = memcalc.estimate("gpt2", gpus=8, pp=2, engine="megatron", gpu="h100-80gb")
    assert report.gpu is not None
    found = range_of(report.setup, report.gpu)
    hopper = [kind for kind in KINDS if kind["architecture"] == "hopper"]
    assert (found.low, found.high) == (min(kind["low"] for kind in hopper), max(kind["high"] for kind in hopper))
    assert found.low < 1
    assert found.runs == 0


def test_products_in_fp8_have_no_published_run() -> None:
    setup = memcalc.estimate("gpt2").setup
    in_16_bits, in_fp8 = (
        range_of(setup._replace(fp8_recipe=one), named_gpu("h100-80gb")) for one in (None, "tensorwise")
    )
    assert in_fp8.runs == 0
    assert in_fp8.low <= in_16_bits.low <= in_16_bits.high <= in_fp8.high
