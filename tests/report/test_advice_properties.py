"""What holds for the advice of any setup: a proposal, followed, gives its verdict, and has nothing that it fits without."""

from __future__ import annotations

import random
from typing import Any

import pytest
from advised import parsed

import memcalc
from memcalc.inputs.options import check_options
from memcalc.report.advice import Proposal, advice
from memcalc.report.changed import changed
from memcalc.report.search import MOST_LISTS, Found, Search

GPUS = ("t4", "rtx4090", "v100-16gb", "a100-40gb", "h100-80gb")
BATCHES = {"micro_batch_size": (1, 2, 4, 6), "seq_len": (512, 2048, 8192), "recompute": ("none", "none", "full")}
ENGINES: dict[str, dict[str, tuple[Any, ...]]] = {
    "none": {"precision": ("fp32", "bf16-mixed", "bf16-autocast"), "attention": (None, "eager"),
             "optimizer": ("adamw", "adafactor")},
    "ddp": {"gpus": (2, 4, 8), "precision": (None, "bf16-autocast"), "engine": (None, "ddp"), "optimizer": ("adamw", "lion")},
    "deepspeed": {"gpus": (2, 4, 6, 8), "zero": (1, 2, 3), "optimizer_implementation": (None, "foreach", "fused"),
                  "engine": (None, "deepspeed"), "kernels": (None, "fused")},
    "fsdp2": {"gpus": (2, 4, 8, 16), "zero": (2, 3), "engine": ("fsdp2",), "tp": (1, 1, 2), "cp": (1, 1, 2),
              "shard_group": (None, 2), "grad_dtype": (None, "bf16")},
    "megatron": {"gpus": (4, 8, 16), "zero": (0, 1), "engine": ("megatron",), "tp": (1, 2), "pp": (1, 2),
                 "precision": (None, "fp32"), "global_batch_size": (None, 48), "dp": (None, 4)},
}  # fmt: skip


def drawn(engine: str, seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """A model of a few wide layers, and options that may or may not go together."""
    draw = random.Random(f"{engine} {seed}")
    hidden = draw.choice((2048, 4096, 8192))
    model = {
        "model_type": draw.choice(("llama", "qwen2", "llama", "mixtral" if engine in ("fsdp2", "deepspeed") else "llama")),
        "hidden_size": hidden, "intermediate_size": draw.choice((2, 4)) * hidden, "num_hidden_layers": draw.choice((2, 4, 7)),
        "num_attention_heads": hidden // 128, "num_key_value_heads": 8, "vocab_size": draw.choice((32000, 152064)),
    }  # fmt: skip
    options = {name: draw.choice(values) for name, values in {**BATCHES, **ENGINES[engine]}.items()}
    return model, {name: value for name, value in options.items() if value is not None} | {"gpu": draw.choice(GPUS)}


def too_large(engine: str, wanted: int) -> list[tuple[memcalc.Report, dict[str, Any], dict[str, Any]]]:
    """The first so many setups that are not refused and do not fit."""
    out: list[tuple[memcalc.Report, dict[str, Any], dict[str, Any]]] = []
    for seed in range(1000):
        model, options = drawn(engine, seed)
        try:
            report = memcalc.estimate(model, **options)
        except memcalc.InputError:
            continue
        if report.fits is False:
            out.append((report, model, options))
        if len(out) == wanted:
            return out
    raise AssertionError(f"of 1000 setups of {engine} fewer than {wanted} do not fit")


def followed(one: Proposal, report: memcalc.Report, model: dict[str, Any], options: dict[str, Any]) -> None:
    """Its flags, added to the options, give what it says."""
    after = memcalc.estimate(model, **options | parsed(one.flags))
    given = after.device, after.headroom, after.peak, after.fits, report.device - after.device
    assert given == (one.device, one.headroom, one.peak, one.fits, one.saves), (options, one.flags)


def fits_without(found: Found, report: memcalc.Report) -> list[str]:
    """The changes of a list that it fits without."""
    out: list[str] = []
    assert report.given is not None
    for step in found.steps:
        rest = [other.options for other in found.steps if other is not step]
        after = changed(check_options(report.given), report.setup, report.model, rest)
        less = report if after is None else memcalc.Report(report.model, after.setup)
        if less.fits is not False:
            out.append(step.remedy.kind)
    return out


ENGINE = pytest.mark.parametrize(
    "engine", [pytest.param(name, marks=[pytest.mark.slow] * (name in ("deepspeed", "fsdp2"))) for name in ENGINES]
)


@ENGINE
def test_a_proposal_gives_its_verdict_and_has_nothing_that_it_fits_without(engine: str) -> None:
    for report, model, options in too_large(engine, 5):
        assert report.given is not None
        proposals, lists = advice(report), Search(report, check_options(report.given)).lists()
        assert len(proposals) <= MOST_LISTS
        assert all(one.fits for one in proposals) or len(proposals) == 1
        for one in proposals:
            followed(one, report, model, options)
        for found in lists:
            assert found.report.fits is False or not fits_without(found, report), (options, found.flags)
