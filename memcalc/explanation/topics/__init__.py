"""The topics of `memcalc explain`: one file for each, found by its name."""

from __future__ import annotations

from functools import partial
from typing import Final

from memcalc.explanation.topic import Topic
from memcalc.registry import Registry, constant

TOPICS: Final[Registry[Topic]] = Registry(
    "memcalc.explanation.topics",
    (
        "adam",
        "mixed-precision",
        "optimizers",
        "muon",
        "ddp",
        "zero",
        "zero-plus-plus",
        "offload",
        "fsdp",
        "fsdp1",
        "activations",
        "recompute",
        "activation-offload",
        "batch-and-sequence",
        "packing",
        "lora",
        "qlora",
        "frozen-axes",
        "kv-cache",
        "paged-attention",
        "tensor-parallel",
        "tensor-parallel-dims",
        "sequence-parallel",
        "context-parallel",
        "pipeline",
        "bubble",
        "pipedream",
        "chimera",
        "dualpipe",
        "zbv",
        "encoder-decoder-stages",
        "moe",
        "ring-allreduce",
        "gradient-compression",
        "data-parallel",
        "parameter-server",
        "trillion",
        "mfu",
        "cuda-context",
        "convolution",
        "batch-norm",
        "lstm",
    ),
    partial(constant, "TOPIC", "name"),
)
