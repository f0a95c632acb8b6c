"""Small setups of every engine, and their timelines."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Final

import memcalc
from memcalc.estimation.report import Report
from memcalc.pictures.timeline import Timeline, timeline_of

LLAMA: Final[dict[str, Any]] = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 12, "num_attention_heads": 4,
    "num_key_value_heads": 4, "vocab_size": 104, "max_position_embeddings": 256,
}  # fmt: skip
GPT2: Final[dict[str, Any]] = {
    "model_type": "gpt2", "n_embd": 64, "n_layer": 6, "n_head": 4, "vocab_size": 104, "n_positions": 128,
}  # fmt: skip

SETUPS: Final[dict[str, dict[str, Any]]] = {
    "none": {},
    "none, accumulating": {"global_batch_size": 5, "recompute": "full"},
    "none, autocast": {"precision": "bf16-autocast", "optimizer": "adafactor"},
    "ddp": {"engine": "ddp", "gpus": 4, "global_batch_size": 16},
    "fsdp2": {"engine": "fsdp2", "gpus": 4},
    "fsdp2, clipping": {"engine": "fsdp2", "gpus": 4, "zero": 2, "clip_grad_norm": True, "global_batch_size": 16},
    "fsdp2, stages": {"engine": "fsdp2", "gpus": 4, "pp": 2, "global_batch_size": 12},
    "fsdp2, tensor parallel": {"engine": "fsdp2", "gpus": 4, "tp": 2},
    "deepspeed 0": {"engine": "deepspeed", "gpus": 4, "zero": 0},
    "deepspeed 1": {"engine": "deepspeed", "gpus": 4, "zero": 1},
    "deepspeed 2": {"engine": "deepspeed", "gpus": 4, "zero": 2, "global_batch_size": 16},
    "deepspeed 3": {"engine": "deepspeed", "gpus": 4, "zero": 3, "global_batch_size": 8},
    "megatron": {"engine": "megatron", "gpus": 4, "tp": 2, "zero": 1, "global_batch_size": 8},
    "megatron, stages": {"engine": "megatron", "gpus": 4, "tp": 2, "pp": 2, "global_batch_size": 16},
    "megatron, interleaved": {
        "engine": "megatron", "gpus": 4, "pp": 2, "schedule": "interleaved", "virtual_stages": 2, "global_batch_size": 16,
    },
}  # fmt: skip
"""One setup for each way in which a step is told."""


@lru_cache(maxsize=64)
def pictured(name: str, gpu: str | None = None) -> tuple[Report, Timeline]:
    """The report and the timeline of one of SETUPS."""
    report = memcalc.estimate(dict(LLAMA), seq_len=128, **SETUPS[name], **({} if gpu is None else {"gpu": gpu}))
    return report, timeline_of(report)
