"""torchtitan's models: a name and a flavor as the config.json of transformers' model with the same sizes.

Source: torchtitan/models/*/__init__.py and model/args.py of v0.2.2, and torchtitan/models/llama/__init__.py of early 2025 for
Llama 2.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

LLAMA_3_VOCABULARY: Final = 128256
_TEST_VOCABULARY: Final = 2048
"""The words of the tokenizer of torchtitan's tests, which debug models have."""


class TitanModel(NamedTuple):
    """A model that torchtitan builds."""

    config: Mapping[str, Any]
    """As `load_model` takes it."""
    layers: int
    flex: bool
    """Attention is torch's FlexAttention or its varlen_attn, over the documents of a sequence."""
    experts: bool
    stand_in: str = ""
    """The reason for a model type of another name than torchtitan's."""


class _Llama(NamedTuple):
    dim: int
    layers: int
    heads: int
    kv_heads: int
    multiplier: float = 1.0
    multiple_of: int = 256

    @property
    def ffn(self) -> int:
        """Return the width of the MLP (FeedForward in torchtitan/models/llama3/model/model.py)."""
        return _up(int(self.multiplier * int(2 * 4 * self.dim / 3)), self.multiple_of)


class _Experts(NamedTuple):
    """The routed layers of a Llama 4 (TransformerBlock in torchtitan/models/llama4/model/model.py)."""

    number: int
    step: int


class _Qwen(NamedTuple):
    dim: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    tied: bool = False
    expert_ffn: int | None = None
    experts: int = 128
    longest: int = 4096


class _DeepSeek(NamedTuple):
    vocab: int
    dim: int
    ffn: int
    expert_ffn: int
    layers: int
    dense_layers: int
    heads: int
    experts: int
    shared: int
    per_token: int
    groups: tuple[int, int] = (1, 1)
    """The groups of experts, and those that a token may choose from."""
    q_rank: int | None = None


_LLAMA_2: Final[Mapping[str, _Llama]] = {
    "debugmodel": _Llama(256, 8, 16, 16),
    "271M": _Llama(1024, 16, 8, 8),
    "1B": _Llama(2048, 18, 16, 16),
    "7B": _Llama(4096, 32, 32, 32),
    "13B": _Llama(5120, 40, 40, 40),
    "26B": _Llama(5120, 80, 40, 40),
    "70B": _Llama(8192, 80, 64, 8, 1.3, 4096),
}
_LLAMA_3: Final[Mapping[str, _Llama]] = {
    "debugmodel": _Llama(256, 6, 16, 16),
    "8B": _Llama(4096, 32, 32, 8, 1.3, 1024),
    "70B": _Llama(8192, 80, 64, 8, 1.3, 4096),
    "405B": _Llama(16384, 126, 128, 8, 1.2, 4096),
}
_LLAMA_4: Final[Mapping[str, tuple[_Llama, _Experts]]] = {
    "debugmodel": (_Llama(256, 6, 16, 16), _Experts(8, 2)),
    "17bx16e": (_Llama(5120, 48, 40, 8, 1.2, 2048), _Experts(16, 1)),
    "17bx128e": (_Llama(5120, 48, 40, 8, 1.2, 2048), _Experts(128, 2)),
}
_QWEN_3: Final[Mapping[str, _Qwen]] = {
    "debugmodel": _Qwen(256, 8, 16, 8, 3072, tied=True),
    "0.6B": _Qwen(1024, 28, 16, 8, 3072, tied=True),
    "1.7B": _Qwen(2048, 28, 16, 8, 6144, tied=True),
    "4B": _Qwen(2560, 36, 32, 8, 9728, tied=True),
    "8B": _Qwen(4096, 36, 32, 8, 12288),
    "14B": _Qwen(5120, 40, 40, 8, 17408),
    "32B": _Qwen(5120, 64, 64, 8, 25600),
    "debugmodel_moe": _Qwen(256, 8, 16, 8, 3072, expert_ffn=768, experts=64),
    "30B-A3B": _Qwen(2048, 48, 32, 4, 6144, expert_ffn=768, longest=262144),
    "235B-A22B": _Qwen(4096, 94, 64, 4, 12288, expert_ffn=1536),
}
_DEEPSEEK_V3: Final[Mapping[str, _DeepSeek]] = {
    "debugmodel": _DeepSeek(_TEST_VOCABULARY, 256, 1024, 256, 6, 1, 16, 8, 2, 3),
    "16B": _DeepSeek(102400, 2048, 10944, 1408, 27, 1, 16, 64, 2, 6),
    "236B": _DeepSeek(102400, 5120, 12288, 1536, 60, 1, 128, 160, 2, 6, (8, 3), 1536),
    "671B": _DeepSeek(129280, 7168, 18432, 2048, 61, 3, 128, 256, 1, 8, (8, 4), 1536),
}
_OVER_DOCUMENTS: Final = ("_flex_attn", "_varlen_attn", "_flex", "_varlen", "_irope")
"""The end of a flavor's name if its attention is over documents."""
_OF_LLAMA_4: Final = (
    "transformers' own Llama 4 runs every expert over every token, so the estimate is of a Qwen2-MoE of its sizes, "
    "which routes tokens as torchtitan does"
)


