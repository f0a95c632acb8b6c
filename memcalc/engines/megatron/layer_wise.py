"""Muon as Megatron runs it (core/optimizer/muon.py, layer_wise_optimizer.py): for the matrices inside the layers, with Adam
for the embedding, the head, norms and biases.

Muon needs whole matrices, so the distributed optimizer's flat shards are not for it. `--optimizer dist_muon` gives whole
weights to ranks (LayerWiseDistributedOptimizer): sorted by their sizes, one to each rank in turn, there and back. Gradients
are all-reduced; updated weights are gathered.
"""

from __future__ import annotations

from collections import Counter
from itertools import cycle
from typing import TYPE_CHECKING, Final

from memcalc.core.dims import numel
from memcalc.optimizers import Parameter

if TYPE_CHECKING:
    from collections.abc import Mapping

    from memcalc.families.base.module import Weight
    from memcalc.setup.setup import Setup

SOURCE: Final = "megatron/core/optimizer/layer_wise_optimizer.py"
_ENDS: Final = ("embedding.word_embeddings.weight", "output_layer.weight")
"""The weights with is_embedding_or_output_parameter."""
_OF_MATRIX, _OF_OTHER = 2, 3
"""The fp32 numbers that a rank keeps of an element that it updates: the main weight, and one state or two."""


def is_by_layer(setup: Setup) -> bool:
    """Tell whether the optimizer updates whole weights in turn."""
    return setup.optimizer == "muon"


def shards_buffers(setup: Setup) -> bool:
    """Tell whether ranks share flat buffers, as the distributed optimizer's do."""
    return bool(setup.zero) and not is_by_layer(setup)


def updated(setup: Setup, weights: Mapping[Weight, int], ranks: int) -> list[Parameter]:
    """Return what one rank of `ranks` updates: all weights, or with dist_muon those of the rank that has most."""
    single = _one_by_one(weights)
    if setup.zero and ranks > 1:
        single = max(_ranks(single, ranks), key=_bytes)
    return [Parameter(w.name, w.shape, count, is_matrix(w)) for w, count in single.items()]


def is_matrix(weight: Weight) -> bool:
    """Tell whether Muon updates a weight: one with two dims that is neither the embedding nor the head."""
    return len(weight.shape) == 2 and weight.name not in _ENDS


def _one_by_one(weights: Mapping[Weight, int]) -> Counter[Weight]:
    """Count the weights with every expert's by itself, as TEGroupedMLP has them."""
    out: Counter[Weight] = Counter()
    for weight, count in weights.items():
        if len(weight.shape) == 3:
            out[weight._replace(shape=weight.shape[1:])] += count * weight.shape[0].size
        else:
            out[weight] += count
    return out


def _ranks(weights: Counter[Weight], ranks: int) -> list[Counter[Weight]]:
    """Return the weights of each rank (shard_params)."""
    out: list[Counter[Weight]] = [Counter() for _ in range(ranks)]
    turns = cycle([*range(ranks), *reversed(range(ranks))])
    for weight in sorted(weights, key=lambda w: numel(w.shape)[0]):
        for _ in range(weights[weight]):
            out[next(turns)][weight] += 1
    return out


def _bytes(weights: Mapping[Weight, int]) -> int:
    return sum(
        numel(w.shape)[0] * count * 4 * (_OF_MATRIX if is_matrix(w) else _OF_OTHER) for w, count in weights.items()
    )
