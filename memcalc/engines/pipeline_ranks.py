"""The ranks of a pipeline, one of each stage: Megatron's, those of transformers' own layers, and Megatron-DeepSpeed's."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from memcalc.core.selective import per_op
from memcalc.engines.rank import ONE_STATE, WHOLE_STEP, HoldingsAndSums, Rank, decides_holdings, sums_of
from memcalc.engines.runs import forget_old, kernels_of, made_once
from memcalc.kernels import Kernels, kept_by_kernels
from memcalc.layout.collectives import Collective
from memcalc.tape.profile import Choices, Cut, Profile, cut_of, is_resizable
from memcalc.tape.runs import NO_MIDDLE

if TYPE_CHECKING:
    from collections.abc import Hashable

    from memcalc.engines.megatron.engine import Stage
    from memcalc.inputs.model import Model
    from memcalc.megatron.gpt_model import GPTModel
    from memcalc.setup.setup import Setup


def megatron_ranks(model: Model, setup: Setup) -> list[Rank]:
    from memcalc.engines.megatron import engine as megatron
    from memcalc.engines.megatron.collectives import collectives_of
    from memcalc.engines.megatron.order import order_of
    from memcalc.megatron.schedules import states, turns_to_play

    assert setup.attention is not None
    kernels = Kernels((), megatron.SOURCE, "modelled")
    choices = Choices(setup.compute_dtype, setup.attention, setup.recompute == "full", True, kernels=kernels)
    out: list[Rank] = []
    made = model.profiles.setdefault(("profiles of chunks", *choices), {})
    held = model.profiles.setdefault(("held by stages", *decides_holdings(setup), setup.dp, setup.shards), {})
    for stage in megatron.stages(model, setup):
        if setup.pp_rank not in (None, stage.rank):
            continue
        profiles: list[Profile] = []
        for chunk in stage.chunks:
            key = chunk, chunk.branch(setup.micro_batch_size, setup.tokens_per_part)
            make = partial(_of_chunk, model, chunk, choices, setup)
            profiles.append(made_once(made, key, setup.tokens_per_part, make))
        holdings, sums = _held_by(held, setup, stage)
        steps = setup.pp, setup.micro_batches, len(stage.chunks), setup.microbatch_group_size
        played = turns_to_play(setup.schedule, stage.rank, *steps)
        order = states(setup.schedule, stage.rank, *steps)
        sends = partial(collectives_of, stage=stage, profiles=profiles)
        rank = Rank(
            stage.rank, holdings, sums, tuple(profiles), tuple(order), stage.layers, sends, list[Collective],
            played,
            between=megatron.between_stages(setup, stage) if setup.pp > 1 else None,
            in_order=partial(order_of, setup, stage, holdings) if played else None,
        )  # fmt: skip
        out.append(rank)
    return out


def _held_by(held: dict[Hashable, HoldingsAndSums], setup: Setup, stage: Stage) -> HoldingsAndSums:
    """Return what a stage of Megatron's holds, made once for all setups that hold the same. `held` has what stages hold in the
    other setups that agree in all but a micro-batch, a length and the schedule."""
    from memcalc.engines.megatron.engine import decided_by_length, holdings_of

    fuses = stage.chunks[0].fuses_softmax(setup.micro_batch_size, setup.tokens_per_part)
    waiting = None if setup.wgrad_deferral_limit is None else setup.micro_batches
    key = stage.rank, stage.chunks, decided_by_length(setup, stage), fuses, waiting
    if key not in held:
        holdings = holdings_of(setup, stage)
        held[key] = HoldingsAndSums(holdings, sums_of(holdings))
    return held[key]


def _of_chunk(model: Model, chunk: GPTModel, choices: Choices, setup: Setup) -> Profile:
    """Return the profile of a chunk of a stage. Chunks that differ in their number of equal layers share a run."""
    cut, layout = cut_of(chunk, choices), chunk.layout
    batch, seq = setup.micro_batch_size, setup.tokens_per_part
    if layout.offloaded:  # a layer brings back what the one before it has saved
        return Profile(Cut(chunk.layers, choices, NO_MIDDLE).run(chunk, batch, seq))
    if not cut.middle.more or layout.recompute_layers is not None:
        return Profile(cut.run(chunk, batch, seq))
    alike = layout._replace(layers=cut.depth, routed=layout.routed[: cut.depth])
    key = ("cut", *cut.choices, alike, cut.middle.early, cut.middle.late, chunk.branch(batch, seq))
    run = made_once(model.profiles, key, seq, partial(cut.run, chunk, batch, seq))
    return Profile(run._replace(middle=cut.middle))


def staged_ranks(model: Model, setup: Setup, *, fullest: bool = False) -> list[Rank]:
    """Return the ranks of stages of transformers' own layers. A profile covers a whole step, with all micro-batches. `fullest`:
    leave out ranks that another one has the highest peak of."""
    from memcalc.engines.fsdp2 import pipeline as engine
    from memcalc.engines.fsdp2.alike import fullest_of
    from memcalc.engines.fsdp2.pipeline_sent import collectives_of
    from memcalc.engines.fsdp2.staged_holdings import holdings_of, steady_micro_batches
    from memcalc.pipelining.orders import most_in_flight, order

    assert setup.attention is not None and setup.cross_entropy is not None
    kernels = kernels_of(model, setup, setup.cross_entropy)
    known = model.profiles.setdefault("actions", {})
    out: list[Rank] = []
    every = engine.staged_ranks(model, setup)
    for staged in fullest_of(setup, every) if fullest else every:
        if setup.pp_rank not in (None, staged.number):
            continue
        holdings = holdings_of(setup, staged)
        choices = Choices(
            setup.compute_dtype, setup.attention, setup.recompute != "none", False, kernels=kernels, hooks=holdings.hooks,
            policy=per_op if setup.recompute == "op" else None, input_require_grads=setup.input_require_grads,
        )  # fmt: skip
        own, program = staged.model, staged.program
        branch = program.stages[0].stage_model.branch(setup.micro_batch_size, setup.tokens_per_part)
        alike = choices._replace(hooks=holdings.hooks.alike) if is_resizable(holdings.hooks) else choices
        own_key = engine.key_of(setup, staged)
        of_run = ("run", *alike, own_key, branch)
        run = partial(engine.trace_of, setup, staged, alike, known)
        base = made_once(model.profiles, of_run, setup.tokens_per_part, run)
        key = ("profile", *choices, own_key, branch)
        made = made_once(model.profiles, key, setup.tokens_per_part, partial(engine.profile_of, holdings.hooks, base))
        forget_old(model.profiles, {of_run: len(base.log), key: len(base.log)})
        holdings = holdings._replace(step=(*holdings.step, *engine.in_flight_at_updates(setup, made)))
        actions = order(
            setup.schedule,
            staged.number,
            setup.pp,
            steady_micro_batches(setup, staged.number),
            setup.virtual_stages,
        )
        sends = partial(collectives_of, rank=staged, made=made)
        rank = Rank(
            staged.number, holdings, sums_of(holdings), (made,), ONE_STATE, own.layers, sends,
            list[Collective], WHOLE_STEP, in_flight=most_in_flight(actions),
            on_paper=engine.paper_micro_batches(setup, staged.number),
        )  # fmt: skip
        out.append(rank)
    return out


def deepspeed_stages(model: Model, setup: Setup) -> list[Rank]:
    """Return the ranks of stages of Megatron-DeepSpeed's layers. A profile covers a whole step, with all micro-
    batches."""
    from memcalc.engines.deepspeed import pipeline as engine
    from memcalc.engines.deepspeed.megatron_deepspeed import KERNELS
    from memcalc.engines.deepspeed.stages import enough_micro_batches, in_flight

    assert setup.attention is not None
    kernels = KERNELS
    choices = Choices(setup.compute_dtype, setup.attention, setup.recompute == "full", False, kernels=kernels)
    out: list[Rank] = []
    for stage in engine.stage_ranks(model, setup):
        if setup.pp_rank not in (None, stage.number):
            continue
        own = stage.model
        holdings = engine.holdings_of(setup, stage)
        kept = kept_by_kernels(setup.kernels, setup.attention, own.program, setup.compute_dtype)
        holdings = holdings._replace(always=(*holdings.always, *kept))
        branch = own.program.branch(setup.micro_batch_size, setup.tokens_per_part)
        program: Any = own.program
        key = ("profile", *choices, program.layout, engine.key_of(setup, stage), branch)
        made = made_once(model.profiles, key, setup.tokens_per_part, partial(engine.profile_of, setup, stage, choices))
        sends = partial(engine.collectives_of, rank=stage, profile=made)
        rank = Rank(
            stage.number, holdings, sums_of(holdings), (made,), ONE_STATE, own.layers, sends,
            list[Collective], in_flight=in_flight(stage.number, setup.pp, setup.micro_batches),
            on_paper=enough_micro_batches(stage.number, setup.pp, setup.micro_batches),
        )  # fmt: skip
        out.append(rank)
    return out
