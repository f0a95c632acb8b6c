"""The ranks that differ, with what each holds and runs: one for every pipeline stage, otherwise just one."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeVar

from memcalc.core.dims import Poly, numel
from memcalc.core.rows import Row
from memcalc.core.selective import per_op
from memcalc.engines import Engine, load_engine
from memcalc.engines.base.holdings import ENOUGH_MICRO_BATCHES, Holdings, Order, padding_row
from memcalc.families.base.program import Program
from memcalc.inputs.model import Model
from memcalc.kernels import Kernels, choose, kept_by_kernels
from memcalc.kernels.attention_on_gpu import fused_kernels, on_gpu
from memcalc.layout.collectives import Collective
from memcalc.megatron.schedules import State, Turn
from memcalc.optimizers import load_optimizer
from memcalc.setup.setup import Setup
from memcalc.tape.played import Played, Recorded
from memcalc.tape.profile import Choices, Profile, Resizable, cut_of, full_profile, profile, shallow_trace

if TYPE_CHECKING:
    from memcalc.megatron.gpt_model import GPTModel


class Sums(NamedTuple):
    """An engine's rows added up by phase, as polynomials in batch and seq."""

    always: Poly
    forward: Poly
    backward: Poly
    step: Poly
    flush: Poly
    after_backward: tuple[Poly, ...]


class Rank(NamedTuple):
    """One pipeline rank; without pipelining the only one."""

    number: int
    holdings: Holdings
    sums: Sums
    profiles: tuple[Profile, ...]
    """The profile of each model chunk on the rank; empty for a bare number of parameters."""
    states: tuple[State, ...]
    """The possible states in a step: a chunk's forward or backward, and the tensors that other micro-batches have
    saved."""
    layers: int
    """The number of transformer layers that the rank runs."""
    collectives: Callable[[Setup], list[Collective]]
    """Returns the real collectives of one optimizer step. The setup may differ from this rank's in the numbers of its
    polynomials."""
    textbook: Callable[[], list[Collective]]
    """Returns the step's collectives as the papers count them; empty if the engine does just that."""
    turns: tuple[Turn, ...] = ()
    """The forwards and backwards of the rank's chunks in their order; empty if micro-batches run one after the
    other."""
    between: Row | None = None
    """One of the tensors that a state and a turn count as `between` stages."""
    first: Callable[[], Profile] | None = None
    """Returns the profile of the first micro-batch, if later ones differ."""
    untraced: Callable[[], Profile] | None = None
    """Returns the profile of the very first micro-batch of a process, if later ones differ."""
    in_flight: int | None = None
    """The number of a chunk's forwards that are saved at once, if the profile covers all micro-batches and no state
    says so."""
    on_paper: int = 1
    """The number of micro-batches in the run of a profile, all alike."""
    cp: int | None = None
    """The number of the context-parallel rank, if these ranks differ."""
    in_order: Callable[[], Order] | None = None
    """Returns the order of the rank's allocations, if `holdings` does not have it."""

    @property
    def order(self) -> Order | None:
        """Return the order in which the rank allocates what it holds; None if it is not known."""
        return self.holdings.order if self.in_order is None else self.in_order()


_WHOLE: Final = (Turn("forward", 0), Turn("backward", 0))
"""The turns of a profile that covers all micro-batches."""
_ONE: Final = (State("forward", 0, (0,)), State("backward", 0, (0,)))


def ranks(model: Any, setup: Setup) -> list[Rank]:
    """Return the rank that was asked for, or all."""
    if not isinstance(model, Model):
        holdings, sums = _holdings(model, setup)[0]
        return [Rank(0, holdings, sums, (), (), 0, _nothing, list[Collective])]
    if setup.engine == "megatron":
        return _pipeline_ranks(model, setup)
    if setup.pp > 1 and setup.engine == "deepspeed":
        return _deepspeed_stages(model, setup)
    run = _staged_ranks if setup.pp > 1 else _whole_ranks
    return [rank._replace(cp=cp) for cp, own in parts_of(model, setup).items() for rank in run(own, setup)]


def _nothing(_setup: Setup) -> list[Collective]:
    return []


