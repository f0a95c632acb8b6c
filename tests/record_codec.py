"""How a call of an oracle and what it returns are written as JSON, and read again by the annotations of the oracle."""

from __future__ import annotations

import functools
import inspect
import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from memcalc.core.dims import Dim

Hint = Any
OFF = (
    ("lora_rank", 0), ("quantize", "none"), ("task", "pretrain"), ("offload_optimizer", "none"), ("offload_params", "none"),
    ("liger", "rope,rms_norm,swiglu"), ("liger", "rope,rms_norm,geglu"), ("zero_hpz_partition_size", 1),
    ("tp_dims", "1"), ("autotp", False), ("packing", False), ("offload_activations", "none"),
    ("reentrant_checkpoints", False),
    ("quantize_storage", "uint8"), ("precision_aware_optimizer", False), ("fp8_param_gather", False),
    ("flash_attention_version", 2),
)  # fmt: skip
"""The values of options that switch something off, or leave a part of it on that was always on."""
PLAIN = (NoneType, bool, int, float, str)


def dumped(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


# --- a call


def call_of(signature: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """The arguments by name, those that equal their default left out: a parameter that is new changes no call."""
    given = signature.bind(*args, **kwargs).arguments
    parameters = signature.parameters
    kept = {name: argument(value) for name, value in given.items() if not _is_default(value, parameters[name].default)}
    return json.dumps(kept, sort_keys=True, ensure_ascii=False)


def argument(value: Any) -> Any:
    """An argument as JSON; TypeError for one that does not say what it is."""
    if isinstance(value, PLAIN):
        return value
    if is_dataclass(value) and not isinstance(value, type):
        own = {field.name: (getattr(value, field.name), field.default) for field in fields(value)}
        return _named(own)
    if hasattr(value, "_asdict"):
        defaults = value._field_defaults
        return _named({name: (one, defaults.get(name, MISSING)) for name, one in value._asdict().items()})
    if isinstance(value, Mapping):
        return {str(name): argument(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [argument(one) for one in value]
    if type(value).__module__ == "torch" and type(value).__name__ == "dtype":
        return str(value)
    if hasattr(value, "setup") and hasattr(value, "model"):
        return _report(value)
    if isinstance(value, Dim):
        return [value.name, value.size]
    if isinstance(value, functools.partial):
        return [argument(value.func), *map(argument, value.args), argument(value.keywords)]
    if callable(value) and "<" not in getattr(value, "__qualname__", "<"):
        return f"{value.__module__}.{value.__qualname__}"
    raise TypeError(f"{value!r} of type {type(value)} cannot be part of a call that is on record")


def _named(own: Mapping[str, tuple[Any, Any]]) -> dict[str, Any]:
    return {name: argument(one) for name, (one, default) in own.items() if not _is_default(one, default)}


def _is_default(value: Any, default: Any) -> bool:
    return type(value) is type(default) and bool(value == default)


def _report(report: Any) -> dict[str, Any]:
    """What of an estimate decides how its setup is run: the model's fields, the options and the rank, no numbers."""
    given = {
        name: argument(one)
        for name, one in report.setup._asdict().items()
        if one is not None and one is not False and (name, one) not in OFF  # as before there were these options
    }
    rank = {"number": report.rank.number, "cp": report.rank.cp}
    return {"fields": argument(report.model.fields), "setup": given, "rank": rank}


# --- a result


def written(value: Any) -> Any:
    """A result as JSON: tuples and sets are lists, a mapping of other keys than strings is a list of pairs."""
    if isinstance(value, PLAIN):
        return value
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: written(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, (set, frozenset)):
        return sorted(written(one) for one in value)
    if isinstance(value, Mapping):
        if all(isinstance(name, str) for name in value):
            return {name: written(one) for name, one in value.items()}
        return sorted(([written(name), written(one)] for name, one in value.items()), key=repr)
    if isinstance(value, (list, tuple)):
        return [written(one) for one in value]
    raise TypeError(f"{value!r} of type {type(value)} cannot be put on record")


def reader(hint: Hint) -> Callable[[Any], Any]:
    """What makes a value of this type of what `written` made of one."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        (other,) = (reader(one) for one in args if one is not NoneType)
        return lambda value: None if value is None else other(value)
    if origin is list:
        one = reader(args[0])
        return lambda value: [one(each) for each in value]
    if origin is set:
        one = reader(args[0])
        return lambda value: {one(each) for each in value}
    if origin is tuple:
        return _tuple(args)
    if origin in (dict, Counter, Mapping):
        return _mapping(Counter if origin is Counter else dict, args)
    if hasattr(hint, "_fields"):
        own = [reader(one) for one in get_type_hints(hint).values()]
        return lambda value: hint(*(read(each) for read, each in zip(own, value, strict=True)))
    if is_dataclass(hint):
        hints = get_type_hints(hint)
        by_name = {field.name: reader(hints[field.name]) for field in fields(hint)}
        return lambda value: hint(**{name: read(value[name]) for name, read in by_name.items()})
    return lambda value: value


def _tuple(args: tuple[Hint, ...]) -> Callable[[Any], Any]:
    if len(args) == 2 and args[1] is Ellipsis:
        one = reader(args[0])
        return lambda value: tuple(one(each) for each in value)
    own = [reader(one) for one in args]
    return lambda value: tuple(read(each) for read, each in zip(own, value, strict=True))


def _mapping(kind: type[Any], args: tuple[Hint, ...]) -> Callable[[Any], Any]:
    key = reader(args[0])
    one = reader(args[1] if len(args) == 2 else int)

    def read(value: Any) -> Any:
        pairs = value.items() if isinstance(value, dict) else value
        return kind({key(name): one(each) for name, each in pairs})

    return read
