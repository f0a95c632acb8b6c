"""The static part of a bash script: its commands, with the variables that have constant values. Nothing is executed."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from memcalc.formats.megatron_conditions import KEYWORDS, Blocks, result_of
from memcalc.formats.megatron_lexer import Piece, Word, commands_of, words_of

_NAME: Final = r"[A-Za-z_][A-Za-z0-9_]*"
_ASSIGNMENT: Final = re.compile(rf"^({_NAME})(\+?)=")
_DEFAULT: Final = re.compile(rf"^({_NAME}|[0-9]+)(:?)([-=])(.*)$", re.DOTALL)
_ALL_OF_ARRAY: Final = re.compile(rf"^({_NAME})\[[@*]\]$")
_DECLARING: Final = ("export", "declare", "local", "readonly", "typeset")
_FUNCTION: Final = re.compile(rf"^{_NAME}\(\)$")
_MOST: Final = 4_000_000
"""The characters and words that all variables of a script may expand to."""
_ARITHMETIC: Final = re.compile(r"\d+|[-+*/%()]|\s+")
_DEEPEST: Final = 20

Constant = str | tuple[str, ...]
"""The value of a variable, or the values of an array."""


class Command(NamedTuple):
    """The words of one command, without redirections. What is not constant stays as it is written: "$TP"."""

    words: tuple[str, ...]


@dataclass
class _Shell:
    """The knowledge while a script is read from its first line to its last."""

    constants: dict[str, Constant] = field(default_factory=lambda: dict[str, Constant]())
    unknown: set[str] = field(default_factory=lambda: set[str]())
    """The variables that are assigned something that is not constant, or may be."""
    blocks: Blocks = field(default_factory=Blocks)
    operator: str = ""
    """The sign before the next command: "&&", "||" or another sign."""
    value: bool | None = True
    """The result of the command before; None if it is not known."""
    unsure: bool = False
    """True if it is not known that the command runs."""
    size: int = 0
    """The characters and words that variables have expanded to."""

    def used(self, value: Constant) -> Constant:
        """Return a value that is used. Raises ValueError if a script expands to too much."""
        self.size += len(value) if isinstance(value, str) else sum(len(one) + 1 for one in value)
        if self.size > _MOST:
            raise ValueError("its variables expand to too much text")
        return value


class Script(NamedTuple):
    """A script's commands and the constants at its end."""

    commands: tuple[Command, ...]
    constants: dict[str, Constant]


def read_script(text: str) -> Script:
    """Return the commands of a script in their order. Raises ValueError if it expands to too much."""
    shell, commands = _Shell(), list[Command]()
    for words, operator in commands_of(text):
        command = _run(shell, words)
        shell.operator = operator
        if command:
            commands.append(Command(tuple(command)))
    return Script(tuple(commands), shell.constants)


def read_words(text: str) -> list[str]:
    """Return the words of a text without commands. Variables stay as they are written. Raises ValueError."""
    shell = _Shell()
    return [part for word in words_of(text) for part in _expanded(shell, word)]


def _run(shell: _Shell, words: list[Word]) -> list[str]:
    """Take a command's assignments, and return its expanded words; [] if it does not run."""
    rest = _after_keywords(shell, list(words))
    runs = shell.value if shell.operator == "&&" else _opposite(shell.value) if shell.operator == "||" else True
    if not rest or shell.blocks.skips or runs is False:
        return []
    shell.unsure = runs is None or shell.blocks.unknown
    command = _assignments(shell, rest)
    expanded = [text for word in command for text in _expanded(shell, word)]
    value = result_of(expanded, lambda word: "$" not in word and "`" not in word) if command else True
    if value is None and not shell.blocks.tests and not {*expanded[:1]} & {"[", "[[", "test"}:
        value = True  # a command that does something
    shell.value = value if runs else None
    return expanded


def _opposite(value: bool | None) -> bool | None:
    return None if value is None else not value


