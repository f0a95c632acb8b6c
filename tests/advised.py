"""Following a proposal: its flags, as they are printed, added to the options that it was made for."""

from __future__ import annotations

from typing import Any


def parsed(flags: str) -> dict[str, Any]:
    """Printed flags as options of `memcalc.estimate`."""
    words, out = flags.split(), dict[str, Any]()
    for word, following in zip(words, [*words[1:], "--"], strict=True):
        if not word.startswith("--"):
            continue
        name = word.removeprefix("--")
        if not following.startswith("--"):
            out[name.replace("-", "_")] = int(following) if following.isdigit() else following
        else:
            out[name.removeprefix("no-").replace("-", "_")] = not name.startswith("no-")
    return out
