"""DeepSpeed 0.19.8's ZeRO-3 over the routed blocks that it takes for leaf modules if nothing else is said: every collective,
and the peak of every phase to the byte."""

from __future__ import annotations

from typing import Any

import pytest
from auto_ep_cases import CONFIGS
from deepspeed_oracle import OPTIONS, PRECISIONS, deepspeed_step, sent

import memcalc
from memcalc.engines.deepspeed.zero3_leaves import leaf_modules
from memcalc.families import supporting

LEAVES = {*supporting(lambda s: s.zero3_leaf)}

PHASES = ("forward", "backward", "step")
MODELS = {name: {"model_type": name, **CONFIGS[name]} for name in sorted(LEAVES)}

NOTHING_KEPT = {"param_persistence_threshold": 0, "max_live_parameters": 0, "max_reuse_distance": 0,
                "reduce_bucket_size": 60_000, "sub_group_size": 30_000}  # fmt: skip
SMALL_STAY = {"param_persistence_threshold": 1000, "max_live_parameters": 400_000, "max_reuse_distance": 150_000,
              "prefetch_bucket_size": 20_000, "reduce_bucket_size": 40_000, "sub_group_size": 50_000}  # fmt: skip
FAR = {"param_persistence_threshold": 600, "max_live_parameters": 300_000, "max_reuse_distance": 400_000,
       "prefetch_bucket_size": 90_000, "reduce_bucket_size": 100_000}  # fmt: skip
"""The next use of a leaf is looked for within the modules that follow, so each counts once more in those around it."""


def ours(config: dict[str, Any], **how: Any) -> memcalc.Report:
    gpus, cp, batch = how["gpus"], how.get("cp", 1), how.get("micro_batch_size", 1)
    return memcalc.estimate(
        config,
        engine="deepspeed",
        gpus=gpus,
        cp=cp,
        zero=3,
        precision=PRECISIONS[how.get("precision", "bf16")],
        micro_batch_size=batch,
        global_batch_size=gpus // cp * batch * how.get("micro_batches", 1),
        seq_len=how.get("seq_len", 16),
        recompute="full" if how.get("recompute") else "none",
        **{name: how[name] for name in OPTIONS if name in how},
    )


def check(config: dict[str, Any], **how: Any) -> None:
    named = {OPTIONS.get(name, name): value for name, value in how.items()}
    ranked = deepspeed_step(config, zero=3, steps=3, balanced=True, **named)
    report = ours(config, **how)
    among_all: dict[tuple[str, str], tuple[int, int]] = {}
    for c in report.collectives:
        if c.axis == "dp":
            calls, payload = among_all.get((c.collective, c.dtype), (0, 0))
            among_all[c.collective, c.dtype] = calls + c.calls, payload + c.payload
    assert among_all == sent(ranked)
    assert report.phases == {phase: getattr(ranked, phase) for phase in PHASES}


@pytest.mark.parametrize("model_type", sorted(LEAVES))
def test_nothing_is_kept(model_type: str) -> None:
    check(MODELS[model_type], gpus=4, **NOTHING_KEPT)


@pytest.mark.parametrize("model_type", ["mixtral", "qwen2_moe"])
def test_what_is_kept_and_fetched_ahead(model_type: str) -> None:
    """Gradients of a block wait for one another, in fewer or more buckets than they would one by one."""
    check(MODELS[model_type], gpus=3, precision="fp16", micro_batches=2, micro_batch_size=2, seq_len=9, **SMALL_STAY)


def test_how_far_the_next_use_is() -> None:
    check(MODELS["mixtral"], gpus=8, precision="fp32", **FAR)


def test_layers_are_recomputed() -> None:
    check(MODELS["qwen2_moe"], gpus=4, recompute=True, **SMALL_STAY)


def test_ranks_share_sequences() -> None:
    check(MODELS["qwen3_moe"], gpus=4, cp=2, seq_len=24, **NOTHING_KEPT)


@pytest.mark.live
def test_the_classes_are_those_of_deepspeed() -> None:
    from deepspeed.runtime.zero.leaf_module_config import DEFAULT_LEAF_MODULE_CLASSES

    assert {path.split(".")[2] for path in DEFAULT_LEAF_MODULE_CLASSES} == LEAVES


def test_which_layers_have_one() -> None:
    """Qwen3's first layer here has an MLP that routes nothing."""
    model = memcalc.load_model(MODELS["qwen3_moe"])
    assert leaf_modules(model) == {("model.layers.*.mlp", 1), ("model.layers.*.mlp", 2)}
    other = memcalc.load_model({"model_type": "deepseek_v3", **CONFIGS["deepseek_v3"]})
    assert leaf_modules(other) == frozenset()
