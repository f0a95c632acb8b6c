"""The collectives of DeepSpeed's ZeRO with the configuration of 0.19, and those of the textbook.

Stages 1 and 2 all-reduce whole buckets and gather the updated weights. Stage 3 gathers weights before each use, keeps
those needed again soon, and reduce-scatters gradients. `overlap_comm` is off by default in stages 1 and 2 and on in
stage 3 (zero/config.py), so only stage 3 communicates behind compute. Sources: as in
`memcalc.engines.deepspeed.engine`.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final, Literal

from memcalc.core.dims import numel
from memcalc.core.dtypes import DType, fp32, fp64
from memcalc.engines.deepspeed.sub_groups import persistent, sub_groups_of
from memcalc.engines.deepspeed.zero3_step import EXPERTS
from memcalc.engines.deepspeed.zero_layout import (
    ENGINE,
    STAGE_3,
    STAGE_12,
    buckets_before_exceeding,
    flat,
    frozen,
    groups_of,
    ready_order,
    reduced_in_order,
    sent_dtype,
    sizes_of,
    thresholds_of,
    unreached,
)
from memcalc.engines.deepspeed.zero_ranks import AmongRanks, joined_after_exceeding, kinds_of
from memcalc.layout.collectives import Collective, Kind
from memcalc.layout.layer_kinds import elements_of, shares_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from memcalc.core.tensor import Sent
    from memcalc.families.base.module import Weight
    from memcalc.inputs.model import Model
    from memcalc.layout.layer_kinds import LaterShares
    from memcalc.setup.setup import Setup
    from memcalc.tape.profile import Profile


def collectives(model: Model, setup: Setup) -> list[Collective]:
    if setup.averaging == 1:
        return []
    if setup.zero == 3:
        return _stage_3_collectives(model, setup)
    if setup.compression_phase == "compressed":
        from memcalc.engines.deepspeed.own_optimizers import compressed_collectives

        sent = compressed_collectives(model, setup)
    elif setup.zero == 0:
        sent = [*_of_stage_0(model, setup), *_experts_norm(setup), *_overflow_of_lamb(setup)]
    else:
        sent = [*_gradient_buckets(model, setup), *_scalars(setup, STAGE_12, model), *_gathers(model, setup)]
    return [collective for collective in sent if collective.group_size > 1]


def _of_stage_0(model: Model, setup: Setup) -> list[Collective]:
    """Return the all-reduces of stage 0: the parameters of each group of ranks apart (buffered_allreduce_fallback)."""
    dtype, source = sent_dtype(setup), ENGINE
    out: list[Collective] = []
    for kind in kinds_of(model, setup.averaging):
        payload = sum(kind.sizes) * dtype.itemsize
        calls, formula = len(joined_after_exceeding(kind.sizes)), f"{kind.name}·{dtype.itemsize} B"
        out.append(
            _all_reduce(
                f"gradients{kind.of}",
                dtype,
                kind,
                kind.of_optimizer(model),
                calls,
                payload,
                formula,
                source,
            )
        )
    return out


def _overflow_of_lamb(setup: Setup) -> list[Collective]:
    """Return what FusedLamb adds to a step."""
    if setup.optimizer != "lamb":
        return []
    from memcalc.engines.deepspeed.own_optimizers import overflow_of_lamb

    return overflow_of_lamb(setup)


def _experts_norm(setup: Setup) -> list[Collective]:
    """Return FP16_Optimizer's all-reduces for experts: an overflow on other ranks (CheckOverflow), and their norm
    (get_norm_with_moe_layers)."""
    if setup.ep == 1 or not setup.has_master_weights:
        return []
    source = "deepspeed/runtime/utils.py"
    overflow = "overflow check of the experts"
    return [
        Collective("ep", "all_reduce", overflow, "step", "uint8", setup.ep, 1, 1, "1·1 B", source=source),
        Collective("ep", "all_reduce", "norm of the experts", "step", "fp32", setup.ep, 1, 4, "1·4 B", source=source),
    ]


def _gradient_buckets(model: Model, setup: Setup) -> list[Collective]:
    sent, m = sent_dtype(setup), setup.micro_batches if setup.zero == 2 else 1
    assert setup.reduce_bucket_size is not None
    calls = _all_reduces_1_2(model, setup.zero, setup.averaging, setup.reduce_bucket_size)
    sizes = sizes_of(model)
    idle = sum(sizes[i] for i in unreached(model))
    return [
        _all_reduce(
            f"gradient buckets{kind.of} (whole, not reduced to their owners)",
            sent, kind, kind.with_gradients(model), m * calls[kind.ranks], m * (sum(kind.sizes) - without) * sent.itemsize,
            f"{m}·{kind.name}·{sent.itemsize} B", STAGE_12,
        )
        for kind, without in zip(kinds_of(model, setup.averaging), (idle, 0), strict=False)
    ]  # fmt: skip


def _gathers(model: Model, setup: Setup) -> list[Collective]:
    """Return the gathers of updated weights: one call for each group of parameters (all_gather_dp_groups)."""
    dtype = setup.compute_dtype
    out: list[Collective] = []
    for kind in kinds_of(model, setup.averaging):
        groups = [group for group in groups_of(model, setup.averaging) if group.ranks == kind.ranks]
        payload = sum(group.partition * group.ranks for group in groups) * dtype.itemsize
        gathered = f"padded {kind.name}·{dtype.itemsize} B = {payload} B"
        out.append(
            Collective(
                "dp", "all_gather", f"updated weights{kind.of}", "step", dtype.name, kind.ranks, len(groups), payload,
                gathered, shares=kind.of_optimizer(model).of(payload // dtype.itemsize), source=STAGE_12,
            )
        )  # fmt: skip
    return out


def _all_reduces_1_2(model: Model, zero: int, dp: int, most: int) -> Counter[int]:
    """Count the all-reduce calls by their ranks. Stage 1 reduces when backward is over, group by group; stage 2 during
    backward, as gradients are ready."""
    layout, sizes = flat(model, dp), sizes_of(model)
    order = ready_order(model) if zero == 2 else reduced_in_order(model, layout)
    buckets = buckets_before_exceeding([sizes[i] for i in order], most)
    calls: Counter[int] = Counter()
    for bucket in buckets:
        calls.update(call.ranks for call in layout.all_reduces([layout.order[order[k]] for k in bucket], most))
    return calls


def _all_reduce(
    name: str, dtype: DType, kind: AmongRanks, shares: LaterShares, calls: int, payload: int, formula: str, source: str
) -> Collective:
    return Collective(
        "dp",
        "all_reduce",
        name,
        "backward",
        dtype.name,
        kind.ranks,
        calls,
        payload,
        f"{formula} = {payload} B",
        shares=shares,
        source=source,
    )


def _scalars(setup: Setup, source: str, model: Model) -> list[Collective]:
    """Return the overflow check and the norm of each group. The norm of experts is also reduced among the ranks with
    the same ones."""
    dp = setup.averaging
    groups = groups_of(model, dp)
    n = len(groups)
    out = [Collective("dp", "all_reduce", "gradient norm", "step", "fp32", dp, n, 4 * n, f"{n}·4 B", source=source)]
    if setup.compute_dtype is not fp32:
        out.insert(
            0,
            Collective(
                "dp", "all_reduce", "overflow check", "step", "uint8", setup.averaging, 1, 1, "1·1 B", source=source
            ),
        )
    if n > 1:
        own, ranks, formula = "norm of the experts", groups[1].ranks, f"{n - 1}·4 B"
        out.append(
            Collective("dp", "all_reduce", own, "step", "fp32", ranks, n - 1, 4 * (n - 1), formula, source=source)
        )
    return out


def of_run(
    model: Model, setup: Setup, sent: Sequence[Sent], first: Callable[[], Profile] | None = None
) -> list[Collective]:
    """Return what ZeRO-3 has sent in a run, times the micro-batches, and what it sends in the step. `first` returns the run
    of the first micro-batch, if later ones may differ."""
    if setup.averaging == 1:
        return []
    if setup.is_zero_plus_plus:
        from memcalc.engines.deepspeed.zero_plus_plus_sent import of_runs

        return of_runs(model, setup, sent if first is None else first().run.sent, sent)
    m = setup.micro_batches
    out: list[Collective] = []
    for kind, phase, name in _OF_RUN:
        dtype = sent_dtype(setup) if kind == "reduce_scatter" else setup.compute_dtype
        for own, axis in zip(kinds_of(model, setup.averaging), ("dp", EXPERTS), strict=False):
            elements = [
                numel(call.shape)[0] for call in sent if (call.axis, call.kind, call.phase) == (axis, kind, phase)
            ]
            if elements and own.ranks > 1:
                payload = m * sum(elements) * dtype.itemsize
                out.append(
                    Collective(
                        "dp", kind, f"{name}{own.of}", phase, dtype.name, own.ranks, m * len(elements), payload,
                        f"{m}·{sum(elements)}·{dtype.itemsize} B", shares=_of_stage_3(model, setup, own, kind), source=STAGE_3,
                        overlap=phase,
                    )
                )  # fmt: skip
    return [*out, *step_of_stage_3(model, setup)]


def _of_stage_3(model: Model, setup: Setup, own: AmongRanks, kind: Kind) -> LaterShares:
    """Return the layers' shares in stage 3. Each parameter is padded. Small parameters are not gathered, and neither
    are those that no module uses."""
    gathers, program = kind == "all_gather", model.program
    least = thresholds_of(setup).persistence if gathers else 0

    def is_sent(weight: Weight) -> bool:
        """A frozen weight is gathered, though it has no gradient."""
        return program.gets_gradient(weight) or (gathers and not program.wants_gradient(weight))

    def sent(weight: Weight) -> int:
        elements = elements_of(weight) if is_sent(weight) else 0
        return -(-elements // own.ranks) * own.ranks if elements > least else 0

    return own.shares(model, sent)


_OF_RUN: Final[tuple[tuple[Kind, Literal["forward", "backward"], str], ...]] = (
    ("all_gather", "forward", "parameters"),
    ("all_gather", "backward", "parameters released since forward"),
    ("reduce_scatter", "backward", "gradient buckets"),
)


def _stage_3_collectives(model: Model, setup: Setup) -> list[Collective]:
    """Return the collectives of a traced model. Its modules are not seen, so each parameter is gathered by a separate
    call."""
    dtype, dp, m = setup.compute_dtype, setup.averaging, setup.micro_batches
    e = dtype.itemsize
    sizes = sizes_of(model)
    thresholds, bucket = thresholds_of(setup), setup.reduce_bucket_size
    assert bucket is not None
    padded = [-(-n // dp) * dp for n in sizes]
    large = [p for n, p in zip(sizes, padded, strict=True) if n > thresholds.persistence]
    kept = _retained([n for n in sizes if n > thresholds.persistence], thresholds.max_reuse)
    again = large[: len(large) - kept]
    flushes = len(buckets_before_exceeding([sizes[i] for i in ready_order(model)], bucket))
    reduced = sum(n for i, n in enumerate(padded) if i not in frozen(model))
    calls: list[tuple[int, int]] = [(len(large), sum(large)), (len(again), sum(again)), (flushes, reduced)]
    return [
        Collective("dp", kind, name, phase, dtype.name, dp, m * count, m * total * e,
                   f"{m}·{total}·{e} B", shares=shares_of(model.program.weights()), source=STAGE_3, overlap=phase)
        for (kind, phase, name), (count, total) in zip(_OF_RUN, calls, strict=True)
        if count
    ] + step_of_stage_3(model, setup)  # fmt: skip


def norms_of_stage_3(model: Model, setup: Setup) -> int:
    """Return the number of norms, which is the number of sub-groups."""
    return len(sub_groups_of(model, setup))


def step_of_stage_3(model: Model, setup: Setup) -> list[Collective]:
    """Return the collectives of the step: the norm of each sub-group, fp16's overflow check, and the parameters kept
    whole, one by one."""
    dtype, dp = setup.compute_dtype, setup.averaging
    out: list[Collective] = []
    if dtype.name == "fp16":
        out.append(Collective("dp", "all_reduce", "overflow check", "step", "uint8", dp, 1, 1, "1·1 B", source=STAGE_3))
    of = [group.ranks for group in sub_groups_of(model, setup)]
    own, number = kinds_of(model, dp), fp64 if setup.offload_optimizer == "none" else fp32
    for kind in own:
        out += _norms("dp", f"gradient norm{kind.of}", kind.ranks, of.count(kind.ranks), number)
    if len(own) > 1:
        out += _norms("ep", "gradient norm of all experts", setup.ep, of.count(own[1].ranks), number)
    small = persistent(model, setup)
    for kind in own:
        sizes = small.get(kind.ranks, [])
        if sizes and kind.ranks > 1:
            payload = sum(sizes) * dtype.itemsize
            out.append(
                Collective("dp", "all_gather", f"small parameters{kind.of} after the update", "step", dtype.name, kind.ranks,
                           len(sizes), payload, f"{sum(sizes)}·{dtype.itemsize} B", source=STAGE_3)
            )  # fmt: skip
    return out


def _norms(axis: str, name: str, ranks: int, count: int, dtype: DType) -> list[Collective]:
    e = dtype.itemsize
    if ranks == 1:
        return []
    return [
        Collective(
            axis, "all_reduce", name, "step", dtype.name, ranks, count, e * count, f"{count}·{e} B", source=STAGE_3
        )
    ]


def _retained(sizes: list[int], distance: int) -> int:
    """Return the number of the last parameters that are still gathered when backward reaches them: those reused soon
    enough."""
    after = kept = 0
    for n in reversed(sizes):
        if 2 * after >= distance:
            break
        kept += 1
        after += n
    return kept


def textbook(model: Model, setup: Setup) -> list[Collective]:
    """Return the collectives of Rajbhandari et al. 2020 (arXiv 1910.02054) §7: 2Φ for stages 0 to 2, 3Φ for stage 3,
    each counted once. Experts of expert parallelism are counted among the ranks that have the same ones. Frozen
    parameters are gathered in stage 3, and nothing else."""
    dtype, m = setup.compute_dtype, setup.micro_batches
    sizes = sizes_of(model)
    idle = sum(sizes[i] for i in frozen(model)) if setup.zero == 3 else 0

    def one(kind: Kind, name: str, phase: Literal["forward", "backward", "step"], times: int) -> list[Collective]:
        more = idle if name == "parameters" else 0
        return [
            Collective(
                "dp", kind, f"{name}{own.of}", phase, dtype.name, own.ranks, times, times * payload,
                f"{times}·{own.name}·{dtype.itemsize} B = {times * payload} B",
                source="arXiv 1910.02054, section 7",
            )
            for own, frozen_too in zip(kinds_of(model, setup.averaging), (more, 0), strict=False)
            if own.ranks > 1
            for payload in ((sum(own.sizes) + frozen_too) * dtype.itemsize,)
        ]  # fmt: skip

    if setup.zero == 0:
        return []
    out = one("reduce_scatter", "gradients", "backward", m if setup.zero > 1 else 1)
    if setup.zero < 3:
        return [*out, *one("all_gather", "updated weights", "step", 1)]
    gathers = [*one("all_gather", "parameters", "forward", m), *one("all_gather", "parameters", "backward", m)]
    return [*gathers, *out]
