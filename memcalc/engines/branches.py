"""Which setups have the same polynomials: what of a micro-batch, a sequence and a number of micro-batches decides the runs of a
rank and the rows that it holds, as the keys of `memcalc.engines.ranks` have it."""

from __future__ import annotations

from math import lcm
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from memcalc.engines.ranks import kernels_of, parts_of

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable

    from memcalc.engines.megatron.engine import Stage
    from memcalc.families.base.program import Program
    from memcalc.inputs.model import Model
    from memcalc.kernels import Kernels
    from memcalc.megatron.gpt_model import GPTModel
    from memcalc.setup.setup import Setup

_BLOCKS: Final = 8
"""A kernel of Megatron's takes the attention heads of a micro-batch in blocks of this size, or of 4."""


class Branches(NamedTuple):
    """Of setups that differ in numbers alone."""

    of: Callable[[Setup], Hashable]
    """Setups of which this is equal have the same polynomials, where no kernel pads queries; then the remainder of `rows` has to
    be equal, too (`Program.remainder`). It is equal where `batch` and the sequence are."""
    unit: int
    """Two micro-batches of more than one sequence go the same way if they differ by a multiple of this; 0: each its own."""
    micro_batches: int
    """From so many micro-batches on their number decides nothing, but for schedules that say so themselves."""

    def batch(self, batch: Any) -> Any:
        """What of a micro-batch matters; of an array, elementwise."""
        return (batch > 1) * (1 + batch % self.unit) if self.unit else batch


def branches_of(model: Model, setup: Setup) -> Branches:
    """For all setups that differ from this one in the micro-batch, the sequence and the number of micro-batches."""
    micro_batches = setup.pp * (setup.virtual_stages + 3) + 1
    if setup.engine == "megatron":
        from memcalc.engines.megatron.engine import stages

        of_ranks = stages(model, setup)
        chunks = {chunk for stage in of_ranks for chunk in stage.chunks}
        unit = _BLOCKS if all(chunk.polynomial for chunk in chunks) else 0
        return Branches(lambda one: _of_megatron(one, of_ranks, chunks), unit, micro_batches)
    programs = _programs(model, setup)
    assert setup.cross_entropy is not None
    kernels = kernels_of(model, setup, setup.cross_entropy)
    alike = all(program.polynomial for program in programs) and kernels.chunks is None
    unit = lcm(_BLOCKS, setup.tp) if max(setup.tp, setup.ep) > 1 or setup.kernels == "megatron" else 1
    return Branches(lambda one: _of_programs(one, programs, kernels), unit if alike else 0, micro_batches)


def _programs(model: Model, setup: Setup) -> list[Program]:
    if setup.pp == 1:
        return [part.program for part in parts_of(model, setup).values()]
    if setup.engine == "deepspeed":
        from memcalc.engines.deepspeed.pipeline import stage_ranks

        return [stage.model.program for stage in stage_ranks(model, setup)]
    from memcalc.engines.fsdp2.pipeline import staged_ranks

    return [part.program.stages[0].own for one in parts_of(model, setup).values() for part in staged_ranks(one, setup)]


def _of_programs(setup: Setup, programs: Iterable[Program], kernels: Kernels) -> Hashable:
    tokens = setup.micro_batch_size * (setup.seq_len or 0)
    own: list[Hashable] = []
    for program in dict.fromkeys(programs):
        sized: Any = program
        chunks = kernels.chunks(tokens, sized.vocab.size, sized.hidden.size) if kernels.chunks else None
        branch = program.branch(setup.micro_batch_size, setup.rows)
        own.append((chunks, branch, program.outgrown(setup.seq_len or 0)))
    return tuple(own)


def _of_megatron(setup: Setup, of_ranks: Iterable[Stage], chunks: Iterable[GPTModel]) -> Hashable:
    from memcalc.engines.megatron.engine import decided_by_length

    runs = [chunk.branch(setup.micro_batch_size, setup.rows) for chunk in chunks]
    held = {decided_by_length(setup, stage) for stage in of_ranks}
    return *runs, frozenset(held)
