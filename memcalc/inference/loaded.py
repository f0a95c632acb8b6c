"""The rows of a model's weights in memory."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from memcalc.core.rows import Row
from memcalc.errors import InputError, one_line

if TYPE_CHECKING:
    from memcalc.core.dtypes import DType
    from memcalc.families.base.module import Weight
    from memcalc.families.base.program import Program
    from memcalc.inference.parallel import Stage


def weights(program: Program, dtype: DType, quantize: str, stage: Stage, ep: int) -> list[tuple[str, Row]]:
    """Return the rows of a rank's weights, each with the part of the model that it belongs to. `ep` ranks share the experts.

    A tied weight is on the first stage, and a copy of it on the last one if that is another.
    """
    if quantize != "none":
        raise InputError(f"--quantize {one_line(quantize)}: not modelled; allowed: none")
    found: Counter[tuple[str, Weight]] = Counter()
    for weight in program.weights():
        if is_on(weight, stage, program):
            found[weight.component, weight._replace(layer=None)] += 1
    source = program.source or program.weights_source
    return [
        (
            component,
            Row("parameters", w.name, _own(w, component, ep), dtype, copies, basis=program.basis, source=source),
        )
        for (component, w), copies in found.items()
    ]


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
