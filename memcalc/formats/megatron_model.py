"""The model that Megatron-LM's arguments describe, as the config.json of a model type with the same GPTModel.

Source: core_transformer_config_from_args of megatron/training/argument_utils.py, gpt_builders.py, and
core/transformer/transformer_config.py. `memcalc.families.base.architecture` has the GPTModel of each type.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final, Literal, NamedTuple

from memcalc.families import FAMILIES
from memcalc.families.base.architecture import Architecture, architecture_of
from memcalc.formats.found import Value
from memcalc.formats.megatron_experts import (
    Experts,
    check_latent,
    experts_of,
    latent_dims,
    latent_type,
    own_experts,
    routed_type,
)
from memcalc.formats.megatron_section import Arguments
from memcalc.formats.megatron_vocabulary import vocabulary_of

_NORM: Final = "--normalization"
_POSITIONS: Final = "--position-embedding-type"
_KINDS: Final = ("rope", "yarn", "none", "learned_absolute", "mrope", "relative", "alibi")


class Dropouts(NamedTuple):
    """The probabilities of dropout."""

    hidden: float
    attention: float
    keeps_mask: bool
    """True if attention keeps the mask of its dropout. A fused kernel makes it again in backward."""
    shown: tuple[str, ...]
    """Those that cost memory, as they are given."""


class Shape(NamedTuple):
    """The sizes that every type has."""

    layers: int
    hidden: int
    heads: int
    groups: int
    width: int
    """The dims of a head."""
    ffn: int
    positions: int | None
    """The longest sequence; None if it is not known."""
    vocab: int
    tied: bool


def model_of(a: Arguments) -> tuple[Value | None, tuple[str, ...]]:
    """Return the model and notes on it; None without arguments of a model. Raises InputError for a model that GPTModel
    is not modelled for.

    It is a model of transformers if one has the same GPTModel, and a `megatron_gpt` otherwise.
    """
    if not {"--num-layers", "--encoder-num-layers", "--hidden-size", "--num-attention-heads"} & a.content.keys():
        return None, ()
    notes: list[str] = []
    shape = _shape(a, notes)
    dropouts = _dropouts(a)
    kind = _kind(a, shape, notes)
    experts = experts_of(a, shape.layers, shape.ffn, notes)
    own = _own(a, shape, kind, experts, dropouts)
    config = _of_transformers(a, shape, kind, experts, dropouts)
    if config is None or not (a.on("--deepspeed") or same_model(config, own, dropouts)):
        config = own
    elif kind.is_llama:
        notes += [
            f"{shown}: dropout masks of this model are not counted (1 byte per element)" for shown in dropouts.shown
        ]
    return Value(config, f"{a.file or a.option}: --num-layers, --hidden-size, …"), tuple(notes)


def _shape(a: Arguments, notes: list[str]) -> Shape:
    layers = _wanted(a, a.first("--num-layers", "--encoder-num-layers"), 10**4)
    hidden, heads = _wanted(a, "--hidden-size"), _wanted(a, "--num-attention-heads")
    width = a.whole("--kv-channels", 1, 10**7)
    if width is None:
        if hidden % heads:
            a.refuse("--num-attention-heads", f"does not divide --hidden-size {hidden}; allowed: with --kv-channels")
        width = hidden // heads
    groups = a.whole("--num-query-groups", 1, 10**7) or 1
    ffn = a.whole("--ffn-hidden-size", 1, 10**7)
    if ffn is None:
        ffn = int((4 * hidden * 2 / 3) / 64) * 64 if a.on("--swiglu") else 4 * hidden
    return Shape(
        layers,
        hidden,
        heads,
        groups if a.on("--group-query-attention") else heads,
        width,
        ffn,
        a.whole("--max-position-embeddings", 1, 10**7) or a.whole(a.first("--seq-length", "--encoder-seq-length"), 1),
        vocabulary_of(a, notes),
        not a.on("--untie-embeddings-and-output-weights"),
    )


def _wanted(a: Arguments, key: str, most: int = 10**7) -> int:
    value = a.whole(key, 1, most)
    if value is None:
        why = "its model is not described"
        if a.on("--use-checkpoint-args"):
            why = "--use-checkpoint-args takes it from a checkpoint"
        a.reject(key, f"is missing ({why}); allowed: a whole number from 1 to {most}")
    return value


def _dropouts(a: Arguments) -> Dropouts:
    """Return the dropouts, 0.1 by default."""
    values: list[float] = []
    shown: list[str] = []
    for key in ("--hidden-dropout", "--attention-dropout"):
        value = a.number(key)
        if value is not None and not 0 <= value < 1:
            a.refuse(key, "allowed: a number from 0 up, below 1")
        values.append(0.1 if value is None else float(value))
        if values[-1]:
            shown.append(f"{key} 0.1, its default" if value is None else a.shown(key))
    keeps = _keeps_scores(a)
    if shown and shown[-1].startswith("--attention") and not keeps:
        shown.pop()
    return Dropouts(values[0], values[1], keeps, tuple(shown))


def _keeps_scores(a: Arguments) -> bool:
    """Tell whether attention keeps the mask of its dropout: without a fused kernel, and in fp32."""
    if not a.on("--bf16") and not a.on("--fp16"):
        return True
    backend, layers = ("flash", "fused", "auto"), ("transformer_engine",)
    return a.given("--attention-backend", backend) or a.given("--transformer-impl", layers)


# --- the kinds of layers


def _positions(a: Arguments) -> str:
    if a.on("--use-rotary-position-embeddings"):
        return "rope"
    kind = a.choice(_POSITIONS, _KINDS) or "learned_absolute"
    if kind in ("mrope", "relative", "alibi"):
        a.refuse(_POSITIONS, "no modelled type has them; allowed: rope, yarn, none, learned_absolute")
    return kind


class Kind(NamedTuple):
    """The parts that layers are made of."""

    rms_norm: bool
    activation: Literal["swiglu", "gelu", "squared_relu"]
    biased: bool
    """True if all linear layers have biases."""
    learned: bool
    """True with a table of positions."""

    @property
    def is_llama(self) -> bool:
        return (self.rms_norm, self.activation, self.biased, self.learned) == (True, "swiglu", False, False)

    @property
    def is_gpt2(self) -> bool:
        return (self.rms_norm, self.activation, self.biased, self.learned) == (False, "gelu", True, True)


def _kind(a: Arguments, shape: Shape, notes: list[str]) -> Kind:
    """Return the kind of the layers. Raises InputError for heads that do not divide."""
    norm = a.choice(_NORM, ("LayerNorm", "RMSNorm")) or "LayerNorm"
    positions = _positions(a)
    if positions == "none":
        notes.append(f"{_POSITIONS} none: counted with rotary positions, whose kernels need a little more")
    if shape.heads % shape.groups:
        a.refuse("--num-query-groups", f"does not divide the {shape.heads} attention heads")
    learned = positions == "learned_absolute"
    if learned:
        _wanted(a, "--max-position-embeddings")
    return Kind(norm == "RMSNorm", _activation(a), not a.on("--disable-bias-linear"), learned)


def _activation(a: Arguments) -> Literal["swiglu", "gelu", "squared_relu"]:
    """Return the activation. Raises InputError for two of them (arguments.py, core_transformer_config_from_args)."""
    if not a.on("--squared-relu"):
        return "swiglu" if a.on("--swiglu") else "gelu"
    if a.on("--swiglu"):
        a.reject("--squared-relu", "Megatron refuses it beside --swiglu; allowed: one of them")
    if a.given("--num-experts", ("0",)):
        a.reject("--squared-relu", "experts with it are not modelled; allowed: --swiglu")
    return "squared_relu"


def _own(a: Arguments, shape: Shape, kind: Kind, experts: Experts | None, dropouts: Dropouts) -> dict[str, Any]:
    """Return the config.json of a megatron_gpt. Raises InputError for what its GPTModel is not modelled with."""
    config: dict[str, Any] = {
        "model_type": "megatron_gpt",
        "num_layers": shape.layers,
        "hidden_size": shape.hidden,
        "num_attention_heads": shape.heads,
        "num_query_groups": shape.groups,
        "kv_channels": shape.width,
        "ffn_hidden_size": shape.ffn,
        "vocab_size": shape.vocab,
        "position_embedding_type": "learned_absolute" if kind.learned else "rope",
        "normalization": "RMSNorm" if kind.rms_norm else "LayerNorm",
        "swiglu": kind.activation == "swiglu",
        "add_bias_linear": kind.biased,
        "add_qkv_bias": a.on("--add-qkv-bias"),
        "qk_layernorm": a.on("--qk-layernorm"),
        "untie_embeddings_and_output_weights": not shape.tied,
        "hidden_dropout": dropouts.hidden,
        "attention_dropout": dropouts.attention,
    }
    if kind.activation == "squared_relu":
        config["squared_relu"] = True
    predictions = a.whole("--mtp-num-layers", 0, 1000)
    if predictions:
        config["mtp_num_layers"] = predictions
    if shape.positions is not None:
        config["max_position_embeddings"] = shape.positions
    if experts is not None:
        if kind.biased:
            a.reject("--num-experts", "experts with biases are not modelled; allowed: with --disable-bias-linear")
        config |= own_experts(a, experts, shape.layers)
    if a.on("--multi-latent-attention"):
        check_latent(a)
        config |= {"multi_latent_attention": True, "num_query_groups": shape.heads, **latent_dims(a)}
    return config


def _of_transformers(
    a: Arguments, shape: Shape, kind: Kind, experts: Experts | None, dropouts: Dropouts
) -> dict[str, Any] | None:
    """Return the config.json of the type of transformers that is most like these layers; None if there is none."""
    if kind.is_llama:
        return _llama(a, shape, experts)
    like_gpt2 = kind.is_gpt2 and experts is None and not a.on("--qk-layernorm") and shape.groups == shape.heads
    if like_gpt2 and shape.width * shape.heads == shape.hidden:
        return _gpt2(a, shape, dropouts)
    return None


def _gpt2(a: Arguments, shape: Shape, dropouts: Dropouts) -> dict[str, Any]:
    return {
        "model_type": "gpt2",
        "n_layer": shape.layers,
        "n_embd": shape.hidden,
        "n_head": shape.heads,
        "n_inner": shape.ffn,
        "n_positions": _wanted(a, "--max-position-embeddings"),
        "vocab_size": shape.vocab,
        "activation_function": "gelu_new",
        "resid_pdrop": dropouts.hidden,
        "embd_pdrop": dropouts.hidden,
        "attn_pdrop": dropouts.attention,
        "tie_word_embeddings": shape.tied,
    }


def _llama(a: Arguments, shape: Shape, experts: Experts | None) -> dict[str, Any] | None:
    config: dict[str, Any] = {
        "num_hidden_layers": shape.layers,
        "hidden_size": shape.hidden,
        "num_attention_heads": shape.heads,
        "intermediate_size": shape.ffn,
        "vocab_size": shape.vocab,
        "tie_word_embeddings": shape.tied,
        "hidden_act": "silu",
    }
    if shape.positions is not None:
        config["max_position_embeddings"] = shape.positions
    if a.on("--multi-latent-attention"):
        config["num_key_value_heads"] = shape.heads  # each has keys of its own
        of_latent = latent_type(a, experts, shape.layers, shape.ffn)
        return None if of_latent is None else config | of_latent
    config |= {"num_key_value_heads": shape.groups, "head_dim": shape.width}
    normed, biased = a.on("--qk-layernorm"), a.on("--add-qkv-bias")
    if normed and biased:
        return None
    if experts is not None:
        of_experts = routed_type(experts, normed=normed, biased=biased)
        return None if of_experts is None else config | of_experts
    return config | _dense_type(shape, normed=normed, biased=biased)


def _dense_type(shape: Shape, *, normed: bool, biased: bool) -> dict[str, Any]:
    """Return the type of a model without experts: by its norms of queries and keys and its biases of them."""
    if normed:
        return {"model_type": "qwen3"}
    if biased:
        return {"model_type": "qwen2"}
    if shape.width * shape.heads != shape.hidden:  # llama's hidden size is that of all heads
        return {"model_type": "mistral", "sliding_window": None}
    return {"model_type": "llama"}


def same_model(one: Mapping[str, Any], other: Mapping[str, Any], dropouts: Dropouts) -> bool:
    """Tell whether two configurations have the same GPTModel. What no layer uses does not count. A type of transformers
    may refuse the sizes."""
    try:
        return _used(one, dropouts) == _used(other, dropouts)
    except ValueError:
        return False


def _used(config: Mapping[str, Any], dropouts: Dropouts) -> Architecture:
    """Return the architecture of a configuration, without the fields that no layer uses."""
    model_type = str(config["model_type"])
    a = architecture_of(model_type, FAMILIES[model_type].program.Config.trusted(config))
    if not dropouts.keeps_mask:
        a = replace(a, attention_dropout=0.0)
    if a.latent is not None:
        a = replace(a, head_dim=0)
    experts = a.experts
    if experts is None or len(experts.dense) == a.layers:
        return replace(a, experts=None)
    if experts.sigmoid:
        experts = replace(experts, normalised=False)  # is about a softmax
    return replace(a, experts=experts, ffn=a.ffn if experts.dense else 0)
