"""Copies between GPU and host in the time of a step, with weights on the host."""

from __future__ import annotations

from typing import Any

import pytest

import memcalc
from memcalc.engines.transfers import transfers
from memcalc.report.notes import notes
from memcalc.timing.host_link import copies, link_rate
from memcalc.timing.kernels import Unknown
from memcalc.timing.step import StepTime

ZERO_3: dict[str, Any] = {"engine": "deepspeed", "gpus": 8, "zero": 3, "offload_params": "cpu"}


def test_copies_take_their_bytes_over_one_direction_of_the_data_sheets_link() -> None:
    """PCIe 4.0 x16 of an A100: 64 GB/s both ways."""
    report = memcalc.estimate("gpt2", gpu="a100-80gb", **ZERO_3)
    time = report.time
    assert isinstance(time, StepTime)
    moved = sum(one.nbytes for one in transfers(report.model, report.setup, report.rank))
    items = [item for item in time.items if item.name.startswith("host link")]
    assert sum(item.seconds for item in items) == pytest.approx(moved / 32e9)
    assert {item.hidden for item in items} == {0.0}
    assert sum(time.breakdown.values()) == pytest.approx(time.seconds)


def test_weights_on_the_host_take_longer_by_the_copies() -> None:
    """The update makes no 16-bit weights on the GPU: the host casts them."""
    there, here = (
        memcalc.estimate("gpt2", gpu="a100-80gb", **ZERO_3 | {"offload_params": where}) for where in ("cpu", "none")
    )
    items = copies(there)
    assert not isinstance(items, Unknown)
    assert copies(here) == []
    assert isinstance(there.time, StepTime)
    assert isinstance(here.time, StepTime)
    cast = sum(item.seconds for item in here.time.items if item.name.startswith("16-bit weights"))
    copied = sum(item.seconds for item in items)
    assert there.time.seconds - here.time.seconds == pytest.approx(copied - cast)


@pytest.mark.parametrize(
    "options", [ZERO_3 | {"offload_optimizer": "cpu"}, {"engine": "fsdp2", "gpus": 8, "offload_params": "cpu"}]
)
def test_an_update_on_the_host_has_no_known_time(options: dict[str, Any]) -> None:
    report = memcalc.estimate("gpt2", gpu="a100-80gb", **options)
    assert isinstance(report.time, Unknown)
    assert "the optimizer runs on the host" in report.time.missing
    assert any(note.startswith("host link: each rank copies") and "at least" in note for note in notes(report))


def test_a_link_that_is_not_known() -> None:
    report = memcalc.estimate("gpt2", gpu="b200", **ZERO_3)
    assert report.gpu is not None
    assert isinstance(link_rate(report.gpu), Unknown)
    assert isinstance(report.time, Unknown)
    assert "to its host is not known" in report.time.missing
