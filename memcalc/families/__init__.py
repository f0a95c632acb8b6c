"""Model families: each a program that reads like its `forward()`, found by transformers' `model_type`.

`memcalc.families.base` holds the mechanisms; every other module is one family, and says which by its constant FAMILY.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

from memcalc.families.base.support import Support
from memcalc.registry import Registry, constant

if TYPE_CHECKING:
    from collections.abc import Callable

    from memcalc.families.base.support import Family

_LISTED: Final = (
    "llama", "mistral", "qwen2", "qwen3", "phi3", "gemma", "gemma2", "gemma3_text", "gpt_neox", "phi", "stablelm",
    "persimmon", "gptj", "codegen", "gpt_neo", "mpt", "gpt_bigcode", "bloom", "falcon", "opt", "olmo", "olmo2",
    "olmo3", "glm", "glm4", "granite", "starcoder2", "cohere", "cohere2", "smollm3", "exaone4", "ernie4_5", "helium",
    "seed_oss", "hunyuan_v1_dense", "nemotron", "nemotron_h", "apertus", "olmo_hybrid", "arcee", "cwm", "vaultgemma",
    "hyperclovax", "jais2", "nanochat", "ministral", "ministral3", "bitnet", "internlm3", "iquestcoder", "bert",
    "roberta", "xlm-roberta", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert", "roc_bert", "biogpt",
    "xglm", "openai-gpt", "ctrl", "gpt_neox_japanese", "mixtral", "rwkv", "mamba", "mamba2", "jamba", "falcon_h1",
    "bamba", "zamba2", "recurrent_gemma", "falcon_mamba", "granitemoe", "granitemoeshared", "granitemoehybrid",
    "ernie4_5_moe", "dbrx", "llama4_text", "minimax", "afmoe", "qwen2_moe", "modernbert", "deberta-v2", "t5", "bart",
    "whisper", "resnet", "lfm2", "lfm2_moe", "qwen3_next", "qwen3_5_text", "qwen3_moe", "olmoe", "flex_olmo",
    "qwen3_5_moe_text", "deepseek_v2", "deepseek_v3", "gpt2", "gpt_oss", "dots1", "glm4_moe", "glm4_moe_lite", "axk1",
    "hy_v3", "exaone_moe", "minimax_m2", "hunyuan_v1_moe", "solar_open", "phimoe",
)  # fmt: skip
"""The order in which model types are listed for a reader. Types that are not here follow."""

_OF_ENGINES: Final = ("megatron_gpt",)
"""Types that are an engine's own model. transformers does not know them, and no config.json of the Hub has them: they
are found by name and not listed."""
_OF_FILES: Final = ("layers",)
"""Types that a file of memcalc's own describes, found in the same way."""

FAMILIES: Final[Registry[Family]] = Registry(
    "memcalc.families", _LISTED, partial(constant, "FAMILY", "model_type"), unlisted=(*_OF_ENGINES, *_OF_FILES)
)
"""A map from `model_type` to its family. A family's module is imported when the family is asked for."""


def support_of(model_type: str) -> Support:
    """Return the record of what a model type can do; for a type without a program here, an empty record."""
    family = FAMILIES.get(model_type)
    return Support() if family is None else family.support


def supporting(can: Callable[[Support], object]) -> tuple[str, ...]:
    """Return the model types for whose record `can` is true, in the order of the list. It imports every family."""
    return tuple(model_type for model_type, family in FAMILIES.items() if can(family.support))
