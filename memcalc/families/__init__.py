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
}
"""`model_type` -> module and class, imported when it is asked for."""
