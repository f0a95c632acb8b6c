"""The one exception of the public API, and the wording that its messages share."""

from __future__ import annotations

from collections.abc import Iterable


class InputError(ValueError):
    """Raised for invalid input. The message is one line: the option or field, the value, and what is allowed."""


def nearest(name: str, known: Iterable[str], most: int = 5, cutoff: float = 0.5) -> list[str]:
    """Return up to `most` known names that resemble `name`, the best first. `cutoff` is the least similarity from 0 to
    1 (difflib's ratio)."""
    import difflib

    by_lower = {candidate.lower(): candidate for candidate in known}
    close = difflib.get_close_matches(name.lower(), by_lower, n=most, cutoff=cutoff)
    return [by_lower[candidate] for candidate in close]


def one_line(text: object, limit: int = 120) -> str:
    """Return `text` on one line, without control characters, cut to `limit` characters; "''" if it is empty."""
    try:
        words = str(text)
    except ValueError:  # Python does not print integers of more than 4300 digits
        words = "a number of thousands of digits"
    flat = " ".join("".join(c if c.isprintable() else " " for c in words).split())
    return (flat if len(flat) <= limit else flat[: limit - 1] + "…") or "''"


def quoted(value: object, limit: int = 120) -> str:
    """Return `value` as Python writes it, on one line: '4096' with quotes for a string, 4096 without for a number."""
    try:
        return one_line(repr(value), limit)
    except ValueError:
        return "a number of thousands of digits"
