"""Loading of a user's JSON, YAML or TOML file as one mapping of plain values. Whatever the file holds, this ends soon."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final, NoReturn, cast

from memcalc.errors import InputError, one_line
from memcalc.inputs.bounded import TooLarge, read_bounded
from memcalc.units import MIB

_MOST: Final = 1 * MIB
"""The bytes of the largest file that is read: these files are written by hand, and have some KiB."""
_DEEPEST: Final = 64
_VALUES: Final = 20_000
"""The values of a file, each reference to another place of it counted with all that it refers to."""

_DIGITS: Final = 4300
"""The most digits of a number, Python's own limit for decimal ones."""

_PROGRAMS: Final = {
    "--torchtitan": "torchtitan's configurations in Python, which it has since v0.2.2, are not read; allowed: a TOML up to "
    "v0.2.2, or options in its place, such as --model llama-3-8b --engine fsdp2 --gpus 8"
}
"""Why a tool's file in Python is refused."""
_DOTS: Final = re.compile(r"""[\w"'-][ \t]*\.[ \t]*(?=[\w"'-])""")
"""A dot between two parts of a TOML key."""
_PARTS: Final = re.compile(r"[^\w.\s\"'-]+")


def load(option: str, source: str | os.PathLike[str] | Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Return the name of a file and its content; "" and the mapping itself for a mapping.

    The suffix tells the format: .json, .yaml, .yml, .toml; another file may be JSON or YAML. Raises InputError.
    """
    if isinstance(source, Mapping):
        _check_size(option, source)
        return "", source
    if not os.fspath(source):
        raise InputError(f"{option} '': expected the path of a configuration file")
    path = Path(source)
    return path.name, mapping(option, path, text_of(option, path))


def text_of(option: str, path: Path) -> str:
    """Return the text of a file. Raises InputError if it cannot be read, is too large or is not UTF-8."""
    try:
        return read_bounded(path, _MOST).decode("utf-8-sig")
    except TooLarge as error:
        _refuse(option, path, f"{error}; expected a configuration file")
    except UnicodeDecodeError:
        _refuse(option, path, "is not UTF-8 text; expected a configuration file")
    except OSError as error:
        _refuse(option, path, f"cannot be read ({error.strerror}); expected a configuration file")
    except ValueError:  # a null byte in the name
        _refuse(option, path, "cannot be read; expected a configuration file")


def mapping(option: str, path: Path, text: str) -> Mapping[str, Any]:
    """Return the mapping that a file's text holds. Raises InputError."""
    kind = path.suffix.lower()
    if kind == ".py":
        why = "is a program, and what it configures is known when it runs; allowed: a file of JSON, YAML or TOML"
        _refuse(option, path, _PROGRAMS.get(option, why))
    try:
        if kind == ".toml":
            content = _toml(text)
        elif kind == ".json" or (kind not in (".yaml", ".yml") and text.lstrip().startswith("{")):
            content = json.loads(text, object_pairs_hook=_unique)
        else:
            content = yaml_values(text)
    except (ValueError, RecursionError, OverflowError) as error:
        kinds = {".json": "JSON", ".toml": "TOML"}
        _refuse(option, path, f"not valid {kinds.get(kind, 'YAML')} ({one_line(error)})")
    if not isinstance(content, Mapping):
        _refuse(option, path, f"holds {_kind(content)}; expected a mapping of keys")
    _check_size(f"{option} {one_line(path)}", cast("Mapping[str, Any]", content))
    return cast("Mapping[str, Any]", content)


def yaml_values(text: str) -> Any:
    """Return the value of a YAML text. Raises ValueError, also for a text that is too deep."""
    import yaml as library

    yaml: Any = library  # its stubs leave out types
    loader = _with_bounded_merges(getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    try:
        depth = 0  # read without recursion first: the composer of C code has no limit of its own
        for events, event in enumerate(yaml.parse(text, Loader=loader)):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > _DEEPEST or events > _VALUES:
                raise ValueError("too deep or too large")
            if isinstance(event, yaml.ScalarEvent) and len(event.value) > _DIGITS and _is_number(event):
                raise ValueError(f"line {event.start_mark.line + 1}: a number of thousands of digits")
        return yaml.load(text, Loader=loader)
    except yaml.YAMLError as error:
        raise ValueError(_yaml_problem(error)) from None
    except (TypeError, AttributeError, KeyError) as error:  # a key that is a list, a value that a tag does not take
        raise ValueError(one_line(error)) from None


@cache
def _with_bounded_merges(loader: Any) -> Any:
    """Return a loader that copies up to `_VALUES` keys for merge keys ("<<: *other"), each of which copies whole mappings."""
    merge = "tag:yaml.org,2002:merge"

    class Bounded(loader):  # type: ignore[misc]
        copied = 0

        def flatten_mapping(self, node: Any) -> None:
            for key, value in node.value:
                if key.tag != merge:
                    continue
                for one in value.value if value.id == "sequence" else [value]:
                    if one.id == "mapping":
                        self.flatten_mapping(one)
                        self.copied += len(one.value)
                    if self.copied > _VALUES:
                        raise ValueError("too deep or too large")
            loader.flatten_mapping(self, node)

    return Bounded


def _is_number(event: Any) -> bool:
    """Tell whether a scalar may be a number; one in base 60 takes a time that grows with the square of its length."""
    return bool(event.tag or event.implicit[0]) and event.value[:1] in (*"+-.0123456789",)


def _yaml_problem(error: Exception) -> str:
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    if mark is None or problem is None:
        return one_line(error)
    return f"line {mark.line + 1}: {one_line(problem)}"


def _toml(text: str) -> Any:
    import tomllib

    for number, line in enumerate(text.splitlines(), 1):  # a key of n parts takes a time that grows with n's square
        if line.count(".") > _DEEPEST and any(len(_DOTS.findall(part)) > _DEEPEST for part in _PARTS.split(line)):
            raise ValueError(f"line {number}: too deep or too large")
    return tomllib.loads(text)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the pairs as a dict. Raises ValueError for a key that is there twice, as DeepSpeed's own reading does."""
    out: dict[str, Any] = {}
    for key, value in pairs:
        if key in out:
            raise ValueError(f"the key {one_line(key)} is there twice")
        out[key] = value
    return out


def _check_size(option: str, content: Mapping[Any, Any]) -> None:
    """Raise InputError for content that is too deep, refers to itself, or is too large with all its references."""
    values = 0
    waiting: list[tuple[Any, int]] = [(content, 1)]
    while waiting:
        value, depth = waiting.pop()
        values += 1
        if depth > _DEEPEST or values > _VALUES:
            raise InputError(f"{option}: too deep or too large; expected a configuration file")
        if isinstance(value, Mapping):
            for key in cast("Mapping[Any, Any]", value):
                if not isinstance(key, (str, int, float, bool)):
                    raise InputError(f"{option}: the key {one_line(key)} is not a name; expected a configuration file")
            waiting += [(one, depth + 1) for one in cast("Mapping[Any, Any]", value).values()]
        elif isinstance(value, (list, tuple)):
            waiting += [(one, depth + 1) for one in cast("list[Any]", value)]


def _kind(content: Any) -> str:
    words = {"list": "a list", "str": "text", "NoneType": "nothing", "int": "a number", "float": "a number"}
    return words.get(type(content).__name__, "a value")


def _refuse(option: str, path: Path, why: str) -> NoReturn:
    raise InputError(f"{option} {one_line(path)}: {why}") from None
