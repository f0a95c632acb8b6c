"""A setup as written for another tool."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Written:
    """A configuration file, or a command line."""

    text: str
    """The file's content, as its tool takes it, with a line end."""
    unsaid: Mapping[str, str]
    """The options of the setup that the format cannot say and that differ from what its tool does without them: by name, a
    short reason. Reading the text with these options beside it gives the same setup."""
