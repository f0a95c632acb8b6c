"""A model of which a part trains, from the whole model and the options that say what trains."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcalc.tuning.chosen import Tuning, tuning_of

if TYPE_CHECKING:
    from memcalc.inputs.model import Model
    from memcalc.tuning.chosen import Chosen


def tuned(model: Model, chosen: Chosen) -> Model:
    """Return the model of which the chosen part trains: the model itself if all of it does, or if it was made for the same
    choice. It is made once. Raises InputError for a part that the model does not have."""
    tuning, whole = tuning_of(chosen), model.whole
    if tuning == Tuning(None, None):
        return whole
    if model.tuning == tuning:
        return model
    key = "tuned", tuning
    if key not in whole.profiles:
        from memcalc.tuning.build import build_tuned  # most runs train the whole model

        whole.profiles[key] = build_tuned(whole, tuning)
    return whole.profiles[key]
