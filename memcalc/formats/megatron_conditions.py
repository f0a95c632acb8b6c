"""The conditions of a bash script: which commands run, as far as constants tell it. Nothing is executed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

State = Literal["tested", "taken", "skipped", "done", "unknown"]
"""The states of a block: its condition is read; its commands run; another branch may run; another one has run; not known."""
_LOOPS: Final = ("for", "while", "until", "case", "select")
_ENDS: Final = ("fi", "done", "esac", "}")
KEYWORDS: Final = ("if", "then", "elif", "else", "do", "!", "time", "{", *_LOOPS, *_ENDS)
_DEEPEST: Final = 200
_WHOLE: Final[Mapping[str, Callable[[int, int], bool]]] = {
    "-eq": lambda a, b: a == b,
    "-ne": lambda a, b: a != b,
    "-gt": lambda a, b: a > b,
    "-ge": lambda a, b: a >= b,
    "-lt": lambda a, b: a < b,
    "-le": lambda a, b: a <= b,
}


@dataclass
class Blocks:
    """The conditions, loops and functions around a command, the innermost last."""

    states: list[State] = field(default_factory=lambda: list[State]())
    is_function: bool = False
    """True if the next bracket is a function's."""

    @property
    def skips(self) -> bool:
        """Tell whether the next commands do not run."""
        return "skipped" in self.states or "done" in self.states

    @property
    def tests(self) -> bool:
        """Tell whether the next commands are a condition."""
        return bool(self.states) and self.states[-1] == "tested"

    @property
    def unknown(self) -> bool:
        """Tell whether it is not known that the next commands run."""
        return "unknown" in self.states

    def enter(self, keyword: str, value: bool | None) -> None:
        """Take a keyword. `value` is the result of the commands before, for `then`. Raises ValueError if blocks are
        too deep."""
        if len(self.states) > _DEEPEST:
            raise ValueError("its blocks are too deep")
        if keyword == "if":
            self.states.append("done" if self.skips else "tested")
        elif keyword in _LOOPS:
            self.states.append("unknown")
        elif keyword == "{":
            self.states.append("unknown" if self.is_function else "taken")
            self.is_function = False
        elif keyword in _ENDS and self.states:
            self.states.pop()
        elif keyword in ("then", "elif", "else") and self.states:
            self.states[-1] = self._next(keyword, value)

    def _next(self, keyword: str, value: bool | None) -> State:
        state = self.states[-1]
        if keyword == "then":
            return state if state != "tested" else "unknown" if value is None else "taken" if value else "skipped"
        if state == "skipped":
            return "tested" if keyword == "elif" else "taken"
        return "done" if state == "taken" else state


def result_of(words: Sequence[str], is_known: Callable[[str], bool]) -> bool | None:
    """Return the result of a command: of a test with known words. Return None for another command."""
    rest = [word for word in words if word not in ("[[", "[", "]]", "]", "test")]
    if words == ["true"] or words == [":"]:
        return True
    if words == ["false"]:
        return False
    if len(rest) == len(words) or not all(map(is_known, rest)):
        return None
    if rest[:1] == ["!"]:
        value = _tested(rest[1:])
        return None if value is None else not value
    return _tested(rest)


def _tested(words: Sequence[str]) -> bool | None:
    match [*words]:
        case ["-z"]:  # an empty value without quotes
            return True
        case ["-n"] | []:
            return False
        case ["-z", one]:
            return not one
        case ["-n", one] | [one]:
            return bool(one)
        case [one, "=" | "==", other] if not set(other) & set("*?["):
            return one == other
        case [one, "!=", other] if not set(other) & set("*?["):
            return one != other
        case [one, sign, other] if sign in _WHOLE and _is_whole(one) and _is_whole(other):
            return _WHOLE[sign](int(one), int(other))
        case _:
            return None


def _is_whole(text: str) -> bool:
    return text.isascii() and text.removeprefix("-").isdigit() and len(text) < 18
