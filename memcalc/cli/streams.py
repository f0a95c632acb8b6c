"""The streams of the process: stdout and stderr that are closed, full or no longer read; and Ctrl-C."""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import IO, Any, Final

at_interrupt = b""
"""The bytes that restore the terminal if Ctrl-C comes now."""
INTERRUPTED: Final = 130
"""The exit status that shells give a process that SIGINT ended."""


def end_at_interrupt() -> None:
    """Make Ctrl-C end the process at once, with one line.

    This also holds during an import or in a library that would catch or print KeyboardInterrupt. If the process was started
    with SIGINT ignored, it stays ignored.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


@contextmanager
def interrupts_raise() -> Generator[None]:
    """Make Ctrl-C raise KeyboardInterrupt inside the block, for a command that ends in its own way. Where SIGINT is ignored, it
    stays ignored."""
    before = signal.getsignal(signal.SIGINT)
    if before is not _end:
        yield
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _end(*_: Any) -> None:
    try:
        os.write(2, at_interrupt + b"memcalc: interrupted\n")
    finally:
        os._exit(INTERRUPTED)


def open_closed() -> None:
    """Open stdout and stderr if they are closed. Otherwise the next opened file would get the number of one of them, and printed
    text would go into that file.

    Writing to this stdout fails, so that the caller notices. Writing to this stderr succeeds, and the text is lost.
    """
    for number, name, mode in ((1, "stdout", os.O_RDONLY), (2, "stderr", os.O_WRONLY)):
        if getattr(sys, name) is None:
            _point(number, mode)
            setattr(sys, name, io.TextIOWrapper(io.FileIO(number, "w"), encoding="utf-8", errors="replace"))


def read_any_bytes() -> None:
    """Make bytes of stdin that are no text in its encoding readable, as replacement characters."""
    for stream in (sys.stdin,):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def drop(stream: IO[str]) -> None:
    """Send the rest of a stream to the null device. Else the text in its buffer would fail again when the interpreter ends."""
    _point(stream.fileno(), os.O_WRONLY)


def _point(number: int, mode: int) -> None:
    """Make a file descriptor refer to the null device."""
    opened = os.open(os.devnull, mode)
    if opened != number:
        os.dup2(opened, number)
