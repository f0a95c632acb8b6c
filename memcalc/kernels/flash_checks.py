"""Refusals of flash-attn under transformers: what it does not take, and what is not modelled, each by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from memcalc.inputs.options import NOT_YET, Options, refuse

if TYPE_CHECKING:
    from memcalc.inputs.model import Model

_ENGINES: Final = ("none", "ddp", "deepspeed", "fsdp2")
_NAME: Final = "attention"
CHECKED: Final = (
    "apertus", "arcee", "bamba", "biogpt", "bitnet", "cohere", "cohere2", "cwm", "dbrx", "dots1", "ernie4_5",
    "ernie4_5_moe", "exaone4", "exaone_moe", "falcon_h1", "flex_olmo", "gemma", "gemma3_text", "glm", "glm4",
    "glm4_moe", "gpt2", "gpt_bigcode", "gpt_neox", "granite", "granitemoe", "granitemoehybrid", "granitemoeshared",
    "helium", "hunyuan_v1_dense", "hunyuan_v1_moe", "hy_v3", "hyperclovax", "internlm3", "iquestcoder", "jais2",
    "jamba", "lfm2", "lfm2_moe", "llama", "minimax", "minimax_m2", "ministral", "ministral3", "mistral", "mixtral",
    "nanochat", "nemotron", "nemotron_h", "olmo", "olmo2", "olmo3", "olmo_hybrid", "olmoe", "opt", "persimmon", "phi",
    "phi3", "phimoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_moe", "qwen3_next",
    "recurrent_gemma", "seed_oss", "smollm3", "solar_open", "stablelm", "starcoder2", "zamba2",
)  # fmt: skip
"""The types whose step with flash-attn is compared with transformers' own."""


def check_flash(options: Options, engine: str, precision: str, model: Model) -> None:
    """Raise InputError for flash-attn with an engine, an axis, a precision or a model that it is not modelled with."""
    from memcalc.kernels.flash_operands import WIDEST
    from memcalc.kernels.gpus_of_flash import check_gpu

    kinds = ", ".join(model.program.attention_kinds)
    if model.model_type not in CHECKED:
        refuse(_NAME, "flash", f"for a {model.model_type} {NOT_YET}{kinds}")
    if engine not in _ENGINES:
        refuse(_NAME, "flash", f"with engine {engine} {NOT_YET}{kinds}, or --engine {', '.join(_ENGINES)}")
    if options.cp > 1 and engine == "fsdp2":
        why = f"torch's context parallelism replaces sdpa, and with --cp {options.cp} there is nothing else"
        refuse(_NAME, "flash", f"{why}; allowed: sdpa, or --engine deepspeed, which exchanges heads (Ulysses)")
    if precision == "fp32":
        refuse(_NAME, "flash", f"flash-attn takes 16 bits, and precision is fp32; allowed: {kinds}")
    check_gpu(options)
    if options.prepare_kbit_training:
        why = "flash-attn casts what prepare_model_for_kbit_training has made fp32, which"
        refuse("prepare_kbit_training", True, f"{why} {NOT_YET}off, or --attention sdpa")
    if options.kernels not in (None, "hf", "fused"):
        refuse("kernels", options.kernels, f"with --attention flash {NOT_YET}hf, fused")
    program: Any = model.program
    width = program.head_dim.size
    if width > WIDEST:
        refuse(_NAME, "flash", f"flash-attn takes heads of up to {WIDEST}, not {width}; allowed: {kinds}")
