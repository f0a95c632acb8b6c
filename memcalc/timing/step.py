"""The time of a step: what the ranks compute and send, the schedule of the pipeline, then the optimizer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from memcalc.hardware.speed import speed_of
from memcalc.pipelining.schedules import of_each_chunk, updates_of
from memcalc.timing.items import Timed
from memcalc.timing.kernels import Rates, Unknown
from memcalc.timing.ranges import Range, range_of
from memcalc.timing.rank import RankTime, rank_time
from memcalc.timing.schedule import seconds_of_passes
from memcalc.timing.update import update

if TYPE_CHECKING:
    from collections.abc import Mapping

    from memcalc.estimation.report import Report
    from memcalc.inputs.gpu import GPU
    from memcalc.setup.setup import Setup

PARTS: Final = ("compute", "recompute", "exposed_communication", "bubble", "optimizer")
_TERA: Final = 1e12
KERNELS: Final = {"megatron": "transformer engine"}
"""The engine's kernels of fused attention; others take torch's, which are flash-attn 2's."""
_OTHERS: Final = "flash-attn 2"


class StepTime(NamedTuple):
    """The seconds of an optimizer step on the reported rank, and where they go."""

    seconds: float
    breakdown: Mapping[str, float]
    """Seconds by part (PARTS); they add up to `seconds`."""
    low: float
    """The seconds from which published runs of the same kind lie, relative to their estimates, to `high`."""
    high: float
    range: Range
    tokens_per_second: float
    """The tokens of all GPUs."""
    mfu: float | None
    """The model's FLOPs over what all GPUs could do at the dense rate of the data sheet in 16 bits: forward and backward,
    attention over the whole square (PaLM, arXiv 2204.02311, appendix B); None if the rate is not known."""
    hfu: float | None
    """As `mfu`, with the FLOPs that are recomputed: by checkpoints, and the scores by fused attention's backward."""
    peak: float | None
    """The FLOPs a second of the data sheet that both are shares of."""
    items: list[Timed]


def step_time(report: Report) -> StepTime | Unknown:
    """Return the time of a report's step on its GPU; Unknown if a part of it is not known."""
    gpu, setup = report.gpu, report.setup
    if gpu is None:
        return Unknown("no GPU is given")
    if report.states_only:
        return Unknown("a number of parameters has no products; give a model")
    if setup.servers is not None:
        return Unknown("the servers' hosts and links are not known")
    if not gpu.dense_flops_per_second:
        return Unknown(f"only the memory of {gpu.full_name} is known; give a GPU of `memcalc gpus`")
    rates = rates_of(setup, gpu)
    whole = _of_all_ranks(report)
    ranks = _rank_times(whole, rates)
    if isinstance(ranks, Unknown):
        return ranks
    updates = update(report, rates)
    if isinstance(updates, Unknown):
        return updates
    copied = _copied(report)
    if isinstance(copied, Unknown):
        return copied
    own = ranks[report.rank.number] if len(ranks) > 1 else ranks[0]
    times = updates_of(setup.schedule, setup.micro_batches)
    updates = [item._replace(seconds=times * item.seconds, calls=times * item.calls) for item in updates]
    updating = sum(item.seconds for item in updates)
    passes = seconds_of_passes(setup, [one.turns for one in ranks])
    busy = of_each_chunk(setup.schedule, setup.micro_batches) * sum(turn.forward + turn.backward for turn in own.turns)
    computing = own.sums.forward + own.sums.backward + sum(own.sums.waits)
    breakdown: dict[str, float] = dict(
        zip(PARTS, (computing, own.sums.recomputation, own.exposed, max(0.0, passes - busy), updating), strict=True)
    )
    breakdown["exposed_communication"] += sum(item.seconds for item in copied)
    seconds = sum(breakdown.values())
    of_each = 1 if report.model.task is None else report.model.task.per_example
    tokens = setup.global_batch_size * of_each * (setup.seq_len or 0)
    known = range_of(setup, gpu)
    return StepTime(
        seconds,
        breakdown,
        seconds * known.low,
        seconds * known.high,
        known,
        tokens / seconds,
        *_utilisation(whole, seconds),
        [*own.items, *copied, *_bubble(breakdown), *updates],
    )


def _copied(report: Report) -> list[Timed] | Unknown:
    """Return the copies between GPU and host, which nothing hides; none if the weights are on the GPU."""
    if report.setup.offload_params == "none":
        return []
    if report.setup.offload_params == "nvme":
        return Unknown("weights are in files, and the bandwidth of NVMe is not known")
    from memcalc.timing.host_link import copies

    return copies(report)


def rates_of(setup: Setup, gpu: GPU) -> Rates:
    """Return the speeds that the GPU reaches with a setup's kernels."""
    given = setup.gemm_efficiency, setup.attention_efficiency, setup.memory_efficiency
    return Rates(gpu, speed_of(gpu.name).given(*given), KERNELS.get(setup.engine, _OTHERS), setup.seq_len or 0)


def _of_all_ranks(report: Report) -> list[Report]:
    """Return a report for every pipeline rank, whichever of them is reported."""
    setup = report.setup
    every = report if setup.pp == 1 or setup.pp_rank is None else report.with_setup(setup._replace(pp_rank=None))
    return every.each_rank()


def _rank_times(reports: list[Report], rates: Rates) -> list[RankTime] | Unknown:
    """Return the time of every pipeline rank; equal ranks are timed once."""
    found: dict[tuple[int, ...], RankTime] = {}
    out: list[RankTime] = []
    for one in reports:
        key = tuple(map(id, one.rank.profiles))
        if key not in found:
            timed = rank_time(one, rates)
            if isinstance(timed, Unknown):
                return timed
            found[key] = timed
        out.append(found[key])
    return out


def _bubble(breakdown: Mapping[str, float]) -> list[Timed]:
    seconds = breakdown["bubble"]
    if not seconds:
        return []
    formula = "the schedule, played with every stage's own time"
    return [
        Timed("waiting for other stages", "bubble", seconds, 0.0, "latency", 1, formula, "modelled", "the schedule")
    ]


def _utilisation(ranks: list[Report], seconds: float) -> tuple[float | None, float | None, float | None]:
    """Return the model's and the hardware's FLOPs over those of the data sheet, and these for a second."""
    gpu = ranks[0].gpu
    assert gpu is not None
    rate = gpu.dense_flops_per_second.get("bf16") or gpu.dense_flops_per_second.get("fp16")
    if rate is None:
        return None, None, None
    again = sum(one.flops["recomputation"] + _scores_again(one) for one in ranks)
    whole = sum(one.flops["total"] for one in ranks)
    possible = len(ranks) * seconds * rate.value * _TERA
    return (whole - again) / possible, whole / possible, rate.value * _TERA


def _scores_again(report: Report) -> int:
    """Return the FLOPs of the scores that the backward of fused attention computes again: a model's backward has twice
    the products of its forward."""
    flops = {"forward": 0, "backward": 0, "recomputation": 0}
    for one in report.computed:
        if one.kind == "attention":
            flops[one.phase] += one.flops
    return max(0, flops["backward"] - 2 * flops["forward"])
