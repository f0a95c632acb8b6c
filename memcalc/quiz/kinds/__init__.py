"""The kinds of questions: a file for each topic, found by its name. A file has its kinds in KINDS."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from memcalc.quiz.question import Kind
from memcalc.registry import Registry


def _read(stem: str, module: Any) -> tuple[str, tuple[Kind, ...]] | None:
    return (stem.replace("_", "-"), module.KINDS) if hasattr(module, "KINDS") else None


FILES: Final[Registry[tuple[Kind, ...]]] = Registry("memcalc.quiz.kinds", (), _read)


def all_kinds() -> Iterator[Kind]:
    """Yield every kind of question, file by file in the order of their names."""
    for name in FILES:
        yield from FILES[name]
