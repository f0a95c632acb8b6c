"""A step of a rank whose layers are split, with frozen weights or adapters: `memcalc.validate`'s, in which that comes behind
the split. peft asks a model for its plan, and torch's `parallelize_module` makes new parameters, of which not all keep that they
want no gradient.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import memcalc
from memcalc.validate import engines, fake, reference
from memcalc.validate.comparison import Comparison
from memcalc.validate.tuning import tune


def validate(model: Any, **options: Any) -> Comparison:
    report = memcalc.estimate(model, engine="fsdp2", **options)
    with tuned_behind_the_split(report):
        return Comparison(report, fake.measure(report), "fake")


@contextlib.contextmanager
def tuned_behind_the_split(report: memcalc.Report) -> Iterator[None]:
    split = engines.split

    def tuned_behind(setup: Any, module: Any, mesh: Any) -> Any:
        module.get_input_embeddings()._forward_hooks.clear()
        made = split(setup, module, mesh)
        made._device_mesh, made.config.distributed_config = mesh, engines.config_of(setup)
        tune(made, setup, report.model.program)
        if setup.input_require_grads:
            made.enable_input_require_grads()
        return made

    behind = patch.object(engines, "split", tuned_behind), patch.object(fake, "split", tuned_behind)
    with behind[0], behind[1], patch.object(reference, "tune", lambda module, *_: module):
        yield
