"""Bounded reading of files that a user names: a file may be huge, endless, or a pipe that never sends anything."""

from __future__ import annotations

import errno
import io
import os
import time
from pathlib import Path
from typing import Final

from memcalc.units import MIB

CONFIG: Final = 8 * MIB
"""The bytes of the largest config.json that is read. Most have a few KiB. Names of labels or of quantized modules can
make it some hundreds."""

PATIENCE: Final = 10.0
"""The seconds within which all of a pipe has to arrive."""


class TooLarge(ValueError):
    """Raised if there is more than may be read. The message says how much may be."""


def read_bounded(path: Path, most: int) -> bytes:
    """Return all bytes of a file, a pipe or a device.

    Raises OSError as `open` does, and if nothing arrives within `PATIENCE`. Raises TooLarge if there are more than
    `most` bytes.
    """
    # without O_NONBLOCK, opening the path of a pipe waits for a writer
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    deadline = time.monotonic() + PATIENCE
    content = bytearray()
    with io.FileIO(descriptor) as file:
        while len(content) <= most:
            _wait(descriptor, deadline)
            part = file.read(most + 1 - len(content))
            if part == b"":
                return bytes(content)
            content += part or b""
    raise TooLarge(f"larger than {most // MIB} MiB")


def _wait(descriptor: int, deadline: float) -> None:
    """Wait until there is something to read, or the end. Windows has no `poll`, and no pipes with a path."""
    import select

    if not hasattr(select, "poll"):
        return
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
        raise TimeoutError(errno.ETIMEDOUT, f"not all there within {PATIENCE:g} seconds")
