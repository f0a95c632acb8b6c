"""Reading what a user names: nobody knows how large it is, whether it ends, and whether anything ever comes."""

from __future__ import annotations

import errno
import io
import os
import time
from pathlib import Path
from typing import Final

from memcalc.units import MIB

CONFIG: Final = 8 * MIB
"""Bytes of the largest config.json that is read. They have a few KiB; names of labels or of quantized modules make it some
hundreds."""

PATIENCE: Final = 10.0
"""Seconds until all of a pipe has to be there."""


class TooLarge(ValueError):
    """There is more than may be read. Its text says how much may be."""


def read_bounded(path: Path, most: int) -> bytes:
    """All bytes of a file, a pipe or a device. OSError as `open` has it, and where nothing comes in `PATIENCE`; TooLarge where
    there are more than `most` bytes."""
    # without O_NONBLOCK the path of a pipe waits for a writer as it is opened
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
    """Until there is something to read, or the end. Windows has no `poll`, and no pipes with a path."""
    import select

    if not hasattr(select, "poll"):
        return
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
        raise TimeoutError(errno.ETIMEDOUT, f"not all there within {PATIENCE:g} seconds")
