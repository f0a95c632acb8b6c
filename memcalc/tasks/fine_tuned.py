"""A program as a trainer of fine-tuning runs it: over packed rows, with its saved activations on the host, with noise."""

from __future__ import annotations

import copy
from math import ceil
from typing import TYPE_CHECKING, Any

from memcalc.kernels.flash_attention import rounds_tokens
from memcalc.layout.packing import Packing

if TYPE_CHECKING:
    from memcalc.inputs.model import Model
    from memcalc.setup.setup import Setup


def packing_of(setup: Setup) -> Packing:
    """Return the packing of a setup's rows: of sequences of the given lengths, or one sequence each."""
    if setup.lengths is None:
        return Packing()
    from memcalc.inputs.lengths import lengths_of

    given = lengths_of(setup.lengths)
    return Packing(max(1, ceil((setup.seq_len or 1) / given.mean)), round(given.attended))


def longest_of(setup: Setup) -> int:
    """Return the tokens of the longest sequence of packed rows."""
    if setup.lengths is None:
        return setup.seq_len or 1
    from memcalc.inputs.lengths import lengths_of

    return lengths_of(setup.lengths).longest


def fine_tuned(model: Model, setup: Setup) -> Model:
    """Return the model as the trainer runs it.

    With sdpa the mask of packed rows is a square of all tokens of a micro-batch; what is moved to the host depends on sizes; so
    does the number of sequences in a row; flash-attn's backward rounds tokens up. None of these is a polynomial in batch and
    seq.
    """
    from memcalc.inputs.model import Model

    rows = packing_of(setup) if setup.packing else None
    offloads, noisy = setup.offload_activations != "none", setup.neftune_alpha is not None
    rounds = setup.has_flash_attn and not setup.padded and rounds_tokens(setup.seq_len)
    rounds = rounds or setup.flash_attention_version == 3  # which counts tiles
    key = "fine-tuned", rows, setup.attention, offloads, noisy, rounds
    if key not in model.profiles:
        own: Any = copy.copy(model.program)
        own.packed_rows, own.offloads_activations, own.noisy_embeddings = rows, offloads, noisy
        own.polynomial = own.polynomial and not offloads and (rows is None or setup.attention == "flash")
        own.polynomial = own.polynomial and setup.lengths is None and not rounds
        made = Model(model.name, model.model_type, own)
        made.tuning, made.whole, made.task = model.tuning, model.whole, model.task
        model.profiles[key] = made
    return model.profiles[key]
