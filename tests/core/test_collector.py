"""The collector's switch."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from memcalc.core.collector import _Program, without_collections


class Cycle:
    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(_Program, "freezes", False)
    gc.unfreeze()
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


def test_what_was_made_is_old_and_still_collected() -> None:
    with without_collections():
        made = Cycle()
    assert any(one is made for one in gc.get_objects(generation=2))
    gone = weakref.ref(made)
    del made
    gc.collect()
    assert gone() is None


def test_what_a_program_has_frozen_stays_frozen() -> None:
    gc.freeze()
    count = gc.get_freeze_count()
    with without_collections():
        pass
    assert gc.get_freeze_count() == pytest.approx(count, abs=100)
    assert gc.get_freeze_count() > 0
    assert _Program.freezes