def parts_of(model: Model, setup: Setup) -> dict[int | None, Model]:
    """Return the part of the model of each rank that shares sequences, if these ranks differ; else that of any rank."""
    if model.model_type == "layers" and setup.dp > 1:
        from memcalc.engines.common_statistics import rank_of

        return {None: rank_of(model, setup)}
    if setup.packing or setup.offload_activations != "none" or setup.neftune_alpha is not None:
        from memcalc.tasks.fine_tuned import fine_tuned

        return {None: fine_tuned(model, setup)}
    if not setup.splits_layers:
        return {None: model}
    from memcalc.engines.parts import part_of, sharers

    own = part_of(model, setup)
    return {**sharers(own, setup)} if setup.shares_sequences else {None: own}


def _whole_ranks(model: Model, setup: Setup) -> list[Rank]:
    """Return the ranks that run all layers: one rank, or several if each of them can have the highest peak."""
    made = [_profile(model, setup, holdings) for holdings, _ in _holdings(model, setup)]
    # holdings again, as a trace has shown which weights get a gradient
    return [_whole_rank(model, setup, *of) for of in zip(_holdings(model, setup), made, strict=True)]


def _whole_rank(model: Model, setup: Setup, own: _HoldingsAndSums, made: Profile) -> Rank:
    holdings, sums = own
    engine = load_engine(setup.engine)
    textbook = partial(engine.textbook, model, setup)
    first = partial(_profile, model, setup, _of_the_first(holdings)) if setup.micro_batches > 1 else None
    sends = partial(_sent, engine=engine, model=model, made=made, first=first)
    if holdings.micro_batches > 1:
        rank = Rank(0, holdings, sums, (made,), _ONE, model.layers, sends, textbook, _WHOLE)
        return rank._replace(on_paper=holdings.micro_batches)
    over = None if holdings.order is None else holdings.order.untraced
    untraced = None if over is None else partial(_profile, model, setup, holdings._replace(over=over))
    return Rank(0, holdings, sums, (made,), _ONE, model.layers, sends, textbook, first=first, untraced=untraced)


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

        own = collectives_of(model, setup, units_of_backward(made.run))
    else:
        own = engine.collectives(model, setup)
    if model.model_type == "layers":
        from memcalc.engines.common_statistics import collectives_of

        return [*collectives_of(setup, made), *own]
    if not setup.splits_layers:
        return own
    from memcalc.engines.parts import collectives_of_modules

    return [*collectives_of_modules(model, setup, made), *own]


def _pipeline_ranks(model: Model, setup: Setup) -> list[Rank]:
    from memcalc.engines.megatron import engine as megatron
    from memcalc.engines.megatron.collectives import collectives_of
    from memcalc.engines.megatron.order import order_of
    from memcalc.megatron.schedules import states, turns_to_play

    assert setup.attention is not None
    kernels = Kernels((), megatron.SOURCE, "modelled")
    choices = Choices(setup.compute_dtype, setup.attention, setup.recompute == "full", True, kernels=kernels)
    out: list[Rank] = []
    for stage in megatron.stages(model, setup):
        if setup.pp_rank not in (None, stage.rank):
            continue
        profiles: list[Profile] = []
        for chunk in stage.chunks:
            key = ("profile", *choices, chunk.layout, chunk.branch(setup.micro_batch_size, setup.tokens_per_part))
            make = partial(_of_chunk, model, chunk, choices, setup)
            profiles.append(_made(model, key, setup.tokens_per_part, make))
        holdings = megatron.holdings_of(setup, stage)
        played = turns_to_play(setup.schedule, stage.rank, setup.pp, setup.micro_batches, len(stage.chunks))
        order = states(setup.schedule, stage.rank, setup.pp, setup.micro_batches, len(stage.chunks))
        sends = partial(collectives_of, stage=stage, profiles=profiles)
        rank = Rank(
            stage.rank, holdings, _sums(holdings), tuple(profiles), tuple(order), stage.layers, sends, list[Collective],
            played,
            between=megatron.between_stages(setup, stage) if setup.pp > 1 else None,
            in_order=partial(order_of, setup, stage, holdings) if played else None,
        )  # fmt: skip
        out.append(rank)
    return out


def _of_chunk(model: Model, chunk: GPTModel, choices: Choices, setup: Setup) -> Profile:
    """Return the profile of a chunk of a stage. Chunks that differ in their number of equal layers share a run."""
    cut, layout = cut_of(chunk, choices), chunk.layout
    batch, seq = setup.micro_batch_size, setup.tokens_per_part
    if not cut.middle.more or layout.recompute_layers is not None:
        return Profile(cut.run(chunk, batch, seq))
    alike = layout._replace(layers=cut.depth, routed=layout.routed[: cut.depth])
    key = ("cut", *cut.choices, alike, cut.middle.early, cut.middle.late, chunk.branch(batch, seq))
    run = _made(model, key, seq, partial(cut.run, chunk, batch, seq))
    return Profile(run._replace(middle=cut.middle))


