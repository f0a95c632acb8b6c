"""The options of a setup, as given: types and ranges, checked by pydantic. What they mean together is `memcalc.setup`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Degree = Annotated[int, Field(ge=1, le=10**6)]
Batch = Annotated[int, Field(ge=1, le=10**7)]
Length = Annotated[int, Field(ge=1, le=10**8)]

Schedule = Literal["gpipe", "1f1b", "interleaved", "zero-bubble"]
Precision = Literal[
    "fp32", "bf16", "fp16", "bf16-mixed", "fp16-mixed", "bf16-autocast", "fp16-autocast", "fp8-mixed"
]
GradDtype = Literal["fp32", "bf16", "fp16"]
OptimizerName = Literal["adamw", "adam", "sgd", "sgd-momentum", "adafactor", "lion", "adamw-8bit", "muon"]
Implementation = Literal["foreach", "fused", "for-loop"]
Recompute = Literal["none", "selective", "op", "full"]
Attention = Literal["eager", "sdpa", "flash"]
CrossEntropy = Literal["eager", "vocab-parallel", "fused", "chunked"]
Kernels = Literal["hf", "fused", "megatron"]
Engine = Literal["none", "ddp", "fsdp2", "deepspeed", "megatron"]


class Options(BaseModel):
    """Every setup option of the contract. None means: the default, which may depend on the others."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    gpus: Degree = 1
    gpus_per_node: Degree = 8
    dp: Degree | None = None
    tp: Degree = 1
    pp: Degree = 1
    cp: Degree = 1
    ep: Degree = 1
    etp: Degree | None = None
    pp_rank: Annotated[int, Field(ge=0, le=10**6)] | None = None
    zero: Annotated[int, Field(ge=0, le=3)] = 0
    shard_group: Degree | None = None
    sequence_parallel: bool | None = None
    schedule: Schedule = "1f1b"
    virtual_stages: Degree = 1
    micro_batch_size: Batch = 1
    seq_len: Length | None = None
    global_batch_size: Batch | None = None
    precision: Precision = "bf16-mixed"
    grad_dtype: GradDtype | None = None
    optimizer: OptimizerName = "adamw"
    optimizer_implementation: Implementation | None = None
    recompute: Recompute = "none"
    attention: Attention | None = None
    cross_entropy: CrossEntropy | None = None
    padded: bool = False
    expert_imbalance: Annotated[float, Field(ge=1, le=10**6, allow_inf_nan=False)] = 1.0
    kernels: Kernels | None = None
    engine: Engine | None = None
    gpu: str | None = None


def option_name(field: str) -> str:
    """The command-line spelling of a field."""
    return "--" + field.replace("_", "-")
