"""The ranks that differ, with what each holds and runs: one for every pipeline stage, otherwise just one."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from memcalc.core.selective import per_op
from memcalc.engines import Engine, load_engine
from memcalc.engines.base.holdings import ENOUGH_MICRO_BATCHES, Holdings, padding_row
from memcalc.engines.rank import ONE_STATE, WHOLE_STEP, HoldingsAndSums, Rank, decides_holdings, sums_of
from memcalc.engines.runs import kernels_of, made_once
from memcalc.inputs.model import Model
from memcalc.kernels import kept_by_kernels
from memcalc.layout.collectives import Collective
from memcalc.optimizers import load_optimizer
from memcalc.tape.played import Played, Recorded
from memcalc.tape.profile import Choices, Profile, full_profile, is_resizable, profile, shallow_trace

if TYPE_CHECKING:
    from collections.abc import Callable

    from memcalc.setup.setup import Setup


def ranks(model: Any, setup: Setup, *, fullest: bool = False) -> list[Rank]:
    """Return the rank that was asked for, or all. `fullest`: ranks may be left out that others are as full as."""
    if not isinstance(model, Model):
        holdings, sums = _holdings(model, setup)[0]
        return [Rank(0, holdings, sums, (), (), 0, _nothing, list[Collective])]
    run = _whole_ranks
    if setup.engine == "megatron" or setup.pp > 1:
        from memcalc.engines import pipeline_ranks as pipelines

        if setup.engine == "megatron":
            return pipelines.megatron_ranks(model, setup)
        if setup.engine == "deepspeed":
            return pipelines.deepspeed_stages(model, setup)
        run = partial(pipelines.staged_ranks, fullest=fullest)
    return [rank._replace(cp=cp) for cp, own in parts_of(model, setup).items() for rank in run(own, setup)]


def _nothing(_setup: Setup) -> list[Collective]:
    return []


def parts_of(model: Model, setup: Setup) -> dict[int | None, Model]:
    """Return the part of the model of each rank that shares sequences, if these ranks differ; else that of any rank."""
    if model.model_type == "layers" and setup.dp > 1:
        from memcalc.engines.common_statistics import rank_of

        return {None: rank_of(model, setup)}
    moves, noisy = setup.offload_activations != "none", setup.neftune_alpha is not None
    if setup.packing or moves or noisy or setup.has_flash_attn:
        from memcalc.tasks.fine_tuned import fine_tuned

        return {None: fine_tuned(_of_one_rank(model, setup), setup)}
    if not setup.splits_layers:
        return {None: model}
    from memcalc.engines.parts import part_of, sharers

    own = part_of(model, setup)
    return {**sharers(own, setup)} if setup.shares_sequences else {None: own}


def _of_one_rank(model: Model, setup: Setup) -> Model:
    """Return the model, or a rank's part of it."""
    if not setup.splits_layers:
        return model
    from memcalc.engines.parts import part_of

    return part_of(model, setup)


def _whole_ranks(model: Model, setup: Setup) -> list[Rank]:
    """Return the ranks that run all layers: one rank, or several if each of them can have the highest peak."""
    held = _holdings(model, setup)
    made = [_profile(model, setup, holdings) for holdings, _ in held]
    if model.program.source:
        held = _holdings(model, setup)  # again, as a trace has shown which weights get a gradient
    return [_whole_rank(model, setup, *of) for of in zip(held, made, strict=True)]


def _whole_rank(model: Model, setup: Setup, own: HoldingsAndSums, made: Profile) -> Rank:
    holdings, sums = own
    engine = load_engine(setup.engine)
    textbook = partial(engine.textbook, model, setup)
    first = partial(_profile, model, setup, _of_the_first(holdings)) if setup.micro_batches > 1 else None
    sends = partial(_sent, engine=engine, model=model, made=made, first=first)
    if holdings.micro_batches > 1:
        rank = Rank(0, holdings, sums, (made,), ONE_STATE, model.layers, sends, textbook, WHOLE_STEP)
        return rank._replace(on_paper=holdings.micro_batches)
    over = None if holdings.order is None else holdings.order.untraced
    untraced = None if over is None else partial(_profile, model, setup, holdings._replace(over=over))
    return Rank(0, holdings, sums, (made,), ONE_STATE, model.layers, sends, textbook, first=first, untraced=untraced)


def _of_the_first(holdings: Holdings) -> Holdings:
    """Return the holdings for the first micro-batch's run: it has no gradients to add to."""
    hooks = holdings.hooks if holdings.order is None or holdings.order.first is None else holdings.order.first
    return holdings._replace(accumulates=False, hooks=hooks, over=holdings.over_first or holdings.over)


def _sent(
    setup: Setup, engine: Engine, model: Model, made: Profile, first: Callable[[], Profile] | None = None
) -> list[Collective]:
    if setup.engine == "deepspeed" and setup.zero == 3 and not made.run.source:
        from memcalc.engines.deepspeed.collectives import of_run

        own = of_run(model, setup, made.run.sent, first)
    elif setup.engine == "fsdp2" and model.tuning is not None:
        from memcalc.engines.fsdp2.backward_units import units_of_backward
        from memcalc.engines.fsdp2.engine import collectives_of
        from memcalc.layout.expert_parallel import expert_path

        experts = expert_path(model.program) if setup.ep > 1 else None
        own = collectives_of(model, setup, *units_of_backward(made.run, experts))
    else:
        own = engine.collectives(model, setup)
    if model.model_type == "layers":
        from memcalc.engines.common_statistics import collectives_of

        return [*collectives_of(setup, made), *own]
    if not setup.splits_layers:
        return own
    from memcalc.engines.parts import collectives_of_modules

    return [*collectives_of_modules(model, setup, made), *own]


