"""The optimizer's own step under DeepSpeed's ZeRO: over one flat fp32 partition at a time.

Stages 1 and 2 give the optimizer the partition of one group of parameters (stage_1_and_2.py, `_optimizer_step`), stage
3 that of one sub-group (stage3.py, `_optimizer_step`). Its states are allocated in the first step. DeepSpeed's
FusedAdam counts steps in Python; torch's optimizers keep their counters on the CPU.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Final, NamedTuple

from memcalc.core.dims import Dim, numel
from memcalc.core.dtypes import fp32
from memcalc.core.tensor import Memory
from memcalc.engines.base.holdings import step_temporaries
from memcalc.optimizers import Parameter, load_optimizer

if TYPE_CHECKING:
    from collections.abc import Hashable

    from memcalc.core.rows import Row
    from memcalc.engines.base.holdings import Holdings
    from memcalc.engines.base.script import Script
    from memcalc.inputs.model import Model
    from memcalc.setup.setup import Setup

PARTITION: Final = "flat fp32 partition"


def has_fused_adam(setup: Setup) -> bool:
    """Tell whether the optimizer is DeepSpeed's own FusedAdam (ops/adam/fused_adam.py)."""
    return setup.optimizer in ("adam", "adamw") and setup.optimizer_implementation == "fused"


def with_own_optimizer(model: Model, setup: Setup, held: Holdings) -> Holdings:
    """Return what stage 0 holds with one of DeepSpeed's own optimizers, `held` with any other."""
    if load_optimizer(setup.optimizer).only_engine is None:
        return held
    from memcalc.engines.deepspeed.own_optimizers import adapted

    return adapted(model, setup, held)


class _Step(NamedTuple):
    """A step over one partition: the bytes of its states, by name, and of its temporaries in the order of their
    lives."""

    states: tuple[tuple[str, int], ...]
    temporaries: tuple[int, ...]
    log: tuple[int, ...]
    """A temporary is allocated (its number) or freed (~number)."""


@lru_cache(maxsize=1024)
def _step(optimizer: str, implementation: str, elements: int) -> _Step:
    memory, loaded = Memory(), load_optimizer(optimizer)
    flat = [_flat("partition", elements)]
    loaded.step(memory, flat, fp32, fp32, implementation)
    states = loaded.states(flat, fp32, implementation)
    return _Step(
        tuple((state.name, numel(state.shape)[0] * state.dtype.itemsize) for state in states if state.shape),
        tuple(numel(row.shape)[0] * row.dtype.itemsize for row in memory.rows),
        tuple(memory.log),
    )


def states_come(script: Script, setup: Setup, of: Hashable, elements: int) -> None:
    """Allocate the states of the partition `of` with `elements` elements; those that partitions share with the first."""
    shared = load_optimizer(setup.optimizer).shared
    for state, nbytes in _step(setup.optimizer, setup.optimizer_implementation, elements).states:
        block = (state, None if state in shared else of)
        if state not in shared or all(event.block != block for event in script.events):
            script.comes(block, nbytes)


def steps(script: Script, setup: Setup, elements: int) -> None:
    """Allocate and free the temporaries of a step over a partition of `elements` elements."""
    step = _step(setup.optimizer, setup.optimizer_implementation, elements)
    for event in step.log:
        if event >= 0:
            script.comes(("optimizer step", event), step.temporaries[event])
        else:
            script.goes(("optimizer step", ~event))


def temporaries_of_step(optimizer: str, implementation: str, dim: str, elements: int) -> list[Row]:
    """Return the rows of the temporaries at the peak of a step over a partition of `elements` elements; `dim` is the
    name of its dim."""
    return step_temporaries(optimizer, implementation, [_flat(dim, elements)], fp32, fp32)


def _flat(dim: str, elements: int) -> Parameter:
    return Parameter(PARTITION, (Dim(dim, elements),), 1, False)
