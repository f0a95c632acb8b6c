"""The collector's switch."""

from __future__ import annotations

import gc
import subprocess
import sys
import textwrap
from collections.abc import Iterator

import pytest

from memcalc.core.collector import _Program, without_collections


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(_Program, "freezes", False)
    yield
    gc.enable()


def test_it_is_off_within_the_block_and_as_before_after_it() -> None:
    with without_collections():
        assert not gc.isenabled()
    assert gc.isenabled()
    gc.disable()
    with without_collections():
        pass
    assert not gc.isenabled()


def alone(code: str) -> None:
    """Run code in a process of its own: here a collection would walk what thousands of tests have left."""
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)


def test_what_was_made_is_old_and_still_collected() -> None:
    alone("""
        import gc, weakref
        from memcalc.core.collector import without_collections

        class Cycle:
            def __init__(self):
                self.itself = self

        with without_collections():
            made = Cycle()
        assert gc.get_freeze_count() == 0
        assert any(one is made for one in gc.get_objects(generation=2))
        gone = weakref.ref(made)
        del made
        gc.collect()
        assert gone() is None
    """)


def test_what_a_program_has_frozen_stays_frozen() -> None:
    alone("""
        import gc
        from memcalc.core.collector import _Program, without_collections

        gc.freeze()
        count = gc.get_freeze_count()
        with without_collections():
            pass
        assert abs(gc.get_freeze_count() - count) < 100 < count
        assert _Program.freezes
    """)
