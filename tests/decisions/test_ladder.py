"""A rung is the estimate of its setup, and the rungs follow each other."""

from __future__ import annotations

import io
import json
from functools import cache
from typing import Any

import pytest
from command import check_refused, here

import memcalc
from memcalc.decisions.ladder import Ladder, ladder
from memcalc.decisions.ladder_lines import print_ladder
from memcalc.errors import InputError
from memcalc.timing.kernels import Unknown

climbed = cache(ladder)
CASES: list[dict[str, Any]] = [
    {"model": "llama-7b", "gpus": 8, "gpu": "a100-40gb"},
    {"model": "gpt2", "gpu": "t4", "precision": "fp16-mixed"},
    {"model": "llama-7b", "gpus": 4, "zero": 1, "gpu": "h100-80gb", "global_batch_size": 16},
    {"model": "qwen3-0.6b", "gpu": "rtx4090", "lora_rank": 8, "engine": "none"},
]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case["model"])
def test_a_rung_is_the_estimate_of_its_setup(case: dict[str, Any]) -> None:
    found = climbed(**case)
    before = memcalc.estimate(**case)
    for rung in found.rungs:
        if rung.report is None:
            with pytest.raises(InputError) as refused:
                memcalc.estimate(**case | rung.flags)
            assert str(refused.value) == rung.error
            continue
        own = memcalc.estimate(**case | rung.flags)
        document = rung.to_dict()
        assert document["memory"] == own.to_dict()["memory"]
        assert document["fit"] == own.to_dict()["fit"]
        assert own.device is not None and before.device is not None
        of = rung.saves_of
        assert rung.saves == (getattr(before, of) - getattr(own, of) if rung.adds else None)
        first = found.rungs[0].report
        assert first is not None
        if rung.takes is not None:
            assert not isinstance(own.time, Unknown) and not isinstance(first.time, Unknown)
            assert rung.takes == own.time.seconds / first.time.seconds
        before = own


def names(found: Ladder) -> list[str]:
    return [" ".join(f"{name}={value}" for name, value in rung.adds.items()) for rung in found.rungs]


def test_the_order_is_that_of_the_guides() -> None:
    assert names(climbed(model="gpt2", gpus=8, gpu="t4")) == [
        "", "recompute=full", "zero=2", "offload_optimizer=cpu", "zero=3", "offload_params=cpu", "offload_optimizer=nvme",
        "offload_params=nvme",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("given", "left_out"),
    [
        ({"zero": 3}, {"zero=2", "zero=3"}),
        ({"zero": 2, "recompute": "full"}, {"zero=2", "recompute=full"}),
        ({"zero": 3, "offload_optimizer": "cpu"}, {"zero=2", "zero=3", "offload_optimizer=cpu"}),
    ],
)
def test_a_rung_that_is_given_is_left_out(given: dict[str, Any], left_out: set[str]) -> None:
    usual = names(climbed(model="gpt2", gpus=8, gpu="t4"))
    assert names(ladder("gpt2", gpus=8, gpu="t4", **given)) == [name for name in usual if name not in left_out]


def test_deepspeed_is_named_where_another_engine_would_run() -> None:
    assert "engine=deepspeed zero=2" in names(ladder("gpt2", gpu="t4"))
    assert "engine=deepspeed zero=2" in names(ladder("gpt2", gpus=2, engine="ddp", gpu="t4"))
    assert "engine=deepspeed zero=2" not in names(ladder("gpt2", gpus=2, engine="deepspeed", gpu="t4"))


def test_the_lowest_rung_that_fits() -> None:
    found = climbed(model="llama-7b", gpus=8, gpu="a100-40gb")
    fits = [rung.report is not None and rung.report.fits is True for rung in found.rungs]
    assert found.first_fit == fits.index(True) > 0
    assert found.to_dict()["first_fit"] == found.first_fit
    assert ladder("gpt2", gpu="h100-80gb").first_fit == 0
    assert ladder("llama-2-70b", gpu="t4", precision="fp16-mixed").first_fit is None


@pytest.mark.parametrize("columns", [40, 60, 100, 200])
def test_every_width(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    file = io.StringIO()
    print_ladder(climbed(model="llama-7b", gpus=8, gpu="a100-40gb"), file)
    lines = file.getvalue().splitlines()
    assert max(map(len, lines)) <= columns
    text = " ".join(file.getvalue().split())
    assert "the lowest rung that fits adds --recompute full --zero 2" in text
    assert "time not known: the optimizer runs on the host" in text


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    ran = here(capsys, "fit", "gpt2", "-g", "2", "--gpu", "t4", "--ladder", "--json")
    assert (ran.status, ran.stderr) == (0, "")
    assert json.loads(ran.stdout) == json.loads(json.dumps(ladder("gpt2", gpus=2, gpu="t4").to_dict()))
    assert here(capsys, "fit", "gpt2", "--gpu", "t4", "--ladder", "--check").status == 0
    nothing = here(capsys, "fit", "llama-2-70b", "--gpu", "t4", "--precision", "fp16-mixed", "--ladder", "--check")
    assert nothing.status == 1
    assert "no rung fits" in nothing.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("llama-7b", ("--gpu: missing", "memcalc fit llama-7b --gpus 8 --gpu a100-80gb --ladder")),
        ("--params 7B --gpu t4", ("--ladder: needs --model",)),
        ("llama-7b --gpu t4 --solve gpus", ("--solve gpus", "--ladder")),
        ("llama-7b -g 8 --engine fsdp2 --gpu t4", ("engine fsdp2", "none, ddp, deepspeed")),
        ("llama-7b -g 8 --tp 2 --gpu a100-80gb", ("engine megatron",)),
        ("gpt2 --gpu t4 --zero 9", ("--zero 9",)),
    ],
)
def test_what_has_no_ladder(capsys: pytest.CaptureFixture[str], arguments: str, words: tuple[str, ...]) -> None:
    check_refused(here(capsys, "fit", *arguments.split(), "--ladder"), *words)


def test_a_saving_compares_like_with_like() -> None:
    """ZeRO-3's allocations are not played here, those of the rung below are: assumed fragments are no cost of the rung."""
    found = climbed(model="gpt2", gpus=8, gpu="t4", precision="fp16-mixed")
    below, seen = None, set[str]()
    for rung in found.rungs:
        if rung.report is None:
            continue
        if below is not None:
            ways = [{i.basis for i in one.overheads if i.component == "reserved"} for one in (below, rung.report)]
            assert rung.saves_of == ("device" if ways[0] == ways[1] else "allocated")
            assert rung.saves == getattr(below, rung.saves_of) - getattr(rung.report, rung.saves_of)
            assert rung.to_dict()["saves_of"] == rung.saves_of
            seen.add(rung.saves_of)
        below = rung.report
    assert seen == {"device", "allocated"}
    out = io.StringIO()
    print_ladder(found, out)
    assert "saves*: less that is allocated" in out.getvalue()