def _staged_ranks(model: Model, setup: Setup) -> list[Rank]:
    """Return the ranks of stages of transformers' own layers. A profile covers a whole step, with all micro-batches."""
    from memcalc.engines.fsdp2 import pipeline as engine
    from memcalc.engines.fsdp2.pipeline_sent import collectives_of
    from memcalc.pipelining.orders import most_in_flight, order

    assert setup.attention is not None and setup.cross_entropy is not None
    kernels = kernels_of(model, setup, setup.cross_entropy)
    out: list[Rank] = []
    for staged in engine.staged_ranks(model, setup):
        if setup.pp_rank not in (None, staged.number):
            continue
        holdings = engine.holdings_of(setup, staged)
        choices = Choices(
            setup.compute_dtype, setup.attention, setup.recompute != "none", False, kernels=kernels, hooks=holdings.hooks,
            policy=per_op if setup.recompute == "op" else None,
        )  # fmt: skip
        own, program = staged.model, staged.program
        branch = program.stages[0].stage_model.branch(setup.micro_batch_size, setup.tokens_per_part)
        alike = choices._replace(hooks=holdings.hooks.alike) if isinstance(holdings.hooks, Resizable) else choices
        own_key = engine.key_of(setup, staged)
        base = _made(
            model,
            ("run", *alike, own_key, branch),
            setup.tokens_per_part,
            partial(engine.trace_of, setup, staged, alike),
        )
        key = ("profile", *choices, own_key, branch)
        made = _made(model, key, setup.tokens_per_part, partial(engine.profile_of, holdings.hooks, base))
        holdings = holdings._replace(step=(*holdings.step, *engine.in_flight_at_updates(setup, made)))
        actions = order(
            setup.schedule,
            staged.number,
            setup.pp,
            engine.steady_micro_batches(setup, staged.number),
            setup.virtual_stages,
        )
        sends = partial(collectives_of, rank=staged, made=made)
        rank = Rank(
            staged.number, holdings, _sums(holdings), (made,), _ONE, own.layers, sends,
            list[Collective], _WHOLE, in_flight=most_in_flight(actions),
            on_paper=engine.paper_micro_batches(setup, staged.number),
        )  # fmt: skip
        out.append(rank)
    return out


def _deepspeed_stages(model: Model, setup: Setup) -> list[Rank]:
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
        made = _made(model, key, setup.tokens_per_part, partial(engine.profile_of, setup, stage, choices))
        sends = partial(engine.collectives_of, rank=stage, profile=made)
        rank = Rank(
            stage.number, holdings, _sums(holdings), (made,), _ONE, own.layers, sends,
            list[Collective], in_flight=in_flight(stage.number, setup.pp, setup.micro_batches),
            on_paper=enough_micro_batches(stage.number, setup.pp, setup.micro_batches),
        )  # fmt: skip
        out.append(rank)
    return out


def _sum(rows: Iterable[Row]) -> Poly:
    total = [0] * 6
    for row in rows:
        for i, c in enumerate(numel(row.shape)[1]):
            if c:
                total[i] += c * row.copies * row.dtype.itemsize
    return tuple(total)  # type: ignore[return-value]


def _sums(holdings: Holdings) -> Sums:
    return Sums(
        _sum(holdings.always),
        _sum(holdings.forward),
        _sum(holdings.backward),
        _sum(holdings.step),
        _sum(holdings.flush.rows if holdings.flush else ()),
        tuple(_sum(rows) for rows in holdings.after_backward),
    )


class _HoldingsAndSums(NamedTuple):
    """Holdings and their sums."""

    holdings: Holdings
    sums: Sums


_NOT_HELD: Final = frozenset({
    "gpus", "dp", "shard_group", "global_batch_size", "micro_batch_size", "seq_len", "recompute",
    "recompute_layers", "pp_rank", "schedule", "virtual_stages", "first_stage_layers", "last_stage_layers", "gpu",
    "network_gbps", "gemm_efficiency", "attention_efficiency", "memory_efficiency",
})  # fmt: skip
"""The fields of a setup that decide nothing of what a rank holds, or only through what else is in the key."""
_HELD: Final = itemgetter(*(i for i, name in enumerate(Setup._fields) if name not in _NOT_HELD))


