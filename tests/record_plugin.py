"""pytest's options for what is on record: which calls of the oracles run, and what becomes of their results.

Each worker of pytest-xdist keeps what it was asked for and what it has made, and hands that to the controller at its end.
"""

from __future__ import annotations

import datetime
import json
import shutil
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import records
from record_files import (
    FOLDER,
    missing_package,
    oracles_of,
    other_versions,
    read_book,
    read_versions,
    skip_for,
    write,
)
from record_sources import changed_oracles, digest_of, run_by, write_digests
from records import Mode, Records, key_of

SHARED = ("live", "slow")
"""The markers of whose tests a default run has the sample's share: 1 %."""
SLOW_OF_DRIFT = 4.0
"""A run for drift, whose share is that of `--drift`, has all tests that are `live`, and of those that are `slow` so many times
its own share: 40 % with `--drift 10`."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("records", "real libraries, on record or live")
    group.addoption(
        "--live", action="store_true", help="run every call of the oracles, and fail where a record has drifted"
    )
    group.addoption(
        "--drift",
        type=float,
        metavar="PERCENT",
        help="run live every call of the oracles whose sources or packages have changed since all their calls ran live, and "
        "this share of the others, another one every day; of slow tests four times that share",
    )
    group.addoption(
        "--record", action="store_true", help="run every oracle, and write what it returns to tests/records/"
    )
    group.addoption(
        "--but-paper",
        action="store_true",
        help="leave out what the last default run has passed, where it asks for no call that would run live now",
    )
    group.addoption("--sample", type=float, default=1.0, help="percent of the calls that run live by default (1.0)")
    group.addoption("--sample-seed", default=None, help="which calls those are; by default it is the day")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    option = config.option
    if option.sample_seed is None:  # workers get the controller's
        option.sample_seed = datetime.date.today().isoformat()
    config.stash[CLAIMS] = getattr(config, "workerinput", {}).get("claims") or tempfile.mkdtemp()
    live = option.live or option.drift is not None
    mode = Mode.RECORD if option.record else Mode.LIVE if live else Mode.SAMPLE
    share = option.sample if option.drift is None else option.drift
    own = Records(
        mode,
        seed=option.sample_seed,
        share=share / 100,
        claims=Path(config.stash[CLAIMS]),
        changed=None if option.live or option.drift is None else frozenset(_changed()),
    )
    config.stash[OWN], config.stash[ALL] = own, Gathered()
    records.current = own


def _changed() -> set[str]:
    """Return the oracles all of whose calls run: all of them where a package is another one."""
    oracles = oracles_of(FOLDER)
    return set(oracles) if other_versions() else changed_oracles(oracles)


def pytest_unconfigure(config: pytest.Config) -> None:
    records.current = None
    if not hasattr(config, "workerinput"):
        shutil.rmtree(config.stash[CLAIMS], ignore_errors=True)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell a worker the folder in which all processes say what they run live."""
    node.workerinput["claims"] = node.config.stash[CLAIMS]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """In a default run all tests of a file run in one process, where what they share is made once. Live, one file can take as
    long as all others."""
    if config.stash[OWN].mode is not Mode.SAMPLE or config.getoption("dist") != "load":
        return None
    from xdist.scheduler import LoadFileScheduling

    return LoadFileScheduling(config, log)


