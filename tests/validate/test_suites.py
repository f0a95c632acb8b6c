"""Suites: those that are bundled, models that are cut, names that are none."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import memcalc
from memcalc.families import FAMILIES
from memcalc.units import GIB
from memcalc.validate import run
from memcalc.validate.checks import check
from memcalc.validate.recording import name_of
from memcalc.validate.special import check_special
from memcalc.validate.suites import SUITES, Case, cut, model_of, options_of, read_suite

GPU = read_suite("gpu")


def estimated(case: Case, **more: Any) -> Any:
    return memcalc.estimate(model_of(case), **options_of(case), **more)


@cache
def reports(name: str) -> list[memcalc.Report]:
    """The estimate of each case of a suite."""
    return [estimated(case) for case in read_suite(name)]


@pytest.mark.parametrize("name", SUITES)
def test_every_case_can_be_run_and_is_another_one(name: str) -> None:
    for report in reports(name):
        check(report, "cuda" if name == "gpu" else "fake")
        check_special(report, "cuda" if name == "gpu" else "fake")
    names = [name_of(case) for case in read_suite(name)]
    assert len(set(names)) == len(names)


def test_the_suite_for_a_gpu_is_broad() -> None:
    found = reports("gpu")
    assert len(GPU) >= 40
    for option, values in {
        "engine": {"none", "ddp", "fsdp2"},
        "precision": {"bf16", "fp16", "fp32", "bf16-mixed", "bf16-autocast", "fp16-autocast"},
        "attention": {"eager", "sdpa"},
        "recompute": {"none", "op", "full"},
        "optimizer_implementation": {"foreach", "fused", "for-loop"},
        "gpus": {1, 8, 64},
        "tp": {1, 8},
        "padded": {True, False},
    }.items():
        assert values <= {getattr(report.setup, option) for report in found}, option
    assert len({report.model.model_type for report in found}) >= 20
    assert {report.model.model_type for report in found} <= set(FAMILIES)


def test_a_case_takes_seconds() -> None:
    """Five steps besides those that are timed, of 6·parameters·tokens operations, at a third of what an A100 does."""
    for case, report in zip(GPU, reports("gpu"), strict=True):
        s = report.setup
        tokens = s.micro_batch_size * (s.seq_len or 1) * s.micro_batches
        operations = 6 * report.model.active_parameters * tokens / (s.tp * s.pp)
        speed = 6e12 if s.precision == "fp32" else 100e12
        assert 5 * operations / speed < 25, name_of(case)


@pytest.mark.slow
def test_most_cases_fit_80_gb_and_the_last_ones_are_about_what_a_gpu_has() -> None:
    fits = [estimated(case, gpu="h100-80gb").fits for case in GPU]
    assert all(fits[:-7])
    assert fits[-7:] == [True] + [False] * 6  # of 15 layers, and of 16
    assert [estimated(case, gpu="h200").fits for case in GPU[-7:]] == [True] * 3 + [False] * 3 + [True]
    assert all(estimated(case).device < 200 * GIB for case in GPU)


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("llama-7b", 3), ("gpt2", 1), ("bloom-560m", 5), ("mixtral-8x7b", 2), ("t5-base", 2), ("bart-base", 3),
        ("deepseek-v2-lite", 2), ("gpt-oss-20b", 5), ("olmo-3-7b", 3), ("modernbert-base", 4), ("whisper-small", 12),
    ],
)  # fmt: skip
def test_a_cut_model_has_the_first_layers_of_the_whole_one(name: str, layers: int) -> None:
    whole, part = memcalc.load_model(name), memcalc.load_model(cut(name, layers))
    first = part.weights()
    assert [weight for weight in whole.weights() if weight in first] == first
    assert part.num_parameters <= whole.num_parameters
    assert part.layers == layers or whole.model_type in ("t5", "bart", "whisper")


def test_lists_of_layers_are_cut() -> None:
    kinds = ["full_attention", "sliding_attention", "full_attention"]
    fields = {"model_type": "gemma3_text", "num_hidden_layers": 3, "layer_types": kinds}
    assert cut(fields, 2)["layer_types"] == kinds[:2]


@pytest.mark.parametrize("layers", [0, 33, "2", True, None, 2.0])
def test_layers_that_are_not_there(layers: object) -> None:
    made = run.outcome({"model": "llama-7b", "layers": layers}, "fake")
    assert made["outcome"] == "refused"
    assert "allowed: 1 to 32" in made["why"]


def test_a_model_without_a_number_of_layers() -> None:
    made = run.outcome({"model": "gpt-neo-125m", "layers": 1}, "fake")
    assert made["outcome"] in ("refused", "measured")
    assert "layers" in run.outcome({"model": "resnet-50", "layers": 1}, "fake")["why"]


def test_a_file_and_unknown_names(tmp_path: Path) -> None:
    file = tmp_path / "own"
    file.write_text(json.dumps({"cases": [{"model": "gpt2"}]}))
    assert read_suite(str(file)) == [{"model": "gpt2"}]
    with pytest.raises(memcalc.InputError, match=r"--suite quik: unknown; did you mean quick\? allowed: quick, gpu"):
        read_suite("quik")
    with pytest.raises(memcalc.InputError, match=r"--suite no\.json: cannot be read"):
        read_suite("no.json")
    with pytest.raises(memcalc.InputError, match="--suite x: unknown"):
        read_suite("x")


def test_a_misspelt_option_of_a_case_is_named(tmp_path: Path) -> None:
    file = tmp_path / "own.json"
    file.write_text('{"cases": [{"model": "gpt2", "zeros": 1}]}')
    with pytest.raises(memcalc.InputError, match=r"case 1: field 'zeros' is no option of a setup; did you mean zero"):
        read_suite(str(file))
