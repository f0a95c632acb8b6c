"""The order in which a replay asks for what is no tensor of a run: workspaces, states, DDP's buckets."""

from __future__ import annotations

from typing import Any

import pytest

import memcalc
from memcalc.device.allocator import Block, CachingAllocator
from memcalc.device.observer import Observer
from memcalc.device.replay import replayed
from memcalc.device.shown import Workspaces

DEEP = {"model_type": "llama", "num_hidden_layers": 40, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4,
        "vocab_size": 3200}  # fmt: skip


class Listing(CachingAllocator):
    """An allocator that lists the bytes of every request."""

    __slots__ = ("asked",)

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[int] = []

    def allocate(self, nbytes: int, stream: str) -> Block:
        self.asked.append(nbytes)
        return super().allocate(nbytes, stream)


FORWARD, BACKWARD = 3_000_001, 3_000_002
"""Bytes of workspaces that nothing else has."""


@pytest.mark.parametrize(
    ("model", "options", "first", "of_backward"),
    [
        (DEEP, {}, 16 * 64 * 2, 3200 * 64 * 2),  # a layer's queries, the head's gradient
        (DEEP, {"recompute": "full"}, 16 * 64 * 2, 3200 * 64 * 2),
        (DEEP, {"cross_entropy": "fused", "kernels": "fused"}, 16 * 64 * 2, 128 * 64 * 2),  # of the last layer's MLP
        ("gpt2", {}, 16 * 3 * 768 * 2, 50257 * 768 * 2),  # queries, keys and values at once
        (DEEP, {"engine": "fsdp2", "zero": 3, "gpus": 8, "precision": "bf16"}, 16 * 64 * 2, 3200 * 64 * 2),
        (DEEP, {"engine": "deepspeed", "zero": 2, "gpus": 8}, 16 * 64 * 2, 3200 * 64 * 2),
    ],
)
def test_a_workspace_comes_with_the_first_product_of_its_thread(
    model: Any, options: dict[str, Any], first: int, of_backward: int
) -> None:
    """cuBLAS asks for it when a product's result is allocated (CublasHandlePool.cpp)."""
    report = memcalc.estimate(
        model, **{"seq_len": 16, "precision": "bf16-mixed" if "zero" in options else "bf16"} | options
    )
    allocator = Listing()
    replayed(report.rank, report.setup, allocator, Workspaces((FORWARD,), (BACKWARD,)))
    assert allocator.asked.count(FORWARD) == allocator.asked.count(BACKWARD) == 1
    assert allocator.asked[allocator.asked.index(FORWARD) - 1] == first
    assert allocator.asked[allocator.asked.index(BACKWARD) - 1] == of_backward


def test_states_come_after_the_gradients_that_are_cast() -> None:
    """The optimizer makes its states in its own step."""
    report = memcalc.estimate(DEEP, seq_len=16, precision="bf16-mixed", optimizer="sgd-momentum")
    heard: list[str] = []

    class Heard(Observer):
        def rows_come(self, rows: Any) -> None:
            heard.extend({row.name.partition(": ")[2] for row in rows})

    report.record(CachingAllocator(), Heard())
    cast = next(i for i, name in enumerate(heard) if name.startswith("gradient cast"))
    assert cast < heard.index("momentum_buffer")
    assert heard.count("momentum_buffer") == 1


def test_the_buckets_of_ddp_are_made_anew_when_the_second_step_begins() -> None:
    report = memcalc.estimate(DEEP, seq_len=16, precision="bf16", engine="ddp", gpus=8)
    order = report.rank.order
    assert order is not None
    allocator = Listing()
    replayed(report.rank, report.setup, allocator, Workspaces((), ()))
    sizes = [[row.bytes_at(1, 16) for row in rows] for rows in (order.replaced, order.replacing())]
    assert sizes[0] != sizes[1]
    places = [next(i for i in range(len(allocator.asked)) if allocator.asked[i : i + len(own)] == own) for own in sizes]
    assert places[0] < allocator.asked.index(16 * 64 * 2) < places[1]
