"""The seconds and bytes of a sequence on one GPU that had the whole model: the least of all its layouts together.

Degrees divide kernels among GPUs; they take nothing away. The seconds are those that one more sequence of a micro-batch
takes: latencies, the time to start kernels, and the reading of weights are left out, as larger micro-batches share them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from memcalc.core.dims import evaluate
from memcalc.errors import InputError
from memcalc.estimation.compute import computed, moved
from memcalc.estimation.report import Report
from memcalc.planning.stages import Least, least_of
from memcalc.setup.resolved import resolve
from memcalc.timing.kernels import Unknown, products, streams
from memcalc.timing.step import rates_of

if TYPE_CHECKING:
    from memcalc.inputs.gpu import GPU
    from memcalc.inputs.model import Model
    from memcalc.inputs.options import Options

_EXACT: Final = 1 - 1e-9


class Alone(NamedTuple):
    """The least of a sequence."""

    seconds: float
    attention: float
    """The part of `seconds` that fused attention takes."""
    saved: Least
    """The bytes that a layer saves for backward."""


UNKNOWN: Final = Alone(0.0, 0.0, Least(0.0, 0.0, 1))


def alone_of(model: Model, base: Options, gpu: GPU, engine: str, recompute: str, legacy: bool) -> Alone:
    """Return the least of a sequence with the kernels of an engine. `legacy`: DeepSpeed's GPTModel, which begins at tp 2."""
    tp, zero = (2 if legacy else 1), {"fsdp1": 2, "fsdp2": 2}.get(engine, 0)
    options = single(base)._replace(
        engine=engine, gpu=gpu.name, gpus=1 if engine == "none" else 2 * tp, tp=tp, zero=zero, recompute=recompute
    )
    try:
        reports = [Report(model, resolve(options._replace(micro_batch_size=b), model)) for b in _BATCHES]
        one, two, four = (_seconds(report, gpu) for report in reports)
    except InputError:
        return UNKNOWN
    return Alone(_least(one[0], two[0], four[0]), _least(one[1], two[1], four[1]), saved_of(reports[0]))


_BATCHES: Final = (1, 2, 4)


def _least(one: float, two: float, four: float) -> float:
    """Return the seconds that a sequence takes at least, from those of micro-batches of one, two and four. With one sequence
    some kernels are not there: what they would lay out anew is in order."""
    return max(0.0, min(one, (four - two) / 2)) * _EXACT


def saved_of(report: Report) -> Least:
    """Return the bytes that a layer of a report's run saves for backward."""
    profile = report.rank.profiles[0]
    period = len(profile.run.middle.early) or 1
    of = report.setup.micro_batch_size, report.setup.tokens_per_part
    numbers = sorted({row.layer for row in profile.run.rows if row.layer is not None})
    return least_of([evaluate(profile.saved_by(range(i, i + 1)), *of) for i in numbers], period)


def _seconds(report: Report, gpu: GPU) -> tuple[float, float]:
    """Return the seconds of a report's kernels, and those of attention. Of products of experts, which fill tiles, only their
    FLOPs count."""
    of, rates = (report.setup, report.rank.on_paper), rates_of(report.setup, gpu)
    ops = [one._replace(groups=1) if one.groups > 1 else one for one in computed(report.rank.profiles, *of)]
    multiplied, other = products(ops, rates), streams(moved(report.rank.profiles, *of), rates)
    if isinstance(multiplied, Unknown) or isinstance(other, Unknown):
        return 0.0, 0.0
    attention = sum(item.seconds for one, item in zip(ops, multiplied, strict=True) if one.kind == "attention")
    return sum(item.seconds for item in (*multiplied, *other)), attention


def single(base: Options) -> Options:
    """Return the options without degrees, shards and a global batch."""
    return base._replace(
        gpus=1, dp=None, tp=1, pp=1, cp=1, ep=1, etp=None, pp_rank=None, zero=0, shard_group=None, sequence_parallel=None,
        schedule="1f1b", virtual_stages=1, first_stage_layers=None, last_stage_layers=None, encoder_stages=None,
        micro_batch_size=1,
        global_batch_size=None, reduce_bucket_size=None, max_live_parameters=None, max_reuse_distance=None,
        param_persistence_threshold=None, prefetch_bucket_size=None, sub_group_size=None, cp_comm_type=None,
        clip_grad_norm=False, sync_each_micro_batch=None, comm_hook=None, powersgd_rank=None, compression_phase=None,
    )  # fmt: skip
