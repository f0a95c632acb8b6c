"""The tensors of quantised weights that stage 3 does not partition."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcalc.core.rows import Row

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memcalc.inputs.model import Model


def scales_of(model: Model) -> Iterator[Row]:
    """Yield the rows of what holds quantised weights beside their codes. It is no parameter, and whole on every rank."""
    for w in model.weight_classes:
        if w.packing is not None:
            for one in w.packing.stored(w.shape)[1:]:
                name, source = f"{w.name}.{one.name}", w.packing.source
                yield Row("parameters", name, one.shape, one.dtype, model.copies(w), "always", "exact", source)