def _llama(kind: _Llama, vocabulary: int, longest: int) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "vocab_size": vocabulary,
        "hidden_size": kind.dim,
        "intermediate_size": kind.ffn,
        "num_hidden_layers": kind.layers,
        "num_attention_heads": kind.heads,
        "num_key_value_heads": kind.kv_heads,
        "max_position_embeddings": longest,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    }


def _llama_2(flavor: str, vocabulary: int | None) -> TitanModel:
    kind = _LLAMA_2[flavor]
    return TitanModel(_llama(kind, vocabulary or 32000, 2048), kind.layers, flex=False, experts=False)


def _llama_3(flavor: str, vocabulary: int | None) -> TitanModel:
    kind = _LLAMA_3[flavor]
    words = vocabulary or (_TEST_VOCABULARY if flavor == "debugmodel" else LLAMA_3_VOCABULARY)
    return TitanModel(_llama(kind, words, 131072), kind.layers, flex=False, experts=False)


def _llama_4(flavor: str, vocabulary: int | None) -> TitanModel:
    kind, experts = _LLAMA_4[flavor]
    words = vocabulary or (_TEST_VOCABULARY if flavor == "debugmodel" else 202048)
    scaled = _up(int(int(kind.multiplier * int(2 * 4 * kind.dim / 3)) / 2), kind.multiple_of)
    config = {
        **_llama(kind, words, 1048576),
        "model_type": "qwen2_moe",
        "qkv_bias": False,
        "num_experts": experts.number,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": scaled,
        "shared_expert_intermediate_size": scaled,
        "decoder_sparse_step": experts.step,
    }
    return TitanModel(config, kind.layers, flex=False, experts=True, stand_in=_OF_LLAMA_4)


def _qwen_3(flavor: str, vocabulary: int | None) -> TitanModel:
    kind = _QWEN_3[flavor]
    words = vocabulary or (_TEST_VOCABULARY if flavor.startswith("debugmodel") else 151936)
    config: dict[str, Any] = {
        "model_type": "qwen3",
        "vocab_size": words,
        "hidden_size": kind.dim,
        "intermediate_size": kind.ffn,
        "num_hidden_layers": kind.layers,
        "num_attention_heads": kind.heads,
        "num_key_value_heads": kind.kv_heads,
        "head_dim": 128,
        "max_position_embeddings": kind.longest,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": kind.tied,
    }
    if kind.expert_ffn is not None:
        config |= {
            "model_type": "qwen3_moe",
            "num_experts": kind.experts,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": kind.expert_ffn,
            "norm_topk_prob": True,
        }
    return TitanModel(config, kind.layers, flex=False, experts=kind.expert_ffn is not None)


def _deepseek_v3(flavor: str, vocabulary: int | None) -> TitanModel:
    kind = _DEEPSEEK_V3[flavor]
    groups, chosen = kind.groups
    config = {
        "model_type": "deepseek_v3",
        "vocab_size": vocabulary or kind.vocab,
        "hidden_size": kind.dim,
        "intermediate_size": kind.ffn,
        "moe_intermediate_size": kind.expert_ffn,
        "num_hidden_layers": kind.layers,
        "first_k_dense_replace": kind.dense_layers,
        "num_attention_heads": kind.heads,
        "num_key_value_heads": kind.heads,
        "n_routed_experts": kind.experts,
        "n_shared_experts": kind.shared,
        "num_experts_per_tok": kind.per_token,
        "n_group": groups,
        "topk_group": chosen,
        "q_lora_rank": kind.q_rank,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "max_position_embeddings": 16384,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    }
    return TitanModel(config, kind.layers, flex=flavor != "debugmodel", experts=True)


_Build = Callable[[str, int | None], TitanModel]
_FAMILIES: Final[Mapping[str, tuple[Mapping[str, object], _Build]]] = {
    "llama2": (_LLAMA_2, _llama_2),
    "llama3": (_LLAMA_3, _llama_3),
    "llama4": (_LLAMA_4, _llama_4),
    "qwen3": (_QWEN_3, _qwen_3),
    "deepseek_v3": (_DEEPSEEK_V3, _deepseek_v3),
}
NAMES: Final = (*_FAMILIES,)


def flavors(name: str) -> tuple[str, ...]:
    """Return the flavors of a model; none if its name is not known."""
    return (*_FAMILIES[name][0],) if name in _FAMILIES else ()


def titan_model(name: str, flavor: str, seq_len: int, vocabulary: int | None = None) -> TitanModel | None:
    """Return a model; None if torchtitan has no such flavor of it.

    `vocabulary` is the tokenizer's where that decides it; torchtitan makes tables of positions as long as a sequence of
    `seq_len` tokens.
    """
    end = next((end for end in _OVER_DOCUMENTS if flavor.endswith(end)), "")
    plain = flavor.removesuffix(end)
    if plain not in flavors(name):
        return None
    model = _FAMILIES[name][1](plain, vocabulary)
    longest = max(seq_len, model.config["max_position_embeddings"])
    config = {**model.config, "max_position_embeddings": longest, "_name_or_path": f"{name} {flavor}"}
    return model._replace(config=config, flex=model.flex or bool(end))


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
