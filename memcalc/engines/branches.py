"""Keys of setups that have the same polynomials. A micro-batch, a sequence length and a number of micro-batches decide
the runs of a rank and the rows that it holds, as in the keys of `memcalc.engines.ranks`."""

from __future__ import annotations

from functools import lru_cache, partial
from math import lcm
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from memcalc.engines.base.holdings import ENOUGH_MICRO_BATCHES
from memcalc.engines.ranks import parts_of
from memcalc.engines.runs import kernels_of
from memcalc.megatron.schedules import states

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable

    from memcalc.engines.megatron.engine import Stage
    from memcalc.families.base.program import Program
    from memcalc.inputs.model import Model
    from memcalc.kernels import Kernels
    from memcalc.setup.setup import Setup

_BLOCKS: Final = 8
"""Megatron's softmax kernel takes the attention heads of a micro-batch in blocks of this size, or of 4."""


class Branches(NamedTuple):
    """Keys that distinguish setups which differ only in the micro-batch, the sequence length and the number of
    micro-batches."""

    of: Callable[[Setup], Hashable]
    """Setups with an equal key have the same polynomials, if no kernel pads queries. If one does, the remainder of
    `tokens_per_part` must be equal, too (`Program.remainder`)."""
    steps: Callable[[int], Hashable]
    """Numbers of micro-batches with an equal key differ only in how often a rank sends."""
    unit: int
    """Micro-batches that differ by a multiple of this number are refused alike."""


def branches_of(model: Model, setup: Setup) -> Branches:
    """Return the keys for all setups that differ from this one only in those numbers."""
    unit = _unit(setup)
    if setup.engine == "megatron":
        from memcalc.engines.megatron.engine import stages

        return Branches(partial(_of_megatron, stages(model, setup), {}), partial(_states, setup), unit)
    assert setup.cross_entropy is not None
    kernels = kernels_of(model, setup, setup.cross_entropy)
    programs = list(dict.fromkeys(_programs(model, setup)))
    return Branches(partial(_of_programs, programs, kernels), partial(_enough, setup), unit)


def _states(setup: Setup, micro_batches: int) -> Hashable:
    """Return the states of Megatron's ranks."""
    chunks = setup.virtual_stages if setup.schedule == "interleaved" else 1
    group = setup.microbatch_group_size
    of_ranks = (_states_of(setup.schedule, rank, setup.pp, micro_batches, chunks, group) for rank in range(setup.pp))
    limit = setup.wgrad_deferral_limit
    waiting = 0 if limit is None else min(limit or micro_batches, micro_batches - 1)
    return waiting, *of_ranks


@lru_cache(maxsize=4096)
def _states_of(schedule: str, rank: int, stages: int, micro_batches: int, chunks: int, group: int | None) -> Hashable:
    return frozenset(states(schedule, rank, stages, micro_batches, chunks, group))


def _enough(setup: Setup, micro_batches: int) -> Hashable:
    """Return the key of a number of micro-batches. A pipeline's runs and buffers cover all micro-batches."""
    return micro_batches if setup.pp > 1 else min(micro_batches, ENOUGH_MICRO_BATCHES)


def _unit(setup: Setup) -> int:
    """Return the multiple of micro-batches that is refused alike. Megatron's softmax takes blocks of heads. If tokens
    of tensor-parallel ranks go to experts, each rank sends an equal slice of them."""
    blocks = _BLOCKS if setup.kernels == "megatron" and setup.attention in ("eager", "unfused") else 1
    return lcm(blocks, setup.tp) if min(setup.tp, setup.ep) > 1 else blocks


def _programs(model: Model, setup: Setup) -> list[Program]:
    if setup.pp == 1:
        return [part.program for part in parts_of(model, setup).values()]
    if setup.engine == "deepspeed":
        from memcalc.engines.deepspeed.pipeline import stage_ranks

        return [stage.model.program for stage in stage_ranks(model, setup)]
    from memcalc.engines.fsdp2.staged_rank import staged_ranks

    return [
        part.program.stages[0].stage_model
        for one in parts_of(model, setup).values()
        for part in staged_ranks(one, setup)
    ]


def _of_programs(programs: Iterable[Program], kernels: Kernels, setup: Setup) -> Hashable:
    tokens = setup.micro_batch_size * (setup.seq_len or 0)
    own: list[Hashable] = []
    for program in programs:
        sized: Any = program
        chunks = kernels.chunks(tokens, sized.vocab.size, sized.hidden.size) if kernels.chunks else None
        branch = program.branch(setup.micro_batch_size, setup.tokens_per_part)
        own.append((chunks, branch, program.outgrown(setup.seq_len or 0)))
    return tuple(own)


def _of_megatron(of_ranks: Iterable[Stage], held: dict[int | None, Hashable], setup: Setup) -> Hashable:
    """Return the key of a setup with Megatron's stages. `held` caches the part that depends on the sequence length.

    The kernel of the softmax matters to unfused attention only.
    """
    from memcalc.engines.megatron.engine import decided_by_length

    if setup.seq_len not in held:
        held[setup.seq_len] = frozenset(decided_by_length(setup, stage) for stage in of_ranks)
    branches: set[Hashable] = {(setup.micro_batch_size == 1, setup.tokens_per_part == 1)}
    for chunk in (chunk for stage in of_ranks for chunk in stage.chunks):
        if setup.attention == "unfused" or not chunk.polynomial:
            branches.add(chunk.branch(setup.micro_batch_size, setup.tokens_per_part))
    return frozenset(branches), held[setup.seq_len]
