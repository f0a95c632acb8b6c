"""Setups for torchtitan's writer: models of its flavors, and what memcalc takes of them."""

from __future__ import annotations

from functools import cache
from typing import Any

from hypothesis import HealthCheck, reject, settings
from hypothesis import strategies as st
from records import examples

import memcalc
from memcalc.errors import InputError
from memcalc.formats.torchtitan_models import titan_model
from memcalc.inputs.model import Model
from memcalc.inputs.options import check_options
from memcalc.pipelining.programs import divided
from memcalc.setup.resolved import resolve
from memcalc.setup.setup import Setup

EXAMPLES = settings(
    max_examples=examples(120), deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
MODELS = (
    "llama3 debugmodel", "llama3 8B", "llama3 405B", "qwen3 0.6B", "qwen3 debugmodel_moe", "deepseek_v3 debugmodel",
    "deepseek_v3 16B", "llama4 debugmodel",
)  # fmt: skip
ENDS = ("first_stage_layers", "last_stage_layers")


@cache
def model_of(name: str) -> Model:
    made = titan_model(*name.split(), 2048)
    assert made is not None
    return memcalc.load_model(made.config)


def resolved(model: Model, **options: Any) -> Setup:
    return resolve(check_options(options), model)


def stages(setup: Setup, layers: int) -> list[int]:
    return divided(layers, setup.pp * setup.virtual_stages, *(getattr(setup, end) for end in ENDS))


def of(*values: Any) -> st.SearchStrategy[Any]:
    return st.sampled_from(values)


ANY = {
    "gpus_per_node": of(8, 4),
    "seq_len": of(2048, 512, 256),
    "optimizer": of("adamw", "adam"),
    "optimizer_implementation": of("foreach", "fused", "for-loop"),
    "clip_grad_norm": st.booleans(),
    "recompute": of("none", "full", "op"),
    "recompute_layers": of(None, None, 1, 2, 3, 6, 10, 16, 20),
    "attention": of(None, "eager", "sdpa"),
    "expert_imbalance": of(1.0, 1.5),
    "gpu": of(None, "h100-80gb"),
    "padded": of(False, False, True),
    "kernels": of(None, None, "fused"),
    "cross_entropy": of(None, "eager", "vocab-parallel", "chunked"),
}
OF_SHARDS = {
    "zero": of(2, 3),
    "sequence_parallel": st.booleans(),
    "cp_comm_type": of(None, "p2p", "all_gather"),
    "precision": of("bf16-mixed", "bf16-mixed", "fp32", "bf16"),
    "grad_dtype": of(None, "bf16"),
    "virtual_stages": of(1, 1, 2, 3),
    "schedule": of("1f1b", "gpipe", "interleaved", "zero-bubble"),
    "first_stage_layers": of(None, None, 1, 2, 8),
    "last_stage_layers": of(None, None, 1, 2, 7),
}

PAIRS = (
    ("schedule", "virtual_stages"),
    ("recompute", "recompute_layers"),
    ("sequence_parallel", "cross_entropy"),
    ("first_stage_layers", "last_stage_layers"),
)
"""Options that are given together, as one may be refused without the other."""


@st.composite
def setups(draw: st.DrawFn) -> tuple[str, Setup]:
    """A setup that memcalc takes: degrees, then every other option that goes with those before it."""
    name, engine = draw(of(*MODELS)), draw(of("none", "ddp", "fsdp2", "fsdp2", "fsdp2", "fsdp2"))
    model = model_of(name)
    options: dict[str, Any] = {"engine": engine, "micro_batch_size": draw(of(1, 2, 3))}
    if engine == "fsdp2":
        names = {**ANY, **OF_SHARDS}
        dp = shards = draw(of(2, 4, 8, 1))
        dp *= draw(of(1, 1, 2))
        tp, pp, cp = draw(of((1, 1, 1), (2, 1, 1), (4, 1, 1), (1, 2, 1), (1, 4, 1), (1, 1, 2), (2, 2, 1), (2, 2, 2)))
        ep = tp * draw(of(1, 2)) if "moe" in name or "deepseek" in name else 1
        options |= {"tp": tp, "pp": pp, "cp": cp, "ep": ep, "gpus": dp * tp * pp * cp, "shard_group": shards * cp}
    else:
        names = {**ANY, "precision": of("bf16-autocast", "bf16-autocast", "fp32", "bf16", "bf16-mixed")}
        dp = options["gpus"] = 1 if engine == "none" else draw(of(2, 16, 1))
    options["global_batch_size"] = dp * options["micro_batch_size"] * draw(of(1, 4, 8, 16))
    if not is_taken(model, options):
        options["ep"] = 1
    if not is_taken(model, options):
        reject()
    for pair in draw(st.permutations([*PAIRS, *((one,) for one in sorted(names))])):
        tried = {**options, **{option: draw(names[option]) for option in pair if option in names}}
        options = tried if is_taken(model, tried) else options
    return name, resolved(model, **options)


def is_taken(model: Model, options: dict[str, Any]) -> bool:
    try:
        resolved(model, **options)
    except InputError:
        return False
    return True
