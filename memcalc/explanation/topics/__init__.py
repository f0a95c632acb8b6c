"""The topics of `memcalc explain`: one file for each, found by its name."""

from __future__ import annotations

from functools import partial
from typing import Final

from memcalc.explanation.topic import Topic
from memcalc.registry import Registry, constant

OTHER_NAMES: Final = {
    "inference": "kv-cache", "generation": "kv-cache", "static-cache": "kv-cache",
    "serving": "paged-attention", "vllm": "paged-attention", "sglang": "paged-attention", "cuda-graphs": "paged-attention",
    "zeropp": "zero-plus-plus", "mics": "zero-plus-plus", "hpz": "zero-plus-plus",
    "onebit": "gradient-compression", "1-bit-adam": "gradient-compression", "powersgd": "gradient-compression",
    "schedules": "bubble", "gpipe": "pipeline", "1f1b": "pipeline", "zero-bubble": "zbv", "dualpipev": "dualpipe",
    "layers": "convolution", "conv2d": "convolution", "gru": "lstm", "rnn": "lstm",
    "tp-dims": "tensor-parallel-dims", "2d-tensor-parallel": "tensor-parallel-dims",
    "reinforcement": "grpo", "rlhf": "grpo", "dataparallel": "data-parallel", "server": "parameter-server",
}  # fmt: skip
"""Other words that people type for a topic."""


def topic_named(name: str) -> str:
    """Return the topic that a word means; the word itself if it means none."""
    return OTHER_NAMES.get(name.lower(), name)


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
        "megatron-lora",
        "fp8",
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
