"""Costs are sums of their items, and follow from the time, the GPUs and the price."""

from __future__ import annotations

from typing import Any

import pytest

import memcalc
from memcalc.decisions.cost import check_price, cost_document, cost_of
from memcalc.errors import InputError


@pytest.mark.parametrize("price", [0.37, 2.0, 98.5])
@pytest.mark.parametrize("gpus", [8, 64])
def test_a_step_costs_what_its_parts_cost(price: float, gpus: int) -> None:
    report = memcalc.estimate("llama-7b", gpus=gpus, zero=3, gpu="h100-80gb", micro_batch_size=2)
    document = report.to_dict()["time"]
    cost = cost_of(report, price)
    assert cost is not None
    written = cost_document(cost)
    assert written is not None
    assert written["per_step"] == pytest.approx(sum(item["cost"] for item in written["items"]), rel=1e-12)
    assert written["gpu_hours_per_step"] == pytest.approx(sum(item["gpu_hours"] for item in written["items"]))
    assert written["per_step"] == pytest.approx(document["seconds_per_step"] / 3600 * gpus * price)
    assert [item["name"] for item in written["items"]] == list(document["breakdown"])
    per_token = written["per_step"] / (gpus * 2 * 2048)
    assert written["per_billion_tokens"] == pytest.approx(1e9 * per_token)


def test_there_is_no_cost_without_a_time_or_tokens() -> None:
    assert cost_of(memcalc.estimate("gpt2", gpu="80GB"), 1.0) is None
    assert cost_of(memcalc.estimate(params="7B", gpu="h100-80gb"), 1.0) is None
    assert cost_document(None) is None
    images = cost_of(memcalc.estimate("resnet-50", gpu="h100-80gb"), 1.0)
    assert images is not None and images.per_step > 0 and images.per_billion_tokens is None


@pytest.mark.parametrize("price", [0, -1, "2", True, float("nan"), float("inf"), None, 10**7])
def test_what_is_no_price(price: Any) -> None:
    with pytest.raises(InputError, match=r"^--price .*allowed: a number above 0"):
        check_price(price)


def test_prices() -> None:
    assert check_price(2) == 2.0
