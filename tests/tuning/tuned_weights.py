"""The weights of a model of which part trains, as the other side of `peft_oracle`; without the step that an estimate runs."""

from __future__ import annotations

from typing import Any

import memcalc
from memcalc.inputs.options import check_options
from memcalc.setup.resolved import resolve
from memcalc.tasks.tasked import tasked
from memcalc.tuning.parts import full_name


def weights_of(model: memcalc.Model, **options: Any) -> list[tuple[str, list[int], bool]]:
    """Return name, shape and whether it trains, of every weight. Raises InputError as `estimate` does."""
    model.check_step()
    program = tasked(model, resolve(check_options({"seq_len": 8, **options}), model)).program
    return [(full_name(w), [dim.size for dim in w.shape], program.wants_gradient(w)) for w in program.weights()]
