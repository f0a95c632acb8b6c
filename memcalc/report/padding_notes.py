"""Notes on the padding of FSDP2's shards."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from memcalc.core.dims import numel
from memcalc.engines.fsdp2.sizes import padded_elements

if TYPE_CHECKING:
    from memcalc.estimation.report import Report
    from memcalc.inputs.model import Model

_WORTH: Final = 0.05
"""The share of padding that is worth a note."""


def padding_notes(report: Report) -> list[str]:
    """Return a note on tensors with fewer rows than there are ranks: FSDP2 cuts the first dim, and pads it to a multiple of the
    ranks. Experts are such tensors."""
    s, model = report.setup, report.model
    share = _padding(model, s.shards)
    if share < _WORTH:
        return []
    most = max(
        model.weight_classes, key=lambda w: model.copies(w) * (padded_elements(w.shape, s.shards) - numel(w.shape)[0])
    )
    rows = most.shape[0].size
    fewer = [n for n in range(1, s.shards) if s.shards % n == 0 and _padding(model, n) < _WORTH]
    other = f"; --shard-group {max(fewer)} has no such padding, and larger shards" if max(fewer, default=1) > 1 else ""
    return [
        f"FSDP2 shards the first dim of a tensor: {most.name} has {rows:,} rows for {s.shards:,} ranks and is padded to "
        f"{-(-rows // s.shards) * s.shards:,}; of all that is sharded and gathered {share:.0%} is padding{other}"
    ]


def _padding(model: Model, ranks: int) -> float:
    """Return the share of padding in what ranks shard and gather."""
    padded = sum(padded_elements(w.shape, ranks) * model.copies(w) for w in model.weight_classes)
    return 1 - sum(numel(w.shape)[0] * model.copies(w) for w in model.weight_classes) / padded