def _after_keywords(shell: _Shell, rest: list[Word]) -> list[Word]:
    """Take the keywords before a command, and return the command."""
    while rest and (keyword := _plain(rest[0])) is not None:
        if _FUNCTION.match(keyword) or keyword == "function":
            shell.blocks.is_function = True
            rest = rest[1 if _FUNCTION.match(keyword) else 2 :]
            continue
        if keyword not in KEYWORDS:
            break
        if keyword in ("then", "elif", "else", "do", "{"):
            shell.operator = ""
        shell.blocks.enter(keyword, shell.value)
        if keyword in ("for", "select") and len(rest) > 1:
            _forget(shell, _plain(rest[1]) or "")
        if keyword in ("for", "select", "case"):
            return []
        rest = rest[1:]
    return rest


def _assignments(shell: _Shell, rest: list[Word]) -> list[Word]:
    """Take the assignments before a command, and return the command."""
    if _plain(rest[0]) in _DECLARING:
        rest = [word for word in rest[1:] if not (_plain(word) or "").startswith("-")]
    while rest and (match := _ASSIGNMENT.match(_head(rest[0]))) is not None:
        _assign(shell, match[1], bool(match[2]), rest[0], len(match[0]))
        rest = rest[1:]
    if rest and _plain(rest[0]) == "read":
        for word in rest[1:]:
            _forget(shell, _plain(word) or "")
        return []
    return rest


def _plain(word: Word) -> str | None:
    """Return a word that is written without quotes and variables; None for another one."""
    return word.pieces[0].text if len(word.pieces) == 1 and word.pieces[0].kind == "bare" else None


def _head(word: Word) -> str:
    return word.pieces[0].text if word.pieces and word.pieces[0].kind == "bare" else ""


def _forget(shell: _Shell, name: str) -> None:
    shell.constants.pop(name, None)
    shell.unknown.add(name)


def _assign(shell: _Shell, name: str, adds: bool, word: Word, start: int) -> None:
    first = word.pieces[0]._replace(text=word.pieces[0].text[start:])
    value: Constant
    if word.array is not None:
        value = tuple(text for one in word.array for text in _expanded(shell, one))
    else:
        value = _joined(shell, [first, *word.pieces[1:]])
    before = shell.constants.get(name)
    if isinstance(value, str) and isinstance(before, str) and before and value.startswith(before) and value != before:
        adds, value = True, value.removeprefix(before)  # ARGS="$ARGS --more"
    if adds and shell.unsure:  # whether it is added is not known, so the reader is told
        value = f" ${name}" if word.array is None else (f"${name}",)
    if adds and name not in shell.unknown:
        value = shell.used(_added(before, value))
    elif shell.unsure and value != before:
        _forget(shell, name)
        return
    if isinstance(value, str) and is_unknown(value) and "--" not in value:
        _forget(shell, name)
        return
    if not shell.unsure:
        shell.unknown.discard(name)
    if name not in shell.unknown:
        shell.constants[name] = value


def _added(before: Constant | None, value: Constant) -> Constant:
    if isinstance(value, tuple):
        return (*(before if isinstance(before, tuple) else (before,) if before else ()), *value)
    if isinstance(before, tuple):  # bash adds to the first element
        return (before[0] + value, *before[1:]) if before else (value,)
    return f"{before or ''}{value}"


def is_unknown(text: str) -> bool:
    """Tell whether a text is nothing but a variable or a command whose result is not known."""
    return bool(re.fullmatch(r"\$(\w+|[@*#?!]|\{[^{}]*\}|\(.*\))|`.*`", text.strip(), re.DOTALL))


def _expanded(shell: _Shell, word: Word) -> list[str]:
    """Return the words that a word becomes: values without quotes are split, arrays are their elements."""
    out, open_word = list[str](), False

    def add(text: str, starts: bool) -> None:
        nonlocal open_word
        if starts or not open_word:
            out.append(text)
        else:
            out[-1] += text
        open_word = True

    for piece in word.pieces:
        value = _value(shell, piece)
        if isinstance(value, tuple):
            parts = value if piece.kind == "quoted variable" else tuple(p for v in value for p in v.split())
            for i, part in enumerate(parts):
                add(part, i > 0)
        elif piece.kind == "variable" and not is_unknown(value):
            for i, part in enumerate(value.split()):
                add(part, i > 0)
        else:
            add(value, False)
    return out


