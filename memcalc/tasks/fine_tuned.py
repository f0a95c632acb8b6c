"""A program as a trainer of fine-tuning runs it: over packed rows, with its saved activations on the host, with noise."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from memcalc.layout.packing import Packing

if TYPE_CHECKING:
    from memcalc.inputs.model import Model
    from memcalc.setup.setup import Setup


def fine_tuned(model: Model, setup: Setup) -> Model:
    """Return the model as the trainer runs it.

    With sdpa the mask of packed rows is a square of all tokens of a micro-batch, and what is moved to the host depends on sizes:
    neither is a polynomial in batch and seq.
    """
    from memcalc.inputs.model import Model

    rows = Packing() if setup.packing else None
    offloads, noisy = setup.offload_activations != "none", setup.neftune_alpha is not None
    key = "fine-tuned", rows, setup.attention, offloads, noisy
    if key not in model.profiles:
        own: Any = copy.copy(model.program)
        own.packed_rows, own.offloads_activations, own.noisy_embeddings = rows, offloads, noisy
        own.polynomial = own.polynomial and not offloads and (rows is None or setup.attention == "flash")
        made = Model(model.name, model.model_type, own)
        made.tuning, made.whole, made.task = model.tuning, model.whole, model.task
        model.profiles[key] = made
    return model.profiles[key]
