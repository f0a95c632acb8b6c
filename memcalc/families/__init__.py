"""Model families: each a program that reads like its `forward()`, found by transformers' `model_type`."""

from __future__ import annotations

from typing import Final

FAMILIES: Final[dict[str, tuple[str, str]]] = {
    "llama": ("memcalc.families.llama", "Llama"),
    "mistral": ("memcalc.families.mistral", "Mistral"),
    "qwen2": ("memcalc.families.qwen2", "Qwen2"),
    "qwen3": ("memcalc.families.qwen3", "Qwen3"),
    "phi3": ("memcalc.families.phi3", "Phi3"),
    "gemma": ("memcalc.families.gemma", "Gemma"),
    "gemma2": ("memcalc.families.gemma2", "Gemma2"),
    "gemma3_text": ("memcalc.families.gemma3_text", "Gemma3Text"),
    "gpt2": ("memcalc.families.gpt2", "GPT2"),
    "gpt_neox": ("memcalc.families.gpt_neox", "GPTNeoX"),
    "opt": ("memcalc.families.opt", "OPT"),
    "olmo": ("memcalc.families.olmo", "Olmo"),
    "olmo2": ("memcalc.families.olmo2", "Olmo2"),
    "olmo3": ("memcalc.families.olmo3", "Olmo3"),
    "glm": ("memcalc.families.glm", "Glm"),
    "glm4": ("memcalc.families.glm4", "Glm4"),
    "granite": ("memcalc.families.granite", "Granite"),
    "starcoder2": ("memcalc.families.starcoder2", "Starcoder2"),
    "cohere": ("memcalc.families.cohere", "Cohere"),
    "cohere2": ("memcalc.families.cohere2", "Cohere2"),
    "smollm3": ("memcalc.families.smollm3", "SmolLM3"),
    "exaone4": ("memcalc.families.exaone4", "Exaone4"),
    "ernie4_5": ("memcalc.families.ernie4_5", "Ernie45"),
    "helium": ("memcalc.families.helium", "Helium"),
    "seed_oss": ("memcalc.families.seed_oss", "SeedOss"),
    "hunyuan_v1_dense": ("memcalc.families.hunyuan_v1_dense", "HunYuanDenseV1"),
    "nemotron": ("memcalc.families.nemotron", "Nemotron"),
    "arcee": ("memcalc.families.arcee", "Arcee"),
    "cwm": ("memcalc.families.cwm", "Cwm"),
    "vaultgemma": ("memcalc.families.vaultgemma", "VaultGemma"),
    "hyperclovax": ("memcalc.families.hyperclovax", "HyperCLOVAX"),
    "jais2": ("memcalc.families.jais2", "Jais2"),
    "nanochat": ("memcalc.families.nanochat", "NanoChat"),
    "ministral": ("memcalc.families.ministral", "Ministral"),
    "ministral3": ("memcalc.families.ministral3", "Ministral3"),
    "bitnet": ("memcalc.families.bitnet", "BitNet"),
    "internlm3": ("memcalc.families.internlm3", "InternLM3"),
    "iquestcoder": ("memcalc.families.iquestcoder", "IQuestCoder"),
    "mixtral": ("memcalc.families.mixtral", "Mixtral"),
}
"""`model_type` -> module and class, imported when it is asked for."""
