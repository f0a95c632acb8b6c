"""The setup options of fine-tuning: what trains, and adapters."""

from __future__ import annotations

from typing import Annotated

from memcalc.cli.options import METHOD, option

Freeze = Annotated[
    str | None,
    option(
        "Parts that do not train, with commas: embeddings, head, norms, bias, attention, mlp, encoder, first:N, last:N, "
        "a pattern of parameter names, all-but:PART+PART. (default: all train)",
        METHOD,
        "--freeze",
    ),
]
LoraRank = Annotated[
    int | None,
    option("The rank of peft's LoRA adapters; the base is frozen. (default: 0, off)", METHOD, "--lora-rank"),
]
LoraTargets = Annotated[
    str | None,
    option(
        "default (peft's for the model type), all-linear, or names of linear layers with commas. (default: default)",
        METHOD,
        "--lora-targets",
    ),
]
LoraDropout = Annotated[float | None, option("Dropout of the adapters' inputs. (default: 0)", METHOD, "--lora-dropout")]
LoraBias = Annotated[
    str | None, option("The biases that train: none, all, lora_only. (default: none)", METHOD, "--lora-bias")
]
AdapterDtype = Annotated[
    str | None,
    option(
        "fp32 (peft's own), or the base's: bf16, fp16 (autocast_adapter_dtype=False). (default: fp32)",
        METHOD,
        "--adapter-dtype",
    ),
]
InputRequireGrads = Annotated[
    bool | None,
    option(
        "model.enable_input_require_grads() was called: the embeddings' output wants a gradient though nothing in them trains. "
        "(default: on with --recompute, as transformers' own switch does)",
        METHOD,
        "--input-require-grads/--no-input-require-grads",
    ),
]
