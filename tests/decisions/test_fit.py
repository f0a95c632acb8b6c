"""The answer fits and the next value does not: the estimate is the judge, asked without the search."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest

import memcalc
from memcalc.decisions.depth import with_layers
from memcalc.decisions.fit import Fit, fit, suffices
from memcalc.errors import InputError

MODELS = ("gpt2-large", "llama-3.2-1b", "qwen3-0.6b", "pythia-1b", "bert-large", "llama-7b")
GPUS = ("t4", "rtx4090", "a100-40gb", "h100-80gb", "24GB")
ENGINES: dict[str, dict[str, tuple[Any, ...]]] = {
    "none": {"precision": ("fp32", "bf16-mixed", "bf16-autocast"), "attention": ("eager", "sdpa")},
    "ddp": {"gpus": (2, 8), "optimizer": ("adamw", "adafactor")},
    "deepspeed": {"gpus": (4, 8), "zero": (1, 2, 3), "recompute": ("none", "full")},
    "fsdp2": {"gpus": (8, 16), "zero": (2, 3), "recompute": ("none", "full")},
    "megatron": {"gpus": (8,), "tp": (2, 4), "zero": (0, 1)},
}
FIELDS = {"micro-batch-size": "micro_batch_size", "seq-len": "seq_len", "gpus": "gpus"}


def with_value(solve: str, model: str | None, value: int, options: dict[str, Any]) -> Any:
    """The estimate of a value."""
    if solve == "params":
        return memcalc.estimate(params=value, **options)
    if solve == "layers":
        return memcalc.estimate(with_layers(memcalc.load_model(model or ""), value), **options)
    return memcalc.estimate(model, **{**options, FIELDS[solve]: value})


def check(found: Fit, model: str | None, options: dict[str, Any]) -> None:
    """Estimates agree with every claim of an answer."""
    if found.value is not None:
        own = with_value(found.solve, model, found.value, options)
        assert own.fits is True or (own.fits is None and own.states_only)
        document, expected = found.to_dict(), own.to_dict()
        assert {name: document[name] for name in ("setup", "memory", "fit")} == {
            name: expected[name] for name in ("setup", "memory", "fit")
        }
    if found.next is not None:
        other = with_value(found.solve, model, found.next.value, options)
        assert other.fits is False
        assert found.next.over_by == max(0, -other.headroom)
    else:
        assert found.limit
    for value in found.tried:
        fits = with_value(found.solve, model, value, options).fits
        assert (fits is not False) == (value in found.also_fits)


def drawn(engine: str, seed: int) -> tuple[str, dict[str, Any]]:
    draw = random.Random(f"{engine} {seed}")
    names = [name for name in MODELS if engine != "megatron" or name.startswith(("llama", "qwen"))]
    options = {name: draw.choice(values) for name, values in ENGINES[engine].items()}
    gpus = [name for name in GPUS if engine != "megatron" or name != "t4"]  # too old for its attention
    return draw.choice(names), {**options, "engine": engine, "gpu": draw.choice(gpus)}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("engine", ENGINES)
def test_the_largest_micro_batch_fits_and_the_next_does_not(engine: str, seed: int) -> None:
    model, options = drawn(engine, seed)
    check(fit("micro-batch-size", model, **options), model, options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("solve", "model", "options"),
    [
        ("seq-len", "llama-3-8b", {"gpus": 8, "engine": "fsdp2", "gpu": "a100-40gb"}),
        ("seq-len", "qwen3-0.6b", {"gpu": "24GB"}),
        ("seq-len", "llama-3.2-1b", {"gpus": 8, "tp": 4, "gpu": "rtx4090"}),
        ("seq-len", "gpt2-large", {"gpu": "t4", "precision": "fp32"}),
        ("layers", "llama-7b", {"gpus": 8, "zero": 3, "gpu": "a100-40gb"}),
        ("layers", "llama-7b", {"gpu": "h100-80gb", "recompute": "full"}),
        ("layers", "gpt2-large", {"gpus": 2, "gpu": "t4"}),
        ("layers", "llama-2-70b", {"gpus": 64, "tp": 8, "pp": 4, "gpu": "h100-80gb", "global_batch_size": 256}),
    ],
)
def test_the_longest_and_the_deepest(solve: str, model: str, options: dict[str, Any]) -> None:
    check(fit(solve, model, **options), model, options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("llama-2-70b", {"zero": 3, "gpu": "h100-80gb"}),
        ("llama-7b", {"engine": "fsdp2", "gpu": "a100-40gb"}),
        ("mixtral-8x7b", {"ep": 8, "zero": 1, "gpu": "h100-80gb"}),
        ("llama-7b", {"gpu": "t4"}),
        ("gpt2", {"gpu": "t4"}),
    ],
)
def test_the_fewest_gpus(model: str, options: dict[str, Any]) -> None:
    found = fit("gpus", model, max_gpus=256, **options)
    assert found.smallest
    check(found, model, options)


@pytest.mark.parametrize("targets", ["default", "all-linear"])
def test_the_largest_rank_of_adapters(targets: str) -> None:
    options = {"gpu": "t4", "precision": "fp32", "seq_len": 512, "lora_targets": targets}
    found = fit("lora-rank", "gpt2", **options)
    assert found.value is not None
    assert memcalc.estimate("gpt2", lora_rank=found.value, **options).fits
    assert not memcalc.estimate("gpt2", lora_rank=found.value + 1, **options).fits


@pytest.mark.parametrize("options", [{"gpu": "h100-80gb"}, {"gpus": 64, "zero": 2, "gpu": "a100-40gb"}])
def test_the_most_parameters(options: dict[str, Any]) -> None:
    found = fit("params", **options)
    assert found.value is not None and found.next is not None
    assert found.next.value == found.value + 1
    check(found, None, options)


def test_the_fewest_gpus_of_a_bare_size() -> None:
    found = fit("gpus", params="70B", zero=3, gpu="h100-80gb")
    assert found.value is not None and found.next is not None
    assert memcalc.estimate(params="70B", zero=3, gpu="h100-80gb", gpus=found.value).fits is None
    assert memcalc.estimate(params="70B", zero=3, gpu="h100-80gb", gpus=found.next.value).fits is False


def test_the_row_that_grows_most_stops_the_next_step() -> None:
    options: dict[str, Any] = {"gpus": 8, "zero": 3, "gpu": "a100-80gb"}
    found = fit("micro-batch-size", "llama-7b", **options)
    assert found.value is not None and found.next is not None

    def rows(value: int) -> dict[str, int]:
        report = memcalc.estimate("llama-7b", micro_batch_size=value, **options)
        sizes: dict[str, int] = {}
        for item in report.items:
            sizes[f"{item.component} {item.name}"] = sizes.get(f"{item.component} {item.name}", 0) + item.at_peak
        return sizes

    then, now = rows(found.value), rows(found.next.value)
    growths = {name: size - then.get(name, 0) for name, size in now.items()}
    row = found.next.row
    assert row.grows_by == max(growths.values()) == growths[f"{row.item.component} {row.item.name}"]
    assert row.nbytes == now[f"{row.item.component} {row.item.name}"]
    assert found.to_dict()["next"]["row"]["name"] == row.item.name


def test_a_limit_that_is_not_memory_is_said() -> None:
    positions = fit("seq-len", "gpt2", gpu="a100-80gb")
    assert (positions.value, positions.next) == (1024, None)
    assert "1024 positions" in str(positions.limit)
    batch = fit("micro-batch-size", "gpt2", gpus=4, global_batch_size=24, gpu="a100-80gb")
    assert (batch.value, batch.next) == (6, None)
    assert "6 sequences" in str(batch.limit)
    fewest = fit("gpus", "gpt2", gpu="a100-80gb")
    assert (fewest.value, fewest.next) == (1, None)
    assert "no fewer" in str(fewest.limit)
    assert fewest.to_dict()["next"] is None and fewest.to_dict()["limit"]


def test_the_global_batch_grows_with_the_micro_batch() -> None:
    found = fit("micro-batch-size", "llama-7b", gpus=8, zero=3, gpu="a100-80gb")
    assert found.report.setup.global_batch_size == 8 * (found.value or 0)


def test_nothing_fits() -> None:
    found = fit("micro-batch-size", "llama-7b", gpus=8, gpu="a100-80gb")
    assert found.value is None and found.next is not None
    assert found.next.value == 1
    own = memcalc.estimate("llama-7b", gpus=8, gpu="a100-80gb").to_dict()
    document = found.to_dict()
    assert document["value"] is None
    assert document["next"]["over_by"] == -own["fit"]["headroom"]
    assert document["advice"] == own["advice"] != []
    assert (
        max(own["memory"]["items"], key=lambda item: item["at_peak"])["at_peak"] == document["next"]["row"]["at_peak"]
    )
    assert fit("gpus", "llama-7b", gpu="t4").next is not None


def test_a_gap_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """No real setup with a gap is known beforehand, so one is made."""
    import memcalc.decisions.fit as module

    monkeypatch.setattr(module, "suffices", lambda report: report.setup.micro_batch_size in (1, 2, 4, 6))
    monkeypatch.setattr(module, "last_enough", lambda *_: 1)
    found = fit("micro-batch-size", "gpt2", gpu="h100-80gb")
    assert found.value == 2
    assert found.next is not None and found.next.value == 3
    assert found.also_fits == (4, 6)
    assert 3 not in found.tried and len(found.tried) > 2


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_the_short_way_to_a_verdict_ends_at_the_full_one(engine: str) -> None:
    for seed in range(8):
        model, options = drawn(engine, seed)
        for batch in (1, 3, 12):
            report = memcalc.estimate(model, micro_batch_size=batch, **options)
            again = memcalc.estimate(model, micro_batch_size=batch, **options)
            assert suffices(report) == again.fits, (model, options, batch)


@pytest.mark.parametrize(
    ("solve", "options", "words"),
    [
        (None, {"model": "gpt2"}, "--solve: missing; allowed: micro-batch-size"),
        ("x", {"model": "gpt2"}, "--solve x: allowed: micro-batch-size"),
        ("lora-rank", {"params": "7B", "gpu": "t4"}, "--solve lora-rank: needs --model"),
        (
            "lora-rank",
            {"model": "gpt2", "gpu": "t4", "lora_rank": 8},
            "--lora-rank 8: is what --solve lora-rank searches",
        ),
        ("lora-rank", {"model": "phi-3-mini", "gpu": "t4"}, "peft has no default for a phi3"),
        ("gpus", {"model": "gpt2"}, "--gpu: missing"),
        ("gpus", {"gpu": "t4"}, "--model or --params: exactly one"),
        ("gpus", {"model": "gpt2", "params": "7B", "gpu": "t4"}, "--model or --params: exactly one"),
        ("params", {"params": "7B", "gpu": "t4"}, "--params 7B: is what --solve params searches for"),
        ("micro-batch-size", {"params": "7B", "gpu": "t4"}, "model states of a bare number of parameters"),
        ("micro-batch-size", {"model": "gpt2", "gpu": "zz"}, "--gpu zz: unknown GPU"),
        ("micro-batch-size", {"model": "gpt2", "gpu": "t4", "tp": 3}, "--gpus 1: is not divisible by tp 3"),
        ("layers", {"model": "gpt2", "gpu": "t4", "engine": "x"}, "--engine x: allowed"),
    ],
)
def test_what_is_refused(solve: str | None, options: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError) as error:
        fit(solve, **options)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_it_is_quick() -> None:
    """On a shared machine of two cores; alone it takes half a second."""
    begin = time.process_time()
    fit("micro-batch-size", "llama-7b", gpus=8, zero=3, gpu="a100-80gb")
    assert time.process_time() - begin < 3
