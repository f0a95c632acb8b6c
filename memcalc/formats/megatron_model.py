"""The model that Megatron-LM's arguments describe, as the config.json of a model type with the same GPTModel.

Source: core_transformer_config_from_args of megatron/training/argument_utils.py, gpt_builders.py, and
core/transformer/transformer_config.py. `memcalc.families.base.architecture` has the GPTModel of each type.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from memcalc.formats.found import Value
from memcalc.formats.megatron_experts import experts_of, latent_type, routed_type
from memcalc.formats.megatron_section import Arguments
from memcalc.formats.megatron_vocabulary import vocabulary_of

_NORM: Final = "--normalization"
_POSITIONS: Final = "--position-embedding-type"
_KINDS: Final = ("rope", "yarn", "none", "learned_absolute", "mrope", "relative", "alibi")


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
    """Return the model and notes on it; None without arguments of a model. Raises InputError for a model that no type
    has."""
    if not {"--num-layers", "--encoder-num-layers", "--hidden-size", "--num-attention-heads"} & a.content.keys():
        return None, ()
    notes: list[str] = []
    shape = _shape(a, notes)
    dropouts = _dropouts(a)
    if _is_llama(a, notes):
        config = _llama(a, shape, notes)
        notes += [f"{shown}: dropout masks of this model are not counted (1 byte per element)" for shown in dropouts[1]]
    else:
        config = _gpt2(a, shape, *dropouts[0])
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


def _dropouts(a: Arguments) -> tuple[tuple[float, float], list[str]]:
    """Return the dropout of hidden states and of attention, 0.1 by default, and those above 0 as they are given."""
    values: list[float] = []
    shown: list[str] = []
    for key in ("--hidden-dropout", "--attention-dropout"):
        value = a.number(key)
        if value is not None and not 0 <= value < 1:
            a.refuse(key, "allowed: a probability from 0 up, below 1")
        values.append(0.1 if value is None else float(value))
        if values[-1]:
            shown.append(f"{key} 0.1, its default" if value is None else a.shown(key))
    if shown and shown[-1].startswith("--attention") and not _keeps_scores(a):
        shown.pop()  # a fused kernel makes the mask again in backward
    return (values[0], values[1]), shown


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


def _is_llama(a: Arguments, notes: list[str]) -> bool:
    """Tell whether layers are like Llama's: RMSNorm, SwiGLU, rotary positions, no biases of linear layers. Otherwise
    they are like GPT-2's: LayerNorm, GELU, learned positions, all biases. Raises InputError for a mixture."""
    norm = a.choice(_NORM, ("LayerNorm", "RMSNorm")) or "LayerNorm"
    positions = _positions(a)
    llama = {
        _NORM: norm == "RMSNorm",
        "--swiglu": a.on("--swiglu"),
        "--disable-bias-linear": a.on("--disable-bias-linear"),
        _POSITIONS: positions != "learned_absolute",
    }
    if all(llama.values()):
        if positions == "none":
            notes.append(f"{_POSITIONS} none: counted with rotary positions, whose kernels need a little more")
        return True
    if any(llama.values()):
        _refuse_mixture(a, llama)
    return False


def _refuse_mixture(a: Arguments, llama: Mapping[str, bool]) -> None:
    """Refuse layers between Llama's and GPT-2's, and name what is not as in the kind that most of them have."""
    is_llama = sum(llama.values()) > 1
    names = {
        _NORM: ("LayerNorm", "RMSNorm"),
        "--swiglu": ("GELU", "SwiGLU"),
        "--disable-bias-linear": ("biases of linear layers", "no biases of linear layers"),
        _POSITIONS: ("learned positions", "rotary positions"),
    }
    odd = next(key for key, value in llama.items() if value != is_llama)
    others = ", ".join(names[key][value] for key, value in llama.items() if value == is_llama)
    why = f"no modelled type has {names[odd][not is_llama]} with {others}"
    kinds = "RMSNorm, --swiglu, --disable-bias-linear and rope together, or none of them"
    a.reject(odd, f"{'is missing; ' if not a.given(odd) else ''}{why}; allowed: {kinds}")


def _gpt2(a: Arguments, shape: Shape, hidden_dropout: float, attention_dropout: float) -> dict[str, Any]:
    """Return the config.json of a gpt2 with the same layers."""
    like = "no modelled type with LayerNorm and GELU has it; allowed: leave it out"
    for key in ("--qk-layernorm", "--multi-latent-attention"):
        if a.on(key):
            a.reject(key, like)
    if a.whole("--num-experts"):
        a.reject("--num-experts", like)
    if shape.groups != shape.heads:
        a.reject("--group-query-attention", like)
    if shape.width * shape.heads != shape.hidden:
        a.reject(
            "--kv-channels", f"no modelled type with LayerNorm and GELU has heads that are not {shape.hidden} dims"
        )
    return {
        "model_type": "gpt2",
        "n_layer": shape.layers,
        "n_embd": shape.hidden,
        "n_head": shape.heads,
        "n_inner": shape.ffn,
        "n_positions": _wanted(a, "--max-position-embeddings"),
        "vocab_size": shape.vocab,
        "activation_function": "gelu_new",
        "resid_pdrop": hidden_dropout,
        "embd_pdrop": hidden_dropout,
        "attn_pdrop": attention_dropout,
        "tie_word_embeddings": shape.tied,
    }


def _llama(a: Arguments, shape: Shape, notes: list[str]) -> dict[str, Any]:
    """Return the config.json of a type with RMSNorm, SwiGLU and rotary positions."""
    experts = experts_of(a, shape.layers, shape.ffn, notes)
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
        return config | latent_type(a, experts, shape.layers, shape.ffn, notes)
    config |= {"num_key_value_heads": shape.groups, "head_dim": shape.width}
    if shape.heads % shape.groups:
        a.refuse("--num-query-groups", f"does not divide the {shape.heads} attention heads")
    normed, biased = a.on("--qk-layernorm"), a.on("--add-qkv-bias")
    if normed and biased:
        a.reject("--add-qkv-bias", "no modelled type has it with --qk-layernorm; allowed: one of them")
    if experts is not None:
        return config | routed_type(a, experts, normed=normed, biased=biased, notes=notes)
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
