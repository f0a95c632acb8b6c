"""The one exception of the public API, and the wording that its messages share."""

from __future__ import annotations

from collections.abc import Iterable


class InputError(ValueError):
    """Raised for invalid input. The message is one line: the option or field, the value, and what is allowed."""


_WORSE = 0.2
"""How much less than the best a name may resemble what was meant."""


def nearest(name: str, known: Iterable[str], most: int = 5, cutoff: float = 0.5) -> list[str]:
    """Return up to `most` known names that resemble `name`, the best first. `cutoff` is the least similarity from 0 to
    1 (difflib's ratio). A name that resembles it much less than the best one does is left out."""
    import difflib

    by_lower = {candidate.lower(): candidate for candidate in known}
    close = difflib.get_close_matches(name.lower(), by_lower, n=most, cutoff=cutoff)
    ratios = [difflib.SequenceMatcher(None, candidate, name.lower()).ratio() for candidate in close]
    return [by_lower[candidate] for candidate, ratio in zip(close, ratios, strict=True) if ratio > ratios[0] - _WORSE]


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
