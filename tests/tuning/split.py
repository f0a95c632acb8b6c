"""A step of a rank whose layers are split, with frozen weights: `memcalc.validate`'s, in which weights are frozen and
hooked behind the split. torch's `parallelize_module` makes new parameters, and not all of them keep that they want no gradient.
"""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import memcalc
from memcalc.validate import engines, fake
from memcalc.validate.comparison import Comparison
from memcalc.validate.tuning import _freeze


def validate(model: Any, **options: Any) -> Comparison:
    report = memcalc.estimate(model, engine="fsdp2", **options)
    split = engines.split

    def frozen_behind(setup: Any, module: Any, mesh: Any) -> Any:
        module.get_input_embeddings()._forward_hooks.clear()
        made = split(setup, module, mesh)
        if report.model.program.held:
            _freeze(made, report.model.program)
        if setup.input_require_grads:
            made.enable_input_require_grads()
        return made

    with patch.object(engines, "split", frozen_behind), patch.object(fake, "split", frozen_behind):
        return Comparison(report, fake.measure(report), "fake")
