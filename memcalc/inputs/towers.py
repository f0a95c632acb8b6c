"""The text tower of a model that also takes images or audio: the language model that its `text_config` describes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, cast

DEFAULT_TEXT_TYPES: Final[dict[str, str]] = {
    "audioflamingo3": "qwen2",
    "aya_vision": "cohere2",
    "blip-2": "opt",
    "cohere2_vision": "cohere2",
    "deepseek_vl": "llama",
    "deepseek_vl_hybrid": "llama",
    "fast_vlm": "qwen2",
    "fuyu": "persimmon",
    "gemma3": "gemma3_text",
    "glmasr": "llama",
    "got_ocr2": "qwen2",
    "granite_speech": "granite",
    "idefics2": "mistral",
    "idefics3": "llama",
    "instructblip": "opt",
    "instructblipvideo": "opt",
    "internvl": "qwen2",
    "janus": "llama",
    "kimi_k25": "deepseek_v3",
    "lighton_ocr": "qwen3",
    "llama4": "llama4_text",
    "llava": "llama",
    "llava_next": "llama",
    "llava_next_video": "llama",
    "llava_onevision": "qwen2",
    "mistral3": "mistral",
    "ovis2": "qwen2",
    "paligemma": "gemma",
    "perception_lm": "llama",
    "qwen2_audio": "qwen2",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "shieldgemma2": "gemma3_text",
    "smolvlm": "llama",
    "vibevoice": "qwen2",
    "video_llama_3": "qwen2",
    "video_llava": "llama",
    "vipllava": "llama",
    "voxtral": "llama",
}
"""The `model_type` that transformers assumes for a `text_config` without one, by the type of the whole model (the
configuration classes in models/*/configuration_*.py)."""


def text_tower(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the fields of the text tower; None if a configuration has none. If the whole model ties its embedding, the
    tower does too."""
    nested = config.get("text_config")
    if not isinstance(nested, Mapping):
        return None
    tower = dict(cast("Mapping[str, Any]", nested))
    if "model_type" not in tower and config.get("model_type") in DEFAULT_TEXT_TYPES:
        tower["model_type"] = DEFAULT_TEXT_TYPES[config["model_type"]]
    if tower.get("model_type") == "kimi_k2":
        tower["model_type"] = "deepseek_v3"
    if "tie_word_embeddings" not in tower and isinstance(config.get("tie_word_embeddings"), bool):
        tower["tie_word_embeddings"] = config["tie_word_embeddings"]
    return tower