def _joined(shell: _Shell, pieces: list[Piece]) -> str:
    values = [_value(shell, piece) for piece in pieces]
    return "".join(" ".join(value) if isinstance(value, tuple) else value for value in values)


def _value(shell: _Shell, piece: Piece) -> Constant:
    if not piece.kind.endswith("variable"):
        return piece.text
    return shell.used(_variable(shell, piece.text, 0))


def _variable(shell: _Shell, written: str, depth: int) -> Constant:
    """Return the value of "TP", "TP:-8", "ARGS[@]" or "((A*B))"; the expression as it is written if it is not known."""
    shown = f"${written}" if re.fullmatch(_NAME, written) else f"${{{written}}}"
    if written.startswith("(") or depth > _DEEPEST:
        return _computed(shell, written)
    if (array := _ALL_OF_ARRAY.match(written)) is not None:
        value = shell.constants.get(array[1])
        return f"${array[1]}" if value is None else value
    if (default := _DEFAULT.match(written)) is not None:
        return _with_default(shell, default, shown, depth)
    value = shell.constants.get(written, shown)
    return value[0] if isinstance(value, tuple) and value else value


def _with_default(shell: _Shell, written: re.Match[str], shown: str, depth: int) -> Constant:
    name, colon, sign, other = written.groups()
    if name in shell.unknown:
        return f"${name}"
    value = shell.constants.get(name)
    if value is None or (colon and not value):
        value = _text(shell, other.strip("\"'"), depth + 1)
        if sign == "=" and not is_unknown(value):
            shell.constants[name] = value
    return shown if isinstance(value, str) and is_unknown(value) else value


def _text(shell: _Shell, text: str, depth: int) -> str:
    """Return a text with its variables replaced."""

    def replaced(match: re.Match[str]) -> str:
        value = shell.used(_variable(shell, match[1] or match[2] or "", depth))
        return " ".join(value) if isinstance(value, tuple) else value

    return re.sub(rf"\$(?:\{{([^{{}}]*)\}}|({_NAME}))", replaced, text) if depth <= _DEEPEST else text


def _computed(shell: _Shell, written: str) -> str:
    """Return the result of an arithmetic expression "((A*B))" of constants; the expression if it has another."""
    inner = re.fullmatch(r"\(\((.*)\)\)", written, re.DOTALL)
    if inner is None:
        return f"${written}"
    text = _text(shell, inner[1], 1)
    text = re.sub(_NAME, lambda m: str(shell.constants.get(m[0], m[0])), text)
    if "".join(_ARITHMETIC.findall(text)) != text or len(text) > 200 or "**" in text or "//" in text:
        return f"${written}"
    number = _Arithmetic(re.findall(r"\d+|[-+*/%()]", text)).result()
    return f"${written}" if number is None else str(number)


class _Arithmetic:
    """Integers, + - * / % and parentheses, as bash computes them."""

    def __init__(self, tokens: list[str]) -> None:
        self.tokens, self.at = tokens, 0

    def result(self) -> int | None:
        try:
            value = self._sum()
        except (ValueError, IndexError, ArithmeticError, RecursionError):
            return None
        return value if self.at == len(self.tokens) and abs(value) < 10**18 else None

    def _sum(self) -> int:
        value = self._product()
        while self._next() in ("+", "-"):
            sign = self._take()
            value += self._product() * (1 if sign == "+" else -1)
        return value

    def _product(self) -> int:
        value = self._factor()
        while self._next() in ("*", "/", "%"):
            sign, other = self._take(), self._factor()
            value = value * other if sign == "*" else int(value / other) if sign == "/" else value % other
        return value

    def _factor(self) -> int:
        token = self._take()
        if token == "-":
            return -self._factor()
        if token != "(":
            return int(token[:18])
        value = self._sum()
        if self._take() != ")":
            raise ValueError
        return value

    def _next(self) -> str:
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def _take(self) -> str:
        self.at += 1
        return self.tokens[self.at - 1]
