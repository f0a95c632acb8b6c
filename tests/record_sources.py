"""What the result of an oracle's call depends on besides its arguments: its sources here, and the packages that it runs.

A record was compared with a live run of some sources and packages. As long as both stay the same, so does the result: a run
with `--drift` repeats such calls only in part, another part each day, and all calls of an oracle whose sources have changed.
"""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

from record_files import FOLDER

TESTS = Path(__file__).resolve().parent
RUN_BY_ORACLES = ("memcalc.validate", "memcalc.tracing")
"""The packages of memcalc that run real code. The others give an oracle its arguments, by which a call is known."""
_BOOKKEEPING = ("records.py", "record_files.py")
"""What keeps records and gives them back: no part of what an oracle runs."""
_FILE = "sources.json"


def digest_of(oracle: str) -> str:
    """Return a digest of an oracle's sources. Raises LookupError if its module is not there."""
    content = hashlib.sha256()
    for path in sorted(_with_what_it_imports(_module_of(oracle))):
        content.update(path.relative_to(TESTS.parent).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return content.hexdigest()[:16]


def changed_oracles(oracles: list[str], folder: Path = FOLDER) -> set[str]:
    """Return the oracles whose sources are not those of the last live run of all their calls."""
    known = read_digests(folder)
    return {oracle for oracle in oracles if known.get(oracle) != _digest_or_none(oracle)}


def run_by(test: Path, oracles: list[str]) -> frozenset[str]:
    """Return the oracles that a test file may ask for: those of the modules that it imports, directly or not, and its own."""
    files = _with_what_it_imports(test)
    return frozenset(oracle for oracle in oracles if _module_or_none(oracle) in files)


def read_digests(folder: Path) -> dict[str, str]:
    """Return the digest of each oracle when all its calls last ran live."""
    path = folder / _FILE
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def write_digests(folder: Path, oracles: Mapping[str, str]) -> None:
    """Keep the digests of oracles all of whose calls have run live."""
    content = dict(sorted({**read_digests(folder), **oracles}.items()))
    (folder / _FILE).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


@cache
def _digest_or_none(oracle: str) -> str | None:
    try:
        return digest_of(oracle)
    except LookupError:
        return None


@cache
def _module_or_none(oracle: str) -> Path | None:
    try:
        return _module_of(oracle)
    except LookupError:
        return None


def _module_of(oracle: str) -> Path:
    """Return the file of an oracle, whose name is that of its module and of the function in it."""
    parts = oracle.split(".")
    for length in range(len(parts) - 1, 0, -1):
        path = TESTS.joinpath(*parts[:length]).with_suffix(".py")
        if path.is_file():
            return path
    raise LookupError(oracle)


def _with_what_it_imports(first: Path) -> set[Path]:
    """Return a file and those that it imports, directly or not, of the tests and of `RUN_BY_ORACLES`."""
    found: set[Path] = set()
    waiting = [first]
    while waiting:
        path = waiting.pop()
        if path not in found:
            found.add(path)
            waiting += _imported(path)
    return found


@cache
def _imported(path: Path) -> tuple[Path, ...]:
    files = (_file_of(name, path) for name in _names(ast.parse(path.read_bytes())))
    return tuple(file for file in files if file is not None and file.name not in _BOOKKEEPING)


def _names(tree: ast.Module) -> Iterator[str]:
    """Yield each module that may be imported; of `from a import b` both a and a.b."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _file_of(name: str, importer: Path) -> Path | None:
    if name.split(".")[0] == "memcalc":
        is_run = any(name == package or name.startswith(f"{package}.") for package in RUN_BY_ORACLES)
        roots = (TESTS.parent,) if is_run else ()
    else:
        roots = (TESTS, importer.parent)
    for root in roots:
        path = root.joinpath(*name.removeprefix("tests.").split("."))
        if path.with_suffix(".py").is_file():
            return path.with_suffix(".py")
        if (path / "__init__.py").is_file():
            return path / "__init__.py"
    return None
