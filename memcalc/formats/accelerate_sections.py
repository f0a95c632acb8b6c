"""Keys of an accelerate configuration that nothing reads, in any of its sections."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from memcalc.errors import one_line
from memcalc.formats.section import Section


def unread(section: Section, ignored: Collection[str] = (), prefix: str = "") -> Iterable[str]:
    """Name the keys that accelerate takes without a word and reads nowhere. `prefix` is what its own keys begin with."""
    known = {f"{section.path}{key}" for key in ignored}
    keys = [one_line(key) for key in section.left() if key not in known]
    if not keys:
        return
    hint = "" if all(key.startswith(section.path + prefix) for key in keys) else f"; its keys begin with {prefix}"
    yield f"{', '.join(keys)}: not read, as accelerate does not{hint}."
