"""The parts of a model that `--freeze` names, as sets of its weights.

A part is a word (embeddings, head, norms, bias, attention, mlp, encoder), the first or last layers (first:N, last:N), or a
pattern of parameter names. `all-but:PART+PART` is everything that none of its parts has.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Final

from memcalc.inputs.options import refuse

if TYPE_CHECKING:
    from memcalc.families.base.module import Weight
    from memcalc.families.base.program import Program

PARTS: Final = ("embeddings", "head", "norms", "bias", "attention", "mlp", "encoder")
ALLOWED: Final = (
    f"{', '.join(PARTS)}, first:N, last:N, a pattern of parameter names (*.q_proj.weight), all-but:PART+PART"
)
_ALL_BUT: Final = "all-but:"
_NORM: Final = re.compile(r"\w*norm\w*|ln\w*", re.IGNORECASE)
_ATTENTION: Final = re.compile(r"\w*(attn|attention)\w*", re.IGNORECASE)
_MLP: Final = re.compile(r"\w*(mlp|ffn|feed_forward|experts?|moe)\w*", re.IGNORECASE)

Weights = frozenset[int]
"""Weights by their places in definition order."""


def frozen_by(text: str, program: Program) -> Weights:
    """Return the weights that `--freeze text` freezes. Raises InputError for a part that the model does not have."""
    weights = list(program.weights())
    found: set[int] = set()
    for part in _listed(text):
        found |= _part(text, part, program, weights)
    return frozenset(found)


def _listed(text: str) -> list[str]:
    """Return the parts of a list with commas. Outside of all-but, plus signs are commas too."""
    parts = (part.strip() for part in text.split(","))
    split = ([part] if part.startswith(_ALL_BUT) else [one.strip() for one in part.split("+")] for part in parts)
    return [one for group in split for one in group]


def _part(text: str, part: str, program: Program, weights: list[Weight]) -> Weights:
    if part.startswith(_ALL_BUT):
        kept = (_part(text, one.strip(), program, weights) for one in part.removeprefix(_ALL_BUT).split("+"))
        return frozenset(range(len(weights))).difference(*kept)
    test = _layers(text, part, weights) or _word(part, program, weights) or _pattern(part, weights)
    found = frozenset(i for i, weight in enumerate(weights) if test(weight)) if part else frozenset[int]()
    if not found:
        why = f"this model has no parameters in {part or 'an empty part'}"
        refuse("freeze", text, f"{why}; allowed: {allowed_of(weights)}")
    return found


def allowed_of(weights: list[Weight]) -> str:
    """Return what a part can be, with a name that the weights have."""
    joined = any(weight.name.endswith(".linear_qkv.weight") for weight in weights)
    return ALLOWED.replace("q_proj", "linear_qkv") if joined else ALLOWED


def _layers(text: str, part: str, weights: list[Weight]) -> Callable[[Weight], bool] | None:
    """Return the test of the first or last layers of each stack; None for another part."""
    match = re.fullmatch(r"(first|last):(.*)", part)
    if match is None:
        return None
    depths: dict[str, int] = {}
    for weight in weights:
        if weight.layer is not None:
            depths[_stack(weight)] = max(depths.get(_stack(weight), 0), weight.layer + 1)
    most = max(depths.values(), default=0)
    if not most:
        named = next((weight.name.rpartition(".")[0] for weight in weights), "module")
        refuse("freeze", text, f"this model has no stack of numbered layers; allowed: modules by name, such as {named}")
    if not re.fullmatch(r"[0-9]{1,9}", match[2]) or not 1 <= int(match[2]) <= most:
        refuse("freeze", text, f"allowed in {match[1]}:N: a whole number from 1 to {most}, the layers")
    n = int(match[2])
    if match[1] == "first":
        return lambda weight: weight.layer is not None and weight.layer < n
    return lambda weight: weight.layer is not None and weight.layer >= depths[_stack(weight)] - n


def _stack(weight: Weight) -> str:
    return weight.name.split("*")[0]


def _word(part: str, program: Program, weights: list[Weight]) -> Callable[[Weight], bool] | None:
    """Return the test of a part that is a word; None for a pattern."""
    tests: Mapping[str, Callable[[Weight], bool]] = {
        "embeddings": lambda weight: weight.component == "embedding",
        "head": _head(program, weights),
        "norms": lambda weight: weight.component == "norm" or _NORM.fullmatch(_modules(weight)[-1]) is not None,
        "bias": lambda weight: weight.name.rpartition(".")[2].endswith("bias"),
        "attention": lambda weight: weight.component == "attention" or _within(weight, _ATTENTION),
        "mlp": lambda weight: weight.component in ("mlp", "experts", "router") or _within(weight, _MLP),
        "encoder": lambda weight: "encoder" in _modules(weight),
    }
    return tests.get(part)


def _head(program: Program, weights: list[Weight]) -> Callable[[Weight], bool]:
    """Return the test of the head. A head that is tied has the weight of the embedding."""
    sized: Any = program
    vocab: int | None = getattr(sized.config, "vocab_size", None)
    if vocab is None and hasattr(sized, "vocab"):  # Megatron's GPTModel, whose configuration has other names
        vocab = sized.vocab.size

    def over_the_vocabulary(weight: Weight) -> bool:
        return len(weight.shape) == 2 and any(dim.size == vocab for dim in weight.shape)

    own = [weight for weight in weights if weight.component == "head"]
    tied = [weight for weight in weights if weight.component == "embedding" and over_the_vocabulary(weight)]
    if tied and not any(map(over_the_vocabulary, own)):
        own.append(tied[0])
    return own.__contains__


def _modules(weight: Weight) -> list[str]:
    """Return the names of the modules around a weight, from the outside in."""
    return weight.name.split(".")[:-1] or [""]


def _within(weight: Weight, pattern: re.Pattern[str]) -> bool:
    """Tell whether a module around the weight has such a name. A norm before or behind the module is not in it."""
    return any(pattern.fullmatch(name) and not _NORM.fullmatch(name) for name in _modules(weight))


def _pattern(part: str, weights: list[Weight]) -> Callable[[Weight], bool]:
    """Return the test of a pattern: whole names of modules or parameters, a shell pattern of the whole name or, if no name
    matches that, a regular expression."""

    def has_names(weight: Weight) -> bool:
        return f".{part}." in f".{full_name(weight)}."

    def matches(weight: Weight) -> bool:
        return fnmatchcase(full_name(weight), part)

    for test in (has_names, matches):
        if any(map(test, weights)):
            return test
    try:
        expression = re.compile(part)
    except re.error:
        return lambda weight: False
    return lambda weight: expression.search(full_name(weight)) is not None


def full_name(weight: Weight) -> str:
    """Return a weight's name with the number of its layer."""
    return weight.name if weight.layer is None else weight.name.replace("*", str(weight.layer), 1)
