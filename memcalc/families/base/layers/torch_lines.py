"""Lines of nn.Sequential's repr as calls: `(0): Conv2d(3, 64, kernel_size=(3, 3), stride=(1, 1))`.

The reader knows names, numbers, words, tuples and nothing else; nothing is evaluated.
"""

from __future__ import annotations

import re
from typing import Any, Final, NamedTuple

from memcalc.errors import one_line

_CALL: Final = re.compile(r"^(?:torch\.)?(?:nn\.)?([A-Za-z_][A-Za-z0-9_]*)\s*\((.*)\)\s*,?$", re.DOTALL)
_PREFIX: Final = re.compile(r"^\(([A-Za-z0-9_]+)\)\s*:\s*")
_OPENS: Final = re.compile(r"^(?:torch\.)?(?:nn\.)?([A-Za-z_][A-Za-z0-9_]*)\s*\($")
_NAMED: Final = re.compile(r"^([A-Za-z_][A-Za-z0-9_]*)\s*=(?!=)\s*(.*)$", re.DOTALL)
_NUMBER: Final = re.compile(r"^[+-]?(\d{1,15}(\.\d{0,30})?|\.\d{1,30})([eE][+-]?\d{1,3})?$")
_WORDS: Final = {"True": True, "False": False, "None": None}
_LONGEST: Final = 1000
"""The most letters of a line."""


class Called(NamedTuple):
    """A call: the name of a class, its arguments without and with names."""

    name: str
    arguments: list[Any]
    named: dict[str, Any]


def is_call(text: str) -> bool:
    """Tell whether a text is meant as a call."""
    return "(" in text


def parse_repr(text: str, where: str) -> list[Any]:
    """Return the calls of a repr of several lines; nested modules are lists. Raises ValueError."""
    stack: list[list[Any]] = [[]]
    for i, line in enumerate(text.splitlines(), start=1):
        plain = _PREFIX.sub("", line.strip())
        if not plain or plain.startswith("#"):
            continue
        opened = _OPENS.match(plain)
        if opened is not None:
            if opened[1] != "Sequential":
                raise ValueError(
                    f"{where} line {i}: {one_line(plain)}: modules of one's own are not read; allowed: Sequential("
                )
            if len(stack) > 16:
                raise ValueError(f"{where} line {i}: modules are nested too deep; allowed: 16 levels")
            stack.append([])
        elif plain.rstrip(",") == ")":
            if len(stack) == 1:
                raise ValueError(f"{where} line {i}: a ) too many")
            inner = stack.pop()
            stack[-1].append(inner)
        else:
            stack[-1].append(parse_call(plain, f"{where} line {i}"))
    if len(stack) > 1:
        raise ValueError(f"{where}: a ) is missing at the end")
    (calls,) = stack
    return calls[0] if len(calls) == 1 and isinstance(calls[0], list) else calls  # type: ignore[no-any-return]


def parse_call(text: str, where: str) -> Called:
    """Return one call. Raises ValueError."""
    plain = _PREFIX.sub("", text.strip())
    match = _CALL.match(plain) if len(plain) <= _LONGEST else None
    if match is None:
        raise ValueError(f"{where} {one_line(text)}: expected a line such as Conv2d(3, 64, kernel_size=3)")
    arguments: list[Any] = []
    named: dict[str, Any] = {}
    for part in _parts(match[2], where, text):
        keyword = _NAMED.match(part)
        if keyword is None:
            if named:
                raise ValueError(f"{where} {one_line(text)}: {one_line(part)} follows a named argument")
            arguments.append(_value(part, where, text))
        elif keyword[1] in named:
            raise ValueError(f"{where} {one_line(text)}: {keyword[1]} is given twice")
        else:
            named[keyword[1]] = _value(keyword[2], where, text)
    return Called(match[1], arguments, named)


def _parts(text: str, where: str, whole: str) -> list[str]:
    """Return the parts between commas that are in no parentheses."""
    out: list[str] = []
    depth, current = 0, ""
    for letter in text:
        depth += (letter in "([") - (letter in ")]")
        if depth < 0:
            raise ValueError(f"{where} {one_line(whole)}: a ) too many")
        if letter == "," and not depth:
            out.append(current.strip())
            current = ""
        else:
            current += letter
    if depth:
        raise ValueError(f"{where} {one_line(whole)}: a ) is missing")
    if current.strip():
        out.append(current.strip())
    if "" in out:
        raise ValueError(f"{where} {one_line(whole)}: an argument is missing between commas")
    return out


def _value(text: str, where: str, whole: str) -> Any:
    """Return a number, a word, a text in quotes, or a list of numbers."""
    plain = text.strip()
    if plain in _WORDS:
        return _WORDS[plain]
    if _NUMBER.match(plain):
        return int(plain) if re.fullmatch(r"[+-]?\d+", plain) else float(plain)
    if len(plain) > 1 and plain[0] == plain[-1] and plain[0] in "'\"":
        return plain[1:-1]
    if len(plain) > 1 and plain[0] + plain[-1] in ("()", "[]"):
        values = [_value(part, where, whole) for part in _parts(plain[1:-1], where, whole)]
        if all(isinstance(v, int) and not isinstance(v, bool) for v in values) and len(values) <= 8:
            return values
    raise ValueError(f"{where} {one_line(whole)}: {one_line(plain)} is no number, word or tuple of whole numbers")