def pytest_sessionstart(session: pytest.Session) -> None:
    """Say which calls run live, with `-q` too, for which pytest has no header."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None and not hasattr(session.config, "workeroutput"):
        for line in header(session.config.stash[OWN]):
            reporter.write_line(line)


def header(own: Records) -> list[str]:
    said = ", ".join(f"{name} {version}" for name, version in read_versions(own.folder).items())
    how = {
        Mode.SAMPLE: f"{100 * own.share:g} % of the calls run live, --sample-seed {own.seed}",
        Mode.LIVE: "every call runs live once"
        if own.changed is None
        else f"every call of {len(own.changed)} oracles runs live once, and {100 * own.share:g} % of the others', of {own.seed}",
        Mode.RECORD: "every call runs live and is written",
    }
    return [f"records: of {said}; {how[own.mode]}", *other_versions(own.folder)]


def pytest_runtest_setup(item: pytest.Item) -> None:
    own = item.config.stash[OWN]
    item.stash[BEFORE] = len(own.requests)
    asked = _passed(item.config).get(item.nodeid) if item.config.option.but_paper else None
    if asked is not None and not any(map(own.is_due, asked)):
        for request in asked:
            oracle, key = request.split(" ")
            own.asked.setdefault(oracle, set()).add(key)
        pytest.skip("passed in the last default run, and no oracle would run live")
    for name in _shared(own):
        if item.get_closest_marker(name) and not own.chosen(item.nodeid, _times(own)):
            asks = _may_ask(item.path, own.folder) if own.mode is Mode.LIVE else frozenset[str]()
            if not asks & (own.changed or frozenset()):
                own.left_out |= asks
                pytest.skip(f"{name}, and not in the sample of {own.seed}: pytest --live")


@cache
def _may_ask(test: Path, folder: Path) -> frozenset[str]:
    """Return the oracles on record that the tests of a file may ask for."""
    return run_by(test, oracles_of(folder))


def _shared(own: Records) -> tuple[str, ...]:
    """Return the markers of whose tests a run has a share; one for drift has all that may ask for a changed oracle."""
    if own.mode is Mode.SAMPLE:
        return SHARED
    return ("slow",) if own.mode is Mode.LIVE and own.changed is not None else ()


def _times(own: Records) -> float:
    """Return how many times a run's own share it has of the tests of a marker."""
    return 1.0 if own.mode is Mode.SAMPLE else SLOW_OF_DRIFT


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """A test whose package is not there is skipped, in a default run."""
    own = item.config.stash[OWN]
    before = item.stash[BEFORE]
    own.always = item.get_closest_marker("live") is not None
    own.tries_fewer = _is_property(item)
    try:
        result = yield
        if own.mode is Mode.SAMPLE and not own.tries_fewer:
            item.user_properties.append((ASKED, sorted(set(own.requests[before:]))))
        return result
    except Exception as error:
        package = missing_package(error)
        if package is None or item.config.stash[OWN].mode is not Mode.SAMPLE:
            raise
        skip_for(package, error)


# --- what a default run has passed, with the calls that it asked for; but for the examples of properties, of which it has fewer

ASKED = "calls of oracles"
PASSED: pytest.StashKey[dict[str, list[str]]] = pytest.StashKey()
_CACHED = "memcalc/passed"


def _is_property(item: pytest.Item) -> bool:
    """Whether hypothesis finds examples for a test: a default run tries fewer."""
    return getattr(getattr(item, "obj", None), "is_hypothesis_test", False)


def _passed(config: pytest.Config) -> dict[str, list[str]]:
    if PASSED not in config.stash:
        cache = getattr(config, "cache", None)
        config.stash[PASSED] = {} if cache is None else cache.get(_CACHED, {})
    return config.stash[PASSED]


# --- the end


class Gathered:
    """What all processes of a run were asked for and have made."""

    def __init__(self) -> None:
        self.asked: dict[str, set[str]] = {}
        self.live: dict[str, set[str]] = {}
        self.made: dict[str, dict[str, str]] = {}
        self.ran_live = 0
        self.lacking: set[str] = set()
        self.left_out: set[str] = set()
        self.complete = True
        self.wrong: list[str] = []

    def add(self, text: str) -> None:
        part = json.loads(text)
        for name, all_of in (("asked", self.asked), ("live", self.live)):
            for oracle, keys in part[name].items():
                all_of.setdefault(oracle, set()).update(keys)
        for oracle, calls in part["made"].items():
            own = self.made.setdefault(oracle, {})
            self.wrong += [
                f"{oracle}{call} has two results in one run"
                for call in calls
                if own.get(call, calls[call]) != calls[call]
            ]
            own |= calls
        self.ran_live += part["ran live"]
        self.lacking |= set(part["lacking"])
        self.left_out |= set(part["left out"])