def _holdings(model: Any, setup: Setup) -> tuple[HoldingsAndSums, ...]:
    """Return what one rank holds; what several ranks hold if each of them can have the highest peak."""
    program = model.program if isinstance(model, Model) else None
    outgrown = program is not None and (sum(program.idle.values()), program.outgrown(setup.seq_len or 0))
    micro_batches = min(setup.micro_batches, ENOUGH_MICRO_BATCHES)
    key = ("held", *decides_holdings(setup), setup.shards, setup.replicas, micro_batches, outgrown)
    if setup.task == "ppo":  # whose batch is a part of what is held
        key = (*key, setup.micro_batch_size, setup.micro_batches, setup.seq_len)
    if key not in model.profiles:
        if isinstance(model, Model):
            holdings = _of_engine(model, setup)
            found = [_with_masks(one, model, setup) for one in (holdings, *holdings.others)]
        else:
            found = [model.holdings(setup)]
        model.profiles[key] = tuple(HoldingsAndSums(one, sums_of(one)) for one in found)
    return model.profiles[key]


def _of_engine(model: Model, setup: Setup) -> Holdings:
    """Return what the engine holds, or one process whose backward updates the weights."""
    if load_optimizer(setup.optimizer).fuses_backward:
        from memcalc.engines import fused_backward

        return fused_backward.holdings(model, setup)
    return load_engine(setup.engine).holdings(model, setup)


def _with_masks(holdings: Holdings, model: Model, setup: Setup) -> Holdings:
    """Return the holdings with the kernels' buffers, a reference model and a padded batch's mask."""
    kept = kept_by_kernels(setup.kernels, setup.attention, model.program, setup.compute_dtype)
    if setup.has_reference:
        from memcalc.tasks.reference import reference_rows

        kept = (*kept, *reference_rows(model, setup, holdings.buffer_dtype))
    if setup.reward_model is not None:
        from memcalc.tasks.reward_model import reward_rows

        kept = (*kept, *reward_rows(setup))
    if setup.task == "ppo":
        from memcalc.engines.base.ppo_batch import with_batch

        return with_batch(holdings._replace(always=(*holdings.always, *kept)), model, setup)
    masks = (padding_row(model),) if setup.padded else ()
    order = holdings.order
    if order is not None:
        order = order._replace(before=(*order.before, *kept, *masks))
    return holdings._replace(always=(*holdings.always, *kept, *masks), order=order)


def _profile(model: Model, setup: Setup, holdings: Holdings) -> Profile:
    assert setup.attention is not None and setup.seq_len is not None
    program: Any = model.program
    assert setup.cross_entropy is not None
    kernels = kernels_of(model, setup, setup.cross_entropy)
    policy = per_op if setup.recompute == "op" else None
    recompute = setup.recompute == "full" or policy is not None
    choices = Choices(
        setup.compute_dtype, setup.attention, recompute, holdings.accumulates, setup.padded, setup.autocast_dtype, kernels,
        holdings.hooks, policy, holdings.buffer_dtype, setup.recompute_layers, holdings.micro_batches,
        setup.input_require_grads, setup.keeps_adapter_dtype, setup.reentrant_checkpoints,
    )  # fmt: skip
    tokens = setup.micro_batch_size * setup.seq_len
    chunks = kernels.chunks(tokens, program.vocab.size, program.hidden.size) if kernels.chunks else None
    branch = program.branch(setup.micro_batch_size, setup.tokens_per_part)
    run = program, choices, setup.micro_batch_size, setup.tokens_per_part
    # named tuples of two classes are equal if their fields are
    key = ("profile", *choices, type(choices.hooks), chunks, type(holdings.over), holdings.over, branch)
    hooks = choices.hooks
    if is_resizable(hooks):
        from memcalc.tape.resized import Base, Resized  # which few engines need

        alike = choices._replace(hooks=hooks.alike)
        run = program, alike, setup.micro_batch_size, setup.tokens_per_part
        of_base = ("resizable", type(hooks), *alike, chunks, branch)
        base = made_once(model.profiles, of_base, setup.tokens_per_part, lambda: Base(shallow_trace(*run)))
        return made_once(model.profiles, key, setup.tokens_per_part, partial(Resized, base, hooks))
    if holdings.over is None:
        whole = setup.forward_prefetch or setup.engine == "data-parallel"  # their blocks belong to several layers
        make = full_profile if whole else profile
        return made_once(model.profiles, key, setup.tokens_per_part, partial(make, *run))
    over, of_recorded = holdings.over, ("recorded", *choices, type(choices.hooks), chunks, branch)

    def played() -> Profile:
        make = partial(Recorded, *run, model.profiles.setdefault("tapes", []))
        return Played(made_once(model.profiles, of_recorded, setup.tokens_per_part, make), over)

    return made_once(model.profiles, key, setup.tokens_per_part, played)
