"""TRL's trainers and LM head over transformers' models, as `memcalc validate` runs them."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from records import on_record

import memcalc
from memcalc.validate import fake, preference, run
from memcalc.validate.comparison import Comparison, Measured

_measure, _batch_of, _on_the_cpu = fake.measure, preference.batch_of, fake.on_the_cpu
_OF_DATA = ("datasets", "datasets.fingerprint", "pyarrow", "pyarrow.compute", "pyarrow.types", "pandas")
"""What TRL imports for data sets: nothing of it runs in a step."""


class _StandIn(ModuleType):
    """A module in which every name is a class."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def _stand_in(name: str) -> ModuleType:
    module = _StandIn(name)
    module.__spec__, module.__path__ = ModuleSpec(name, None), []
    return module


def import_trl() -> None:
    """Import TRL, without the packages for data sets where they are not installed."""
    if "trl.trainer.dpo_trainer" in sys.modules:
        return
    importlib.import_module("trl")  # says so first where it is not installed
    import transformers

    _ = transformers.Trainer  # looks for the packages itself
    missing = {name: _stand_in(name) for name in _OF_DATA if importlib.util.find_spec(name.partition(".")[0]) is None}
    sys.modules.update(missing)
    try:
        for task in ("dpo", "kto", "sft"):
            importlib.import_module(f"trl.trainer.{task}_trainer")
    finally:
        for name in missing:
            del sys.modules[name]


@on_record
def measured(report: memcalc.Report) -> Measured:
    """Versions are not part of a record."""
    import_trl()
    return _measure(report)._replace(environment={})


def validate(model: Any, **options: Any) -> Comparison:
    with patch.object(fake, "measure", measured):
        return run.validate(model, **options)


@on_record
def mixed_labels(report: memcalc.Report) -> Measured:
    """KTO's step with a sequence that is not desirable."""
    import_trl()

    def batch(setup: Any) -> Any:
        made = _batch_of(setup)
        made["label"][0] = False
        return made

    with patch.object(preference, "batch_of", batch):
        return _measure(report)._replace(environment={})


@on_record
def reference_peak(report: memcalc.Report) -> int:
    """The most bytes alive while the reference's forward runs of the last micro-batch."""
    import_trl()
    highest: list[int] = []
    counters = [0]
    lives: list[Any] = []

    class Noted(fake.Live):
        def __init__(self) -> None:
            super().__init__()
            lives.append(self)

    def note(model: Any) -> None:
        own = model.forward

        def forward(*args: Any, **named: Any) -> Any:
            live = lives[-1]
            if torch.is_grad_enabled():
                return own(*args, **named)
            before, live.highest = live.highest, live.now
            try:
                return own(*args, **named)
            finally:
                highest.append(live.highest)
                live.highest = max(live.highest, before)

        model.forward = forward

    with_head = preference.with_head

    def noting(setup: Any, model: Any, *, metrics: bool) -> None:
        with_head(setup, model, metrics=metrics)
        if metrics != setup.has_reference:
            note(model)

    def on_the_cpu(optimizer: Any) -> list[torch.Tensor]:
        """The optimizer's counters, which are not on a GPU."""
        found = _on_the_cpu(optimizer)
        counters[0] = sum(counter.nbytes for counter in found)
        return found

    with (
        patch.object(fake, "on_the_cpu", on_the_cpu),
        patch.object(fake, "Live", Noted),
        patch.object(preference, "with_head", noting),
    ):
        _measure(report)
    return max(highest[-2:] if report.setup.task == "kto" else highest[-1:]) - counters[0]
