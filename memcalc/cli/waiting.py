"""A bar on the terminal while something takes longer than a second."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Final

from memcalc.cli import streams

_AFTER_SECONDS: Final = 1.0
_LEAVE: Final = b"\r\x1b[K\x1b[?25h"
"""The bytes that clear the line of the bar and show the cursor."""


@contextmanager
def waiting(words: str) -> Generator[None]:
    """Show the words, a bar and the seconds on stderr once the block has run for a second. Show nothing if stderr is not a
    terminal."""
    if not _is_terminal():
        yield
        return
    from threading import Event, Thread

    done = Event()
    thread = Thread(target=_show, args=(words, done), daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


@contextmanager
def counting(words: str) -> Generator[Callable[[int, int], None] | None]:
    """Show a bar on stderr, and yield the function that sets how many of how many are done. Yield None if stderr is not a
    terminal."""
    if not _is_terminal():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(bar_width=20), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, refresh_per_second=4) as progress:
        task = progress.add_task(words, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def _is_terminal() -> bool:
    return sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


def _show(words: str, done: object) -> None:
    """Wait for a second, then draw until `done`, a threading.Event, is set."""
    from threading import Event

    assert isinstance(done, Event)
    if done.wait(_AFTER_SECONDS):
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(bar_width=20), TimeElapsedColumn())
    streams.at_interrupt = _LEAVE
    with Progress(*columns, console=Console(stderr=True), transient=True, refresh_per_second=4) as progress:
        progress.add_task(words, total=None)
        done.wait()
    streams.at_interrupt = b""
