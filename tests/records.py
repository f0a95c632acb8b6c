"""What real libraries do, on record: `tests/records/` has what each oracle returned for each of its calls.

A default run takes results from there and runs a sample of the calls, which is another one every day. `--live` runs each of
them once; a call that returns something else than its record fails, and so does one that has no record. `--drift` is a live
run of what may have drifted: all calls of oracles whose sources have changed, and a part of the others. `--record` writes.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import hashlib
import inspect
import json
from collections.abc import Callable, Iterator
from copy import deepcopy
from enum import Enum
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, get_type_hints

from record_codec import call_of, dumped, reader, written
from record_files import BESIDE, FOLDER, missing_package, other_versions, read_book, skip_for

P = ParamSpec("P")
R = TypeVar("R")


class Mode(Enum):
    SAMPLE = "sample"
    LIVE = "live"
    RECORD = "record"


class Drifted(AssertionError):
    """A call has another result than its record, or no record."""


class Records:
    """The records of one process of a test run."""

    def __init__(
        self, mode: Mode, *, seed: str = "", share: float = 0.0, folder: Path = FOLDER, claims: Path | None = None,
        changed: frozenset[str] | None = None,
    ) -> None:  # fmt: skip
        self.mode, self.seed, self.share, self.folder = mode, seed, share, folder
        self.changed = changed
        """In a live run, the oracles all of whose calls run; of the others a share. None: all calls of all run."""
        self.claims = claims
        """A folder with a file for each call that some process of the run has run live or is running; None: all run again."""
        self.asked: dict[str, set[str]] = {}
        """The calls that were asked for, by their keys."""
        self.live: dict[str, set[str]] = {}
        """Those of them that ran live."""
        self.made: dict[str, dict[str, str]] = {}
        self.ran_live = 0
        self.lacking: set[str] = set()
        """Oracles of calls that ran live in a default run because they have no record."""
        self.left_out: set[str] = set()
        """In a live run, the oracles that tests may ask for which are not in its share."""
        self.tries_fewer = False
        """Whether the running test has fewer examples than in a live run."""
        self.requests: list[str] = []
        """Every call that was asked for, in turn: its oracle and its key."""
        self.always = False
        """In a live run, whether all calls of the running test run live: it watches what they do."""
        self._books: dict[str, dict[str, str]] = {}
        self._inside = False

    def chosen(self, name: str, times: float = 1.0) -> bool:
        """Whether the sample of this seed has it; or one that is so many times as large."""
        digest = hashlib.sha256(f"{self.seed} {name}".encode()).digest()
        return int.from_bytes(digest[:8]) < times * self.share * 2**64

    def result(self, oracle: str, call: str, run: Callable[[], Any], read: Callable[[Any], Any]) -> Any:
        """What `run` returns, from the record or from itself."""
        if self._inside:
            return run()
        key = key_of(call)
        self.requests.append(f"{oracle} {key}")
        self.asked.setdefault(oracle, set()).add(key)
        known = self._book(oracle).get(call)
        always = self.always and self.mode is Mode.LIVE
        if known is not None and not always and not self.is_due(f"{oracle} {key}"):
            return read(json.loads(known))
        if self.mode is Mode.LIVE and known is not None and not always and not self._is_first(oracle, call):
            return read(json.loads(known))  # whoever was first fails if the record has drifted
        try:
            value = self._live(run)
        except Exception as error:
            package = missing_package(error)
            if package is None or (self.mode is not Mode.SAMPLE and (known is None or package not in BESIDE)):
                raise
            if known is None:
                skip_for(package, error)
            self.live.setdefault(oracle, set()).add(key)  # a run of its own has that package
            return read(json.loads(known))
        self.live.setdefault(oracle, set()).add(key)
        now = dumped(written(value))
        assert dumped(written(read(json.loads(now)))) == now and read(json.loads(now)) == value, (
            f"{oracle}: annotations"
        )
        self._compare(oracle, call, known, now)
        return value

    def is_due(self, request: str) -> bool:
        """Tell whether a call that is on record, named by its oracle and its key, runs live."""
        if self.mode is Mode.SAMPLE:
            return self.chosen(request)
        if self.mode is Mode.RECORD or self.changed is None:
            return True
        return request.split(" ")[0] in self.changed or self.chosen(request)

    def _is_first(self, oracle: str, call: str) -> bool:
        """Claim a call for this process. False: some process of the run has claimed it before."""
        if self.claims is None:
            return True
        try:
            (self.claims / hashlib.sha256(f"{oracle} {call}".encode()).hexdigest()).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def _live(self, run: Callable[[], Any]) -> Any:
        """Garbage is collected where the oracle says so: when it would be by itself depends on what ran before."""
        self._inside, enabled = True, gc.isenabled()
        self.ran_live += 1
        gc.disable()
        try:
            return run()
        finally:
            self._inside = False
            if enabled:
                gc.enable()

    def _compare(self, oracle: str, call: str, known: str | None, now: str) -> None:
        if self.mode is Mode.RECORD:
            before = self.made.setdefault(oracle, {}).setdefault(call, now)
            if before != now:
                raise Drifted(f"{oracle}{call} has two results in one run: {_difference(before, now)}")
        elif known is None and self.mode is Mode.LIVE:
            raise Drifted(f"{oracle}{call} has no record: pytest --record writes it")
        elif known is None:
            self.lacking.add(oracle)
        elif known != now:
            others = "; ".join(other_versions(self.folder)) or "the same versions"
            raise Drifted(f"{oracle}{call} is not what is on record ({others}): {_difference(known, now)}")

    def _book(self, oracle: str) -> dict[str, str]:
        if oracle not in self._books:
            self._books[oracle] = read_book(self.folder, oracle)
        return self._books[oracle]


def key_of(call: str) -> str:
    """Return a short name of a call."""
    return hashlib.sha256(call.encode()).hexdigest()[:16]


current: Records | None = None
"""Those of a test run; without any, as in a process that a test starts, an oracle just runs."""


def examples(most: int) -> int:
    """Return how many examples a property has: in a default run a third."""
    if current is None or current.mode is not Mode.SAMPLE:
        return most
    current.tries_fewer = True
    return most // 3


@contextlib.contextmanager
def using(records: Records | None) -> Iterator[None]:
    global current
    before, current = current, records
    try:
        yield
    finally:
        current = before


def on_record(oracle: Callable[P, R]) -> Callable[P, R]:
    """An oracle whose result depends on its arguments alone."""
    signature = inspect.signature(oracle)
    name = f"{oracle.__module__.removeprefix('tests.')}.{oracle.__qualname__}"
    read = functools.cache(lambda: reader(get_type_hints(oracle)["return"]))

    @functools.wraps(oracle)
    def asked(*args: P.args, **kwargs: P.kwargs) -> R:
        if current is None:
            return oracle(*args, **kwargs)
        call = call_of(signature, args, kwargs)
        own = [_copied(value) for value in args]
        named = {key: _copied(value) for key, value in kwargs.items()}
        return current.result(name, call, lambda: oracle(*own, **named), read())  # type: ignore[arg-type]

    return asked


def _copied(value: Any) -> Any:
    """transformers writes into the configurations that it is given, and they are what calls are known by."""
    return deepcopy(value) if isinstance(value, dict | list) else value


def _difference(known: str, now: str) -> str:
    """Where two results part, shortly."""
    place = next((i for i, (a, b) in enumerate(zip(known, now, strict=False)) if a != b), min(len(known), len(now)))
    first = max(place - 60, 0)
    return f"…{known[first : place + 60]}… was recorded, …{now[first : place + 60]}… is returned"
