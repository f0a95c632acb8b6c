"""What takes long has a bar on the terminal, which is gone when it ends, at Ctrl-C too."""

from __future__ import annotations

import os
import pty
import signal
import sys
import time

import pytest
from command import environment

from memcalc.cli.waiting import waiting

SLOW = """
import time
from memcalc.cli.streams import end_at_interrupt
from memcalc.cli.waiting import waiting
end_at_interrupt()
with waiting("the words"):
    time.sleep({seconds})
print("the answer")
"""
SHOW_CURSOR = b"\x1b[?25h"
HIDE_CURSOR = b"\x1b[?25l"


def on_a_terminal(seconds: float, *, interrupt: bool = False, term: str = "xterm-256color") -> tuple[int, bytes]:
    """Run the program on a terminal; return its status and all that it wrote. Ctrl-C comes when the bar is there."""
    process, terminal = pty.fork()
    if not process:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's background jobs ignore it, and what they start
        code = SLOW.format(seconds=seconds)
        os.execve(sys.executable, [sys.executable, "-c", code], environment(TERM=term))
    written = b""
    while True:
        try:
            read = os.read(terminal, 65536)
        except OSError:  # the other end is closed
            break
        written += read
        if interrupt and b"the words" in written:
            time.sleep(0.1)
            os.kill(process, signal.SIGINT)
            interrupt = False
        if not read:
            break
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), written


def test_a_bar_after_a_second_that_goes() -> None:
    status, written = on_a_terminal(1.6)
    assert status == 0
    assert b"the words" in written
    assert written.rfind(SHOW_CURSOR) > written.rfind(HIDE_CURSOR)
    assert written.rstrip().endswith(b"the answer")


def test_no_bar_before() -> None:
    assert on_a_terminal(0.1) == (0, b"the answer\r\n")


def test_no_bar_where_a_terminal_cannot_move() -> None:
    assert on_a_terminal(1.3, term="dumb") == (0, b"the answer\r\n")


def test_ctrl_c_leaves_the_terminal_as_it_was() -> None:
    status, written = on_a_terminal(30, interrupt=True)
    assert status == 130
    assert written.rfind(SHOW_CURSOR) > written.rfind(HIDE_CURSOR)
    assert written.rstrip().endswith(b"memcalc: interrupted")
    assert b"Traceback" not in written


def test_nothing_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    with waiting("the words"):
        time.sleep(1.2)
    assert capsys.readouterr() == ("", "")
