"""A section of a configuration file, whose values are read by name, each with the type that its tool wants."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final, NoReturn, cast

from memcalc.errors import InputError, nearest, one_line, quoted
from memcalc.formats.found import Value

AUTO: Final = "auto"
_TRUE: Final = ("true", "yes", "on", "y", "t", "1")
_FALSE: Final = ("false", "no", "off", "n", "f", "0")


class Section:
    """A mapping of a file. It notes which of its keys were read, so that the rest can be named."""

    __slots__ = ("_read", "content", "file", "option", "path")

    def __init__(self, option: str, file: str, content: Mapping[str, Any], path: str = "") -> None:
        """Read `content`, which is at `path` ("zero_optimization.") of `file` ("ds.json"; "" if it is no file). `option`
        is the one that takes the file: "--deepspeed"."""
        self.option, self.file, self.content, self.path = option, file, content, path
        self._read: set[str] = set()

    def __contains__(self, key: str) -> bool:
        """Tell whether the section has a key with a value; null is none."""
        return self.content.get(key) is not None

    def where(self, key: str) -> str:
        """Return the place of a key for people: "ds.json: zero_optimization.stage"."""
        return f"{self.file or self.option}: {self.path}{key}"

    def refuse(self, key: str, allowed: str) -> NoReturn:
        """Raise InputError for the value of a key."""
        place = f"{self.option} {self.file}: " if self.file else f"{self.option}: "
        raise InputError(f"{place}{self.path}{key} {quoted(self.content.get(key))}: {allowed}")

    def raw(self, key: str) -> Any:
        """Return a value as it is in the file; None if it is not there."""
        self._read.add(key)
        return self.content.get(key)

    def ignore(self, *keys: str) -> None:
        """Count keys as read: they change neither memory nor communication nor time."""
        self._read.update(keys)

    def is_auto(self, key: str) -> bool:
        """Tell whether a value is "auto"."""
        return self.content.get(key) == AUTO

    def first(self, *keys: str) -> str:
        """Return the first of these names of one key that the section has; the first of all if it has none."""
        self._read.update(keys)
        return next((key for key in keys if key in self), keys[0])

    def section(self, key: str) -> Section:
        """Return the section at a key; an empty one if it is not there."""
        value = self.raw(key)
        if value is None:
            return Section(self.option, self.file, {}, f"{self.path}{key}.")
        if not isinstance(value, Mapping):
            self.refuse(key, "allowed: a mapping")
        return Section(self.option, self.file, cast("Mapping[str, Any]", value), f"{self.path}{key}.")

    def flag(self, key: str) -> bool | None:
        """Return a switch; None if it is not there. Words that YAML or argparse read as one are read as one."""
        value = self.raw(key)
        if value is None or isinstance(value, bool):
            return value
        word = str(value).strip().lower()
        if word not in _TRUE and word not in _FALSE:
            self.refuse(key, "allowed: true, false")
        return word in _TRUE

    def whole(self, key: str, least: int = 0, most: int = 10**15) -> int | None:
        """Return a whole number; None if it is not there. 5e8 and "5e7" are whole numbers."""
        allowed = f"allowed: a whole number from {least} to {most}"
        value = self.number(key, allowed)
        if value is None:
            return None
        if value != int(value) or not least <= value <= most:
            self.refuse(key, allowed)
        return int(value)

    def number(self, key: str, allowed: str = "allowed: a number") -> float | None:
        """Return a number; None if it is not there. Text that is a number counts: YAML reads 5e7 as text."""
        value = self.raw(key)
        if value is None:
            return None
        try:
            number = float(value) if not isinstance(value, bool) else float("nan")
        except (TypeError, ValueError, OverflowError):
            number = float("nan")
        if not abs(number) < float("inf"):
            self.refuse(key, allowed)
        return int(value) if isinstance(value, int) else number

    def text(self, key: str) -> str | None:
        """Return a text; None if it is not there."""
        value = self.raw(key)
        if value is not None and not isinstance(value, str):
            self.refuse(key, "allowed: text")
        return value

    def words(self, key: str) -> tuple[str, ...] | None:
        """Return a list of names, also as one text with commas; None if it is not there."""
        value = self.raw(key)
        if value is None:
            return None
        parts = value.split(",") if isinstance(value, str) else value
        if not isinstance(parts, list) or not all(isinstance(one, str) for one in cast("list[object]", parts)):
            self.refuse(key, "allowed: a list of names")
        return tuple(one.strip() for one in cast("list[str]", parts) if one.strip())

    def choice(self, key: str, allowed: Collection[str]) -> str | None:
        """Return one of some names, in the spelling of `allowed`; None if it is not there. Case does not count."""
        value = self.raw(key)
        if value is None:
            return None
        by_lower = {one.lower(): one for one in allowed}
        word = value.strip().lower() if isinstance(value, str) else ""
        if word not in by_lower:
            self.refuse(key, f"allowed: {', '.join(allowed)}")
        return by_lower[word]

    def value(self, key: str, value: Any) -> Value:
        """Return a value that this section's key gives."""
        return Value(value, self.where(key))

    def default(self, key: str, value: Any) -> Value:
        """Return a value that the tool uses because the section has no such key."""
        return Value(value, f"{self.where(key)}, its default", is_given=False)

    def left(self) -> list[str]:
        """Return the keys that were not read, with their paths."""
        return [f"{self.path}{key}" for key in self.content if key not in self._read]

    def refuse_unknown(self, known: Collection[str] = ()) -> None:
        """Raise InputError for a key that was not read and that the tool does not know either."""
        for key in self.content:
            if key not in self._read and key not in known:
                close = nearest(str(key), {*self._read, *known}, most=1)
                hint = f"; did you mean {close[0]}?" if close else ""
                place = f"{self.option} {self.file}: " if self.file else f"{self.option}: "
                raise InputError(f"{place}{self.path}{one_line(key)}: unknown key{hint}")
