"""A process for each case. A server imports torch once and forks itself for every case that it gets. So a case begins
with a device that holds nothing of an earlier one, and one that dies, or does not end, is an outcome like others.

`python -m memcalc.validate.server BACKEND` reads a case per line and writes an outcome per line. The server must not
touch the GPU itself: CUDA does not survive a fork. It ends, with the case that it runs, when its client is gone,
however that ended: a case that ran on would be on the device beside those of the next suite.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, Final, Protocol

from memcalc.errors import InputError
from memcalc.validate import as_trained, run
from memcalc.validate.suites import Case

LIMIT: Final = 240
"""The seconds that a case may take. Those of the bundled suites take a few, and a machine may be rented by the
minute."""

_MOMENT: Final = 20  # ms

_PACKAGE: Final = Path(__file__).resolve().parent.parent.parent


class Cases(Protocol):
    """A case per line, through a pipe."""

    def __iter__(self) -> Iterator[str]: ...

    def fileno(self) -> int: ...


class Server:
    """The server as its client sees it. Entering returns the function that runs a case; it raises InputError without a
    GPU."""

    def __init__(self, backend: str, limit: int = LIMIT) -> None:
        path = os.pathsep.join([str(_PACKAGE), *filter(None, [os.environ.get("PYTHONPATH")])])
        # torch looks for devices without CUDA's own call, which could not be forked
        self.environment = {**os.environ, "PYTHONPATH": path, "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
        self.command = [sys.executable, "-m", "memcalc.validate.server", backend, str(limit)]

    def __enter__(self) -> Callable[[Case], dict[str, Any]]:
        self.process = subprocess.Popen(
            self.command, env=self.environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            start_new_session=True,
        )  # fmt: skip
        ready = self._answer()
        if ready["outcome"] != "ready":
            self.__exit__()
            raise InputError(ready["why"])
        return self.ask

    def __exit__(self, kind: type[BaseException] | None = None, *_: object) -> None:
        """Wait for the server's end. If the suite was interrupted, kill the server with the case that it runs."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        if kind is not None and self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        with contextlib.suppress(BrokenPipeError):  # a killed server has not read everything
            self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()

    def ask(self, case: Case) -> dict[str, Any]:
        """Return a case's outcome."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(case) + "\n")
            self.process.stdin.flush()
        except OSError:
            pass  # the answer tells
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        why = "the process that runs the cases has ended"
        return json.loads(line) if line.endswith("\n") else {"outcome": "failed", "why": why}


def serve(backend: str, limit: int, cases: Cases, answers: IO[str]) -> None:
    """Answer every line of `cases`. The first answer says whether the backend has what it needs."""
    try:
        import memcalc.validate.cuda  # noqa: F401  # pyright: ignore[reportUnusedImport]  # torch, for every fork
    except ImportError:
        pass  # the first fork tells
    gone = _gone(cases)
    _forked(lambda: _ready(backend), limit, answers, gone)
    for line in cases:
        case = json.loads(line)
        _forked(lambda case=case: as_trained.outcome(case, backend), limit, answers, gone)


def _ready(backend: str) -> dict[str, Any]:
    try:
        run.measurer(backend)
    except InputError as error:
        return {"outcome": "refused", "why": str(error)}
    return {"outcome": "ready"}


def _gone(cases: Cases) -> Callable[[], bool]:
    """Return a function that waits a moment and tells whether the other end of the pipe of cases is closed."""
    poll = select.poll()
    poll.register(cases, 0)  # only its end is waited for
    return lambda: bool(poll.poll(_MOMENT))


def _forked(work: Callable[[], dict[str, Any]], limit: int, answers: IO[str], gone: Callable[[], bool]) -> None:
    """Run `work` in a forked process, which writes its result. If it wrote nothing, write here what has become of
    it."""
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # which ends the process
        signal.alarm(limit)
        gc.freeze()  # what was imported: every phase of a step is measured after a collection, which would look at all of it
        try:
            answers.write(json.dumps(work()) + "\n")
            answers.flush()
        except BaseException as error:
            sys.stderr.write(f"{type(error).__name__}: {error}\n")
            os._exit(1)
        os._exit(0)
    ended, status = os.waitpid(child, os.WNOHANG)
    while not ended:
        if gone():
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            sys.exit(1)
        ended, status = os.waitpid(child, os.WNOHANG)
    if status:
        code = os.waitstatus_to_exitcode(status)
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
        why = f"did not end within {limit} s" if code == -signal.SIGALRM else f"its process {how}"
        answers.write(json.dumps({"outcome": "failed", "why": why}) + "\n")
        answers.flush()


if __name__ == "__main__":
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers:
        os.dup2(2, 1)  # what a library prints is no answer
        serve(sys.argv[1], int(sys.argv[2]), sys.stdin, answers)
