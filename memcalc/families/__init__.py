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
    "phi": ("memcalc.families.phi", "Phi"),
    "stablelm": ("memcalc.families.stablelm", "StableLm"),
    "persimmon": ("memcalc.families.persimmon", "Persimmon"),
    "gptj": ("memcalc.families.gptj", "GPTJ"),
    "codegen": ("memcalc.families.codegen", "CodeGen"),
    "gpt_neo": ("memcalc.families.gpt_neo", "GPTNeo"),
    "mpt": ("memcalc.families.mpt", "Mpt"),
    "gpt_bigcode": ("memcalc.families.gpt_bigcode", "GPTBigCode"),
    "bloom": ("memcalc.families.bloom", "Bloom"),
    "falcon": ("memcalc.families.falcon", "Falcon"),
    "opt": ("memcalc.families.opt", "OPT"),
    "bert": ("memcalc.families.bert", "Bert"),
    "roberta": ("memcalc.families.roberta", "Roberta"),
    "xlm-roberta": ("memcalc.families.roberta", "XLMRoberta"),
    "camembert": ("memcalc.families.roberta", "Camembert"),
    "data2vec-text": ("memcalc.families.roberta", "Data2VecText"),
    "electra": ("memcalc.families.electra", "Electra"),
    "ernie": ("memcalc.families.ernie", "Ernie"),
    "megatron-bert": ("memcalc.families.megatron_bert", "MegatronBert"),
    "roc_bert": ("memcalc.families.roc_bert", "RoCBert"),
    "biogpt": ("memcalc.families.biogpt", "BioGpt"),
    "xglm": ("memcalc.families.xglm", "XGLM"),
    "openai-gpt": ("memcalc.families.openai_gpt", "OpenAIGPT"),
    "ctrl": ("memcalc.families.ctrl", "CTRL"),
    "gpt_neox_japanese": ("memcalc.families.gpt_neox_japanese", "GPTNeoXJapanese"),
    "mixtral": ("memcalc.families.mixtral", "Mixtral"),
}
"""`model_type` -> module and class, imported when it is asked for."""
