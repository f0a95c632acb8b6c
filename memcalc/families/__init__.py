"""Model families: each a program that reads like its `forward()`, found by transformers' `model_type`."""

from __future__ import annotations

from typing import Final

FAMILIES: Final[dict[str, tuple[str, str]]] = {
    "llama": ("memcalc.families.llama", "Llama"),
    "mistral": ("memcalc.families.mistral", "Mistral"),
    "qwen2": ("memcalc.families.qwen2", "Qwen2"),
    "qwen3": ("memcalc.families.qwen3", "Qwen3"),
    "phi3": ("memcalc.families.phi3", "Phi3"),
    "gemma2": ("memcalc.families.gemma2", "Gemma2"),
    "gpt2": ("memcalc.families.gpt2", "GPT2"),
    "gpt_neox": ("memcalc.families.gpt_neox", "GPTNeoX"),
    "opt": ("memcalc.families.opt", "OPT"),
    "mixtral": ("memcalc.families.mixtral", "Mixtral"),
    "mamba": ("memcalc.families.mamba", "Mamba"),
    "mamba2": ("memcalc.families.mamba2", "Mamba2"),
    "jamba": ("memcalc.families.jamba", "Jamba"),
    "falcon_h1": ("memcalc.families.falcon_h1", "FalconH1"),
    "bamba": ("memcalc.families.bamba", "Bamba"),
    "falcon_mamba": ("memcalc.families.falcon_mamba", "FalconMamba"),
    "gpt_oss": ("memcalc.families.gpt_oss", "GptOss"),
    "glm4_moe": ("memcalc.families.glm4_moe", "Glm4Moe"),
    "granitemoe": ("memcalc.families.granitemoe", "GraniteMoe"),
    "granitemoeshared": ("memcalc.families.granitemoeshared", "GraniteMoeShared"),
    "olmoe": ("memcalc.families.olmoe", "Olmoe"),
    "ernie4_5_moe": ("memcalc.families.ernie4_5_moe", "Ernie4_5_Moe"),
    "hunyuan_v1_moe": ("memcalc.families.hunyuan_v1_moe", "HunYuanMoEV1"),
    "phimoe": ("memcalc.families.phimoe", "Phimoe"),
    "deepseek_v2": ("memcalc.families.deepseek_v2", "DeepseekV2"),
    "deepseek_v3": ("memcalc.families.deepseek_v3", "DeepseekV3"),
    "qwen2_moe": ("memcalc.families.qwen2_moe", "Qwen2Moe"),
    "qwen3_moe": ("memcalc.families.qwen3_moe", "Qwen3Moe"),
}
"""`model_type` -> module and class, imported when it is asked for."""
