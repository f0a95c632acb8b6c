"""States of Megatron's precision-aware optimizer, and the casts of its step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcalc.core.dims import numel
from memcalc.core.dtypes import fp32
from memcalc.core.rows import Row
from memcalc.engines.base.holdings import temporaries_of
from memcalc.megatron.precision_aware import pieces, precision_aware
from memcalc.setup.setup import DTYPES

if TYPE_CHECKING:
    from memcalc.engines.megatron.engine import Buffer
    from memcalc.optimizers import Parameter
    from memcalc.setup.setup import Setup


def states_and_casts(setup: Setup, buffer: Buffer, parameters: list[Parameter]) -> tuple[list[Row], list[Row]]:
    """Return the states of Transformer Engine's FusedAdam and what its step casts."""
    optimizer = precision_aware(setup)
    many = -(-sum(buffer.weights.values()) // buffer.ranks)
    states = [
        Row("optimizer_states", f"{s.parameter.name}: {s.name}", s.shape, s.dtype,
            s.count * (many if s.name.endswith("scale") else 1), s.life, "modelled", s.source)
        for s in optimizer.states(parameters, fp32, "fused")
    ]  # fmt: skip
    elements = sum(numel(p.shape)[0] * p.count for p in parameters)
    largest = max((numel(w.shape)[0] for w in buffer.weights), default=0)
    moment = temporaries_of(
        optimizer, "fused", pieces(elements, largest), setup.compute_dtype, DTYPES[setup.grad_dtype]
    )
    return states, moment
