"""All kinds of layers, by their names in the notation and by torch's."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from memcalc.families.base.layers import convolutions as c
from memcalc.families.base.layers import dense as d
from memcalc.families.base.layers import norms as n
from memcalc.families.base.layers import recurrent as r
from memcalc.families.base.layers import simple as s

if TYPE_CHECKING:
    from collections.abc import Mapping

    from memcalc.families.base.layers.layer import Layer


@cache
def kinds() -> Mapping[str, type[Layer]]:
    """Return the kinds by their names, in the order of the documents."""
    every: tuple[type[Layer], ...] = (
        c.Conv2d, c.Conv1d, c.ConvTranspose2d, c.MaxPool2d, c.AvgPool2d, c.AdaptiveAvgPool2d, n.BatchNorm1d, n.BatchNorm2d,
        n.SyncBatchNorm, n.LayerNorm, n.GroupNorm, d.Linear, d.Embedding, d.Attention, r.LSTM, r.GRU, r.RNN, s.ReLU,
        s.LeakyReLU, s.GELU, s.SiLU, s.Sigmoid, s.Tanh, s.Softmax, s.Dropout, s.Flatten, s.Identity, s.Transpose, s.Last,
    )  # fmt: skip
    return {kind.kind: kind for kind in every}


@cache
def by_torch_name() -> Mapping[str, type[Layer]]:
    """Return the kinds that are classes of torch.nn, by the class's name."""
    own = ("Attention", "Transpose", "Last")
    return {kind.torch: kind for kind in kinds().values() if kind.torch not in own}