OWN = pytest.StashKey[Records]()
BEFORE = pytest.StashKey[int]()
"""The calls that were asked for before a test and its fixtures."""
ALL = pytest.StashKey[Gathered]()
CLAIMS = pytest.StashKey[str]()


def handed_over(own: Records) -> str:
    asked = {oracle: sorted(keys) for oracle, keys in own.asked.items()}
    live = {oracle: sorted(keys) for oracle, keys in own.live.items()}
    several = {"lacking": sorted(own.lacking), "left out": sorted(own.left_out)}
    return json.dumps({"asked": asked, "live": live, "made": own.made, "ran live": own.ran_live, **several})


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" and report.passed:
        _reported.update((report.nodeid, value) for name, value in report.user_properties if name == ASKED)


_reported: dict[str, Any] = {}
"""The tests of this process, or of all workers, that have passed, with the calls that they asked for."""


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    gathered = node.config.stash[ALL]
    text = getattr(node, "workeroutput", {}).get("records")
    if text is None:
        gathered.complete = False
    else:
        gathered.add(text)


def asks_for_all(config: pytest.Config) -> bool:
    """Whether all tests were to run, as far as the command line says."""
    option = config.option
    chosen = option.keyword or option.markexpr or option.deselect or getattr(option, "lf", False) or option.maxfail
    return config.args_source is not pytest.Config.ArgsSource.ARGS and not chosen


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    config = session.config
    own, gathered = config.stash[OWN], config.stash[ALL]
    if hasattr(config, "workeroutput"):
        config.workeroutput["records"] = handed_over(own)
        return
    gathered.add(handed_over(own))
    if own.mode is Mode.SAMPLE and getattr(config, "cache", None) is not None:
        config.cache.set(_CACHED, dict(sorted(_reported.items())))  # type: ignore[union-attr]
    whole = asks_for_all(config) and gathered.complete and exitstatus == pytest.ExitCode.OK
    if own.mode is Mode.RECORD and not whole and gathered.made and other_versions():
        gathered.wrong += [f"nothing is written: {line}; record all, and nothing may fail" for line in other_versions()]
    elif own.mode is Mode.RECORD:
        write(FOLDER, gathered.made, whole=whole)
    elif own.mode is Mode.LIVE and whole:
        gathered.wrong += unasked(gathered)
    if own.mode is not Mode.SAMPLE and exitstatus == pytest.ExitCode.OK and not other_versions():
        write_digests(FOLDER, {oracle: digest_of(oracle) for oracle in checked(gathered)})
    if gathered.wrong:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def unasked(gathered: Gathered) -> list[str]:
    """Return a line for each call that no test has asked for; but those of oracles that a test left out may ask for."""
    return [
        f"{oracle}{call} is on record and no test asks for it: pytest --record takes it out"
        for oracle in oracles_of(FOLDER)
        if oracle not in gathered.left_out
        for call in read_book(FOLDER, oracle)
        if key_of(call) not in gathered.asked.get(oracle, set())
    ]


def checked(gathered: Gathered) -> list[str]:
    """Return the oracles all of whose calls on record have run live."""
    return [
        oracle
        for oracle, keys in gathered.live.items()
        if (book := read_book(FOLDER, oracle)) and keys >= {key_of(call) for call in book}
    ]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    gathered = config.stash[ALL]
    calls = sum(map(len, gathered.asked.values()))
    terminalreporter.write_line(
        f"records: {calls} calls of {len(gathered.asked)} oracles, {gathered.ran_live} ran live"
    )
    for oracle in sorted(gathered.lacking):
        terminalreporter.write_line(f"{oracle} ran live for lack of a record: pytest --record writes it", yellow=True)
    for line in gathered.wrong:
        terminalreporter.write_line(line, red=True)