def _holdings(model: Any, setup: Setup) -> tuple[_HoldingsAndSums, ...]:
    """Return what one rank holds; what several ranks hold if each of them can have the highest peak."""
    program = model.program if isinstance(model, Model) else None
    outgrown = program is not None and (sum(program.idle.values()), program.outgrown(setup.seq_len or 0))
    micro_batches = min(setup.micro_batches, ENOUGH_MICRO_BATCHES)
    key = ("held", *_HELD(setup), setup.shards, setup.replicas, micro_batches, outgrown)
    if key not in model.profiles:
        if isinstance(model, Model):
            holdings = _of_engine(model, setup)
            found = [_with_masks(one, model, setup) for one in (holdings, *holdings.others)]
        else:
            found = [model.holdings(setup)]
        model.profiles[key] = tuple(_HoldingsAndSums(one, _sums(one)) for one in found)
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
    masks = (padding_row(model),) if setup.padded else ()
    order = holdings.order
    if order is not None:
        order = order._replace(before=(*order.before, *kept, *masks))
    return holdings._replace(always=(*holdings.always, *kept, *masks), order=order)


def kernels_of(model: Model, setup: Setup, cross_entropy: str) -> Kernels:
    if setup.splits_layers:
        from memcalc.engines.parts import kernels_of_part

        own = kernels_of_part(model, setup)
        if own is not None:
            return own
    if model.task is not None:
        from memcalc.tasks.kernels import KERNELS

        kernels = KERNELS
    else:
        selective = setup.recompute == "selective"
        kernels = choose(model.model_type, setup.kernels, cross_entropy, selective=selective, liger_parts=setup.liger)
    if setup.attention == "sdpa" and setup.kernels != "megatron":
        kernels = on_gpu(kernels, fused_kernels(setup.gpu))
    if setup.packing:
        from memcalc.kernels.packed_attention import over_packed_rows
        from memcalc.tasks.fine_tuned import packing_of

        return over_packed_rows(kernels, setup.attention or "flash", packing_of(setup))
    if setup.cp == 1:
        return kernels
    from memcalc.kernels.ulysses import over_ranks

    return over_ranks(kernels, setup.cp)


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
        setup.input_require_grads, setup.keeps_adapter_dtype,
    )  # fmt: skip
    tokens = setup.micro_batch_size * setup.seq_len
    chunks = kernels.chunks(tokens, program.vocab.size, program.hidden.size) if kernels.chunks else None
    branch = program.branch(setup.micro_batch_size, setup.tokens_per_part)
    run = program, choices, setup.micro_batch_size, setup.tokens_per_part
    # named tuples of two classes are equal if their fields are
    key = ("profile", *choices, type(choices.hooks), chunks, type(holdings.over), holdings.over, branch)
    hooks = choices.hooks
    if isinstance(hooks, Resizable):
        alike = choices._replace(hooks=hooks.alike)
        make = partial(shallow_trace, program, alike, setup.micro_batch_size, setup.tokens_per_part)
        base = _made(model, ("run", *alike, chunks, branch), setup.tokens_per_part, make)
        return _made(model, key, setup.tokens_per_part, lambda: Profile(hooks.resized(base)))
    if holdings.over is None:
        whole = setup.forward_prefetch or setup.engine == "data-parallel"  # their blocks belong to several layers
        make = full_profile if whole else profile
        return _made(model, key, setup.tokens_per_part, partial(make, *run))
    recorded = _made(
        model,
        ("recorded", *choices, type(choices.hooks), chunks, branch),
        setup.tokens_per_part,
        partial(Recorded, *run),
    )
    return _made(model, key, setup.tokens_per_part, partial(Played, recorded, holdings.over))


class _OfARun(Protocol):
    """A result of a run on paper."""

    @property
    def pads_queries(self) -> bool: ...


_T = TypeVar("_T", bound=_OfARun)


def _made(model: Model, key: tuple[Hashable, ...], seq: int, make: Callable[[], _T]) -> _T:
    """Return the result under a key. It is made once for all sequence lengths that the run treats alike."""
    remainder = Program.remainder(seq)
    for of in (None, remainder):
        if (*key, of) in model.profiles:
            return model.profiles[*key, of]
    new = make()
    model.profiles[*key, remainder if new.pads_queries else None] = new
    return new
