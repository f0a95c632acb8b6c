"""The modules that peft adapts by default, by model type.

Source: peft 0.21.2, utils/constants.py (TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING) and
utils/transformers_weight_conversion.py (_MODEL_TO_CONVERSION_PATTERN).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

TARGETS: Final[Mapping[str, tuple[str, ...]]] = {
    "bart": (
        "q_proj",
        "v_proj",
    ),
    "bert": (
        "query",
        "value",
    ),
    "bloom": ("query_key_value",),
    "codegen": ("qkv_proj",),
    "deberta-v2": (
        "query_proj",
        "value_proj",
    ),
    "electra": (
        "query",
        "value",
    ),
    "falcon": ("query_key_value",),
    "gemma": (
        "q_proj",
        "v_proj",
    ),
    "gemma2": (
        "q_proj",
        "v_proj",
    ),
    "gemma3_text": (
        "q_proj",
        "v_proj",
    ),
    "gpt2": ("c_attn",),
    "gpt_bigcode": ("c_attn",),
    "gpt_neo": (
        "q_proj",
        "v_proj",
    ),
    "gpt_neox": ("query_key_value",),
    "gptj": (
        "q_proj",
        "v_proj",
    ),
    "llama": (
        "q_proj",
        "v_proj",
    ),
    "mistral": (
        "q_proj",
        "v_proj",
    ),
    "mpt": ("Wqkv",),
    "nemotron_h": (
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
    ),
    "opt": (
        "q_proj",
        "v_proj",
    ),
    "phi": (
        "q_proj",
        "v_proj",
        "fc1",
        "fc2",
    ),
    "qwen2": (
        "q_proj",
        "v_proj",
    ),
    "qwen3": (
        "q_proj",
        "v_proj",
    ),
    "roberta": (
        "query",
        "value",
    ),
    "rwkv": (
        "key",
        "value",
        "receptance",
        "output",
    ),
    "stablelm": (
        "q_proj",
        "v_proj",
    ),
    "t5": (
        "q",
        "v",
    ),
    "xlm-roberta": (
        "query",
        "value",
    ),
}
"""Names of modules, of the types that have a program and that peft has defaults for."""

FUSED: Final = frozenset(
    {
        "afmoe",
        "deepseek_v2",
        "deepseek_v3",
        "dots1",
        "ernie4_5_moe",
        "exaone_moe",
        "flex_olmo",
        "glm4_moe",
        "glm4_moe_lite",
        "hunyuan_v1_moe",
        "minimax",
        "minimax_m2",
        "mixtral",
        "olmoe",
        "qwen3_moe",
        "qwen3_next",
        "solar_open",
    }
)
"""The types whose experts transformers 5 has fused. peft moves targets among the experts to whole parameters, and forgets
its defaults."""

WITHOUT: Final[Mapping[str, tuple[str, ...]]] = {
    **dict.fromkeys(("falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h"), ("out_proj",)),
    **dict.fromkeys(("gpt_oss", "llama4_text", "phimoe"), ("router",)),
}
"""Names that are no targets, by model type: out_proj is used as a bare weight (peft/tuners/tuners_utils.py,
mamba_model_types), and these routers are no plain linear layers."""

HEADS: Final = frozenset({"lm_predictions.lm_head.dense"})
"""The paths of layers that `get_output_embeddings` returns, and that are not over the vocabulary: all-linear leaves the head
out (DebertaV2ForMaskedLM without `legacy`)."""

OF_MAMBA: Final = frozenset(kind for kind, names in WITHOUT.items() if names == ("out_proj",))
"""The types whose out_proj peft refuses, and all-linear with it."""

NOT_ALL: Final = frozenset({"hunyuan_v1_moe", "jamba", *(kind for kind in WITHOUT if kind != "gpt_oss")})
"""The types for which all-linear is refused by peft, or means other modules than those that are called as linear layers."""
