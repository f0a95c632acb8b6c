"""The process's ends: stdout and stderr that are closed, full or no longer read, and Ctrl-C."""

from __future__ import annotations

import io
import os
import signal
import sys
from typing import IO, Any, Final

at_interrupt = b""
"""What puts the terminal right if Ctrl-C comes now."""
INTERRUPTED: Final = 130
"""The exit status that shells have for a process that SIGINT has ended."""


def end_at_interrupt() -> None:
    """Make Ctrl-C end the process at once, with one line, also where an import or a library is under way that would catch
    or print KeyboardInterrupt. A SIGINT that whoever started the process ignores stays ignored."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


def _end(*_: Any) -> None:
    try:
        os.write(2, at_interrupt + b"memcalc: interrupted\n")
    finally:
        os._exit(INTERRUPTED)


def open_closed() -> None:
    """Open what is closed of stdout and stderr: else the next file that is opened has the number of one of them, and what is
    printed goes there. What is written to this stdout fails, as the caller has to know; messages nobody can read are lost."""
    for number, name, mode in ((1, "stdout", os.O_RDONLY), (2, "stderr", os.O_WRONLY)):
        if getattr(sys, name) is None:
            _point(number, mode)
            setattr(sys, name, io.TextIOWrapper(io.FileIO(number, "w"), encoding="utf-8", errors="replace"))


def drop(stream: IO[str]) -> None:
    """Send the rest of a stream nowhere: what is still in its buffer would fail once more when the interpreter ends."""
    _point(stream.fileno(), os.O_WRONLY)


def _point(number: int, mode: int) -> None:
    """Make a descriptor one of the null device."""
    opened = os.open(os.devnull, mode)
    if opened != number:
        os.dup2(opened, number)
