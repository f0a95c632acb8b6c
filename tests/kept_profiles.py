"""What a model keeps of its runs: under each key one profile, or one for each remainder of a length that decides it."""

from __future__ import annotations

from typing import Any


def keeps(found: Any, made: Any) -> bool:
    """Tell whether what is kept under a key has this very profile."""
    return isinstance(found, dict) and any(one is made for one in found.values())
