"""A step on a grid, byte by byte and call by call, as Colossal-AI's own layers have run it."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
from colossalai_oracle import CASES, MEASURED, SMALL, SOURCES, measure

import memcalc

FACTS: dict[str, Any] = json.loads(MEASURED.read_text())
each = pytest.mark.parametrize("name", CASES)


def report_of(
    dims: str, ranks: int, b: int, s: int, depth: int | None = None, dtype: str = "fp32", **sizes: Any
) -> Any:
    options: dict[str, Any] = {"tp_depth": depth} if depth is not None else {}
    return memcalc.estimate(
        {"model_type": "gpt2", **SMALL, **sizes}, engine="colossalai", gpus=ranks, tp=ranks, tp_dims=dims, micro_batch_size=b,
        seq_len=s, precision=dtype, optimizer="sgd", **options,
    )  # fmt: skip


def numbers(name: str) -> dict[str, int]:
    """What the layers add to the weights, the batch and the last loss."""
    case = CASES[name]
    memory = report_of(**case).to_dict()["memory"]
    batch, loss = 8 * case["b"] * case["s"], {"fp32": 4, "bf16": 2}[case.get("dtype", "fp32")]
    below = memory["parameters"] + batch
    phases = memory["phases"]
    forward, backward = phases["forward"] - below - loss, phases["backward"] - below
    return {"saved": memory["saved_activations"], "forward": forward, "backward": backward}


@each
def test_saved_bytes_and_peaks(name: str) -> None:
    assert numbers(name) == {of: FACTS[name][of] for of in ("saved", "forward", "backward")}


@each
def test_shapes_of_weights(name: str) -> None:
    report = report_of(**CASES[name])
    program = report.rank.profiles[0].run
    found = Counter(tuple(d.size for d in row.shape) for row in program.rows if row.component == "parameters")
    real = Counter(map(tuple, FACTS[name]["weights"]))
    assert set(found) == set(real)
    assert report.to_dict()["memory"]["parameters"] == sum(
        report.setup.compute_dtype.itemsize * _elements(shape) * n for shape, n in real.items()
    )


def _elements(shape: tuple[int, ...]) -> int:
    out = 1
    for size in shape:
        out *= size
    return out


@each
def test_calls_of_collectives(name: str) -> None:
    found: Counter[tuple[str, int, int]] = Counter()
    for item in report_of(**CASES[name]).to_dict()["communication"]["items"]:
        if item["name"] == "gradients, along the depth":  # the caller's, not the layers'
            continue
        found[item["collective"], item["group_size"], item["payload"] // item["calls"]] += item["calls"]
    assert found == Counter({(kind, ranks, payload): n for kind, ranks, payload, n in FACTS[name]["calls"]})


@pytest.mark.skipif(SOURCES is None, reason="COLOSSALAI_SOURCES names no folder with the unpacked sources")
@each
def test_the_real_layers_still_do_that(name: str) -> None:
    assert json.loads(json.dumps(measure(**CASES[name]))) == FACTS[name]
