"""Names that may have been meant: the like, and none that resembles what was typed much less than the best."""

from __future__ import annotations

import pytest

import memcalc
from memcalc.errors import nearest


def test_only_names_about_as_alike_as_the_best_are_told() -> None:
    assert nearest("precison", ["precision", "packing", "json"]) == ["precision"]
    assert nearest("gpu", ["gpus", "gpu", "tp"]) == ["gpu", "gpus"]
    assert nearest("xyz", ["gpus"]) == []


def test_a_size_alone_is_told_to_be_an_option() -> None:
    with pytest.raises(
        memcalc.InputError, match="--model 8B: unknown model; for model states alone give it as --params 8B"
    ):
        memcalc.estimate("8B")
