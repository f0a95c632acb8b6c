"""Pipelines and recomputation of torchtitan's files: stages, micro-batches, and which layers are recomputed."""

from __future__ import annotations

from typing import Any

import pytest
from torchtitan_contents import notes, options, refusal, with_keys

from memcalc.formats.found import ACCUMULATION


def pipeline(flavor: str = "8B", batch: int = 8, **keys: Any) -> dict[str, Any]:
    model = {"model": {"name": "llama3", "flavor": flavor}, "training": {"local_batch_size": batch}}
    return with_keys("parallelism", model, pipeline_parallel_degree=4, **keys)


def test_micro_batches_of_a_pipeline() -> None:
    got = options(pipeline())
    assert (got["micro_batch_size"], got[ACCUMULATION]) == (1, 8)
    got = options(pipeline(pipeline_parallel_microbatch_size=2))
    assert (got["micro_batch_size"], got[ACCUMULATION]) == (2, 4)
    got = options(pipeline(pipeline_parallel_microbatches=2))
    assert (got["micro_batch_size"], got[ACCUMULATION]) == (4, 2)
    assert "sync_each_micro_batch" not in got
    assert "does not divide" in refusal(pipeline(pipeline_parallel_microbatch_size=3))
    assert "do not divide" in refusal(pipeline(pipeline_parallel_microbatches=3))


@pytest.mark.parametrize(("shards", "whole", "noted"), [(2, 16, False), (2, 32, True), (-1, 16, True)])
def test_accumulation_over_a_pipeline(shards: int, whole: int, noted: bool) -> None:
    content = pipeline(data_parallel_shard_degree=shards)
    content["training"]["global_batch_size"] = whole
    got = options(content)
    assert got["global_batch_size"] == whole
    assert ACCUMULATION not in got
    assert ("training.global_batch_size" in notes(content)) == noted


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, {"schedule": "1f1b", "first_stage_layers": 8, "last_stage_layers": 7}),
        (
            {"pipeline_parallel_schedule": "GPipe"},
            {"schedule": "gpipe", "first_stage_layers": 8, "last_stage_layers": 7},
        ),
        (
            {"pipeline_parallel_first_stage_less_layers": 0, "pipeline_parallel_last_stage_less_layers": 0},
            {"schedule": "1f1b"},
        ),
        ({"pipeline_parallel_split_points": ["layers.8", "layers.16", "layers.24"]}, {"schedule": "1f1b"}),
        (
            {"pipeline_parallel_split_points": "layers.6,layers.16,layers.26"},
            {"schedule": "1f1b", "first_stage_layers": 6, "last_stage_layers": 6},
        ),
        (
            {"pipeline_parallel_layers_per_stage": 9},
            {"schedule": "1f1b", "first_stage_layers": 8, "last_stage_layers": 7},
        ),
        ({"pipeline_parallel_schedule": "InterleavedZeroBubble"}, {"schedule": "zero-bubble", "virtual_stages": 2}),
        (
            {"pipeline_parallel_schedule": "interleaved1f1b", "pipeline_parallel_layers_per_stage": 3},
            {"schedule": "interleaved", "virtual_stages": 3},
        ),
    ],
)
def test_stages(keys: dict[str, Any], expected: dict[str, Any]) -> None:
    got = options(pipeline(**keys))
    names = ("schedule", "virtual_stages", "first_stage_layers", "last_stage_layers")
    assert {name: got[name] for name in names if name in got} == expected


def test_stages_that_memcalc_divides_otherwise_are_a_note() -> None:
    assert "makes stages of 4, 5, 4, 4, 4, 4, 4, 3 layers" in notes(
        pipeline(pipeline_parallel_schedule="Interleaved1F1B")
    )
    parts = [
        ["tok_embeddings", "layers.0"],
        ["layers.1"],
        ["layers.2", "layers.3"],
        ["layers.4", "layers.5", "norm", "output"],
    ]
    message = notes(pipeline("debugmodel", module_fqns_per_model_part=parts))
    assert "module_fqns_per_model_part makes stages of 1, 1, 2, 2 layers: 1, 2, 2, 1 are assumed" in message


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"pipeline_parallel_schedule": "ZBVZeroBubble"}, "is not modelled; allowed: 1F1B"),
        ({"pipeline_parallel_schedule": "DualPipeV"}, "is not modelled"),
        ({"pipeline_parallel_schedule": "2F2B"}, "allowed: 1F1B"),
        ({"pipeline_parallel_schedule_csv": "a.csv"}, "is not modelled"),
        ({"pipeline_parallel_layers_per_stage": 3}, "makes 12 stages"),
        ({"pipeline_parallel_layers_per_stage": 8}, "makes 5 stages"),
        ({"pipeline_parallel_split_points": ["layers.8"]}, "makes 2 stages"),
        ({"pipeline_parallel_split_points": ["layers.8", "layers.4", "layers.9"]}, "ascending"),
        ({"pipeline_parallel_split_points": ["a", "b", "c"]}, "ascending"),
        ({"pipeline_parallel_split_points": ["layers.8", "layers.16", "layers.99"]}, "do not make"),
        ({"module_fqns_per_model_part": "layers.0"}, "a list of lists"),
        ({"module_fqns_per_model_part": [["layers.0"], [1]]}, "a list of lists"),
        ({"pipeline_parallel_last_stage_less_layers": 30}, "too few"),
    ],
)
def test_refused_pipelines(keys: dict[str, Any], words: str) -> None:
    message = refusal(pipeline(**keys))
    assert words in message
    assert "parallelism.pipeline_parallel" in message or "parallelism.module_fqns" in message


def recomputing(flavor: str = "8B", pp: int = 1, **keys: Any) -> dict[str, Any]:
    degrees = {"parallelism": {"pipeline_parallel_degree": pp}, "model": {"flavor": flavor}}
    return {"activation_checkpoint": keys, **degrees}


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"mode": "none"}, ("none", None)),
        ({"mode": "full", "selective_ac_option": "2"}, ("full", None)),
        ({"selective_ac_option": "op"}, ("op", None)),
        ({"selective_ac_option": "1"}, ("full", None)),
        ({"selective_ac_option": "0"}, ("full", None)),
        ({"selective_ac_option": 2}, ("full", 16)),
        ({"selective_ac_option": "3"}, ("full", 10)),
        ({"selective_ac_option": "33"}, ("none", None)),
        ({}, ("full", 16)),
    ],
)
def test_recomputation(keys: dict[str, Any], expected: tuple[str, int | None]) -> None:
    got = options(recomputing(**keys))
    assert (got["recompute"], got.get("recompute_layers")) == expected
    assert ("layer is recomputed there" in notes(recomputing(**keys))) == (expected[1] is not None)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (recomputing(mode="memory_budget"), "activation_checkpoint.mode 'memory_budget': torch.compile decides"),
        (recomputing(mode="some"), "allowed: none, full, selective"),
        (recomputing(selective_ac_option="ops"), "selective_ac_option 'ops': allowed: op"),
        (recomputing(selective_ac_option=-1), "allowed: op"),
        (recomputing(pp=2), "selective_ac_option None: its default 2: every n-th layer of a pipeline"),
        (recomputing(pp=2, selective_ac_option="2"), "selective_ac_option '2': every n-th layer of a pipeline"),
    ],
)
def test_refused_recomputation(content: dict[str, Any], words: str) -> None:
    assert words in refusal(content)
