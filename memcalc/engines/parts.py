"""A rank's part of a model whose layers are split (tensor, sequence, context, expert parallel), and the collectives of
its modules."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcalc.core.ops.ring_attention import Ring
from memcalc.engines import shared_sequences
from memcalc.engines.base.sent import Group, collectives_of_run, of_modules
from memcalc.engines.deepspeed import megatron_deepspeed
from memcalc.inputs.model import Model
from memcalc.kernels import Kernels
from memcalc.layout import auto_ep, context_parallel
from memcalc.layout.expert_parallel import share_experts
from memcalc.layout.sequence_parallel import LOSS_PARALLEL, SequenceParallel
from memcalc.layout.tensor_parallel import TensorParallel, split

if TYPE_CHECKING:
    from memcalc.families.base.program import Program
    from memcalc.layout.collectives import Collective
    from memcalc.setup.setup import Setup
    from memcalc.tape.profile import Profile


def part_of(model: Model, setup: Setup) -> Model:
    """Return the model of one rank, as the engine makes it. Ranks that share sequences by torch's context parallelism
    have the whole one here."""
    if setup.runs_gpt_model:
        return megatron_deepspeed.slice_of(model, setup)
    if setup.engine == "colossalai":
        from memcalc.engines.colossalai import part

        return part.part_of(model, setup)
    if setup.autotp:
        from memcalc.engines.deepspeed import auto_tp

        return auto_tp.part_of(model, setup)
    if setup.cp > 1 and setup.engine == "deepspeed":
        return shared_sequences.rank_of(model, setup)
    if setup.tp > 1:
        return _tensor_parallel_rank(model, setup)
    return expert_parallel_rank(model, setup) if setup.ep > 1 else model


def kernels_of_part(model: Model, setup: Setup) -> Kernels | None:
    """Return the kernels that belong to the way in which the model is split; None if they are those of the whole
    model."""
    if setup.runs_gpt_model:
        return megatron_deepspeed.KERNELS
    if setup.engine == "colossalai":
        from memcalc.engines.colossalai import part

        return part.KERNELS
    shared = model.program.context_parallel
    if isinstance(shared, context_parallel.ContextParallel):
        return Kernels(context_parallel.replaced(shared.ring), context_parallel.SOURCE)
    return None


def _tensor_parallel_rank(model: Model, setup: Setup) -> Model:
    """Return the model of one tensor-parallel rank, as small as its parts of the weights are."""
    key = (
        "tensor-parallel rank",
        setup.tp,
        setup.sequence_parallel,
        setup.cross_entropy,
        setup.ep,
        setup.expert_imbalance,
    )
    if key not in model.profiles:
        how = SequenceParallel if setup.sequence_parallel else TensorParallel
        assert model.support.tensor_parallel is not None
        plan = model.support.tensor_parallel | (LOSS_PARALLEL if setup.cross_entropy == "vocab-parallel" else {})
        adapters = model.program.adapters
        base = model.program if adapters is None else model.whole.program
        program = base if setup.ep == 1 else share_experts(base, setup.ep, setup.expert_imbalance)
        own = split(program, plan, setup.tp, how)
        if adapters is not None:
            from memcalc.tuning.split import with_split_adapters  # most programs have no adapters

            own = with_split_adapters(own, adapters)
        model.profiles[key] = _rank_of(model, own)
    return model.profiles[key]


def expert_parallel_rank(model: Model, setup: Setup) -> Model:
    """Return the model of one expert-parallel rank with its part of the experts, as made by transformers or DeepSpeed's
    AutoEP."""
    key = "expert-parallel rank", setup.engine, setup.ep, setup.expert_imbalance
    if key not in model.profiles:
        if setup.engine == "deepspeed":
            own = auto_ep.on_rank(model.program, model.model_type, setup.ep, setup.expert_imbalance)
        else:
            own = share_experts(model.program, setup.ep, setup.expert_imbalance)
        model.profiles[key] = _rank_of(model, own)
    return model.profiles[key]


def _rank_of(model: Model, program: Program) -> Model:
    """Return the model of a rank, of which the same trains as of the whole one."""
    own = Model(model.name, model.model_type, program)
    own.tuning = model.tuning
    return own


def sharers(model: Model, setup: Setup) -> dict[int, Model]:
    """Return the models of context-parallel ranks: the first rank's, the last one's, and that of one in between. All in
    between are alike; the first has no rank before it, the last none after it."""
    out: dict[int, Model] = {}
    for rank in sorted({0, 1, setup.cp - 1}):
        ring = Ring(setup.cp, rank, setup.cp_comm_type == "all_gather")
        if ring not in model.profiles:
            model.profiles[ring] = _rank_of(model, context_parallel.share(model.program, ring))
        out[rank] = model.profiles[ring]
    return out


def collectives_of_modules(model: Model, setup: Setup, made: Profile) -> list[Collective]:
    """Return what the run's modules have sent, by the plan that they are split with."""
    if setup.engine == "colossalai":
        from memcalc.engines.colossalai import part

        return part.collectives_of_layers(setup, made)
    layers = next((w.name.split("*")[0] + "*" for w in model.weight_classes if w.layer is not None), "")
    if setup.autotp:
        from memcalc.engines.deepspeed import auto_tp

        return auto_tp.collectives_of(setup, made, layers)
    if setup.engine == "deepspeed" and setup.cp > 1:
        return shared_sequences.collectives_of(model, setup, made)
    if setup.engine == "deepspeed" and setup.ep > 1:
        return collectives_of_run(made, setup, layers, {"ep": Group("ep", setup.ep, auto_ep.SOURCE)})
    if setup.engine == "deepspeed":
        return megatron_deepspeed.collectives_of(model, setup, made)
    return of_modules(made, setup, layers)
