"""The rows of a model's weights in memory."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from memcalc.inference.weights import rows_by_weight

if TYPE_CHECKING:
    from memcalc.core.dtypes import DType
    from memcalc.core.rows import Row
    from memcalc.families.base.module import Weight
    from memcalc.families.base.program import Program
    from memcalc.inference.parallel import Stage
    from memcalc.inference.weights import Method
    from memcalc.inputs.model import Model


def weights(
    model: Model, program: Program, dtype: DType, method: Method | None, stage: Stage, ep: int
) -> list[tuple[str, Row]]:
    """Return the rows of a rank's weights, each with the part of the model that it belongs to. `program` is the rank's; `ep`
    ranks share the experts.

    A tied weight is on the first stage, and a copy of it on the last one if that is another.
    """
    own = (w._replace(shape=_own(w, w.component, ep)) for w in program.weights() if is_on(w, stage, program))
    found: Counter[tuple[str, str, tuple[int, ...], DType]] = Counter()
    first: dict[tuple[str, str, tuple[int, ...], DType], Row] = {}
    for weight, row in rows_by_weight(model, dtype, method, program, own):
        key = weight.component, row.name, tuple(dim.size for dim in row.shape), row.dtype
        first.setdefault(key, row)
        found[key] += 1
    return [(key[0], first[key]._replace(copies=copies)) for key, copies in found.items()]


def is_on(weight: Weight, stage: Stage, program: Program) -> bool:
    """Tell whether a stage holds a weight. Those before the layers are the embeddings; those behind them the norm and the
    head."""
    if weight.layer is not None:
        return weight.layer in stage.layers
    if weight.component == "embedding":
        ties = weight.name.startswith(f"{program.embedding}.") and program.config.tie_word_embeddings
        return stage.first or (stage.last and ties)
    return stage.last


def _own(weight: Weight, component: str, ep: int) -> tuple:  # type: ignore[type-arg]
    if component != "experts" or ep == 1:
        return weight.shape
    from memcalc.layout.tensor_parallel import part

    first, *rest = weight.shape
    own = part(first, ep)
    return (type(own)(f"{first.name}/ep", own.size), *rest)
