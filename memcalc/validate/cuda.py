# pyright: basic
"""Backend `cuda`: the same step on a real GPU, with the counts of the caching allocator and the device.

Peaks are of requested bytes (`requested_bytes.all.peak` of torch.cuda.memory_stats), without rounding to blocks, so
they are compared with tensors and cuBLAS workspaces. With an engine one GPU is rank 0 of a `fake` process group of the
setup's size: shards, gathered units and buckets exist, only the transfers do nothing. Under torchrun the ranks are
real, and the result is that of the reported rank, wherever it runs.

Collectives and attention kernels are recorded in another step, so that no dispatch mode is on in the measured ones. The
allocator's cache from building the model is emptied before the first step, so `reserved` is that of the steps.
"""

from __future__ import annotations

import contextlib
import gc
import os
import time
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist

from memcalc.errors import InputError
from memcalc.tracing.modules import quiet
from memcalc.validate import deepspeed, liger
from memcalc.validate.attention_seen import AttentionSeen
from memcalc.validate.checks import fields_of
from memcalc.validate.collectives import Collectives
from memcalc.validate.comparison import Measured, rank_of
from memcalc.validate.components import components
from memcalc.validate.engines import mesh_of, shard, split, wrapped
from memcalc.validate.experts import routing
from memcalc.validate.fake import process_group, worst
from memcalc.validate.gathered import Gathered
from memcalc.validate.history import phases_of
from memcalc.validate.meter import Meter
from memcalc.validate.pipeline import pipeline
from memcalc.validate.place import Place, place
from memcalc.validate.preference import is_of_trl, preference_job
from memcalc.validate.reference import Job, build, make_batch, saved_by_hooks

if TYPE_CHECKING:
    from memcalc.estimation.report import Report
    from memcalc.setup.setup import Setup

DEVICE = "cuda"

_TIMED_SECONDS: Final = 1.0
"""The seconds that the timing of steps may take, if a step is shorter."""
_TIMED_STEPS: Final = 10


def measure(report: Report) -> Measured:
    """Measure a steady-state step of the report's setup on this GPU. torch's OutOfMemoryError is not caught."""
    setup = report.setup
    here = place()
    real_ranks = "RANK" in os.environ and setup.engine != "none"
    if real_ranks and int(os.environ["WORLD_SIZE"]) != setup.gpus:
        raise InputError(f"--gpus {setup.gpus}: torchrun started {os.environ['WORLD_SIZE']} ranks; allowed: as many")
    if real_ranks:
        return _measure_rank(report, here, None)
    if setup.engine == "deepspeed":
        return worst([_measure_rank(report, here, rank) for rank in deepspeed.ranks_to_run(setup, report.model)])
    return _measure_rank(report, here, rank_of(report))


def _measure_rank(report: Report, here: Place, rank: int | None) -> Measured:
    """Measure one rank of a fake group, or this process's rank under torchrun (`rank` is None)."""
    setup, real_ranks = report.setup, rank is None
    gc.collect()
    torch.cuda.empty_cache()
    with contextlib.ExitStack() as stack:
        if rank is None:
            dist.init_process_group("nccl")
            stack.callback(dist.destroy_process_group)
        elif setup.engine != "none":
            stack.enter_context(process_group(setup.gpus, rank))
        stack.enter_context(liger.patched_on_gpu(setup, report.model.model_type))
        stack.enter_context(routing(setup, alone=not real_ranks))
        mesh = mesh_of(setup, DEVICE) if setup.engine == "fsdp2" else None
        if setup.engine == "deepspeed":
            stack.enter_context(deepspeed.forgetting())
        with quiet():
            measured = _run(setup, _job(report, mesh, stack, real_ranks), here)._replace(real_ranks=real_ranks)
        return of_reported(measured, report) if real_ranks else measured


def of_reported(measured: Measured, report: Report) -> Measured:
    """Return the measurement of the reported rank, given this rank's. DeepSpeed's ranks differ: the result has the
    highest peaks of all. Every rank has to call it."""
    everyone: list[Any] = [None] * report.setup.gpus
    dist.all_gather_object(everyone, measured)
    return worst(everyone) if report.setup.engine == "deepspeed" else everyone[rank_of(report)]


def _job(report: Report, mesh: Any, stack: contextlib.ExitStack, real_ranks: bool) -> Job:
    """Return the job. A model that is to be sharded never exists as a whole."""
    setup, model = report.setup, report.model

    def made(of: Setup = setup) -> Any:
        with torch.device(DEVICE if mesh is None else "meta"):
            return build(of, model if of is setup else model.whole, fields_of(model))

    if is_of_trl(setup):
        return preference_job(setup, made, DEVICE, None, stack)
    if setup.pp > 1:
        device = torch.device(DEVICE)
        number = mesh.get_local_rank("pp")
        whole, own = lambda: split(setup, made(), mesh), lambda m: shard(setup, m, mesh, device)
        return pipeline(setup, model, number, whole, own, mesh, alone=not real_ranks)
    module = made()
    with torch.device(DEVICE):
        batch = _of_random_tokens(make_batch(setup, module.config), module.config)
    if setup.engine == "deepspeed":
        return deepspeed.deepspeed_job(setup, module, batch, stack)
    return wrapped(setup, module, batch, mesh, None)


def _of_random_tokens(batch: dict[str, torch.Tensor], config: Any) -> dict[str, torch.Tensor]:
    """Return a batch with other tokens: equal ones would all add to one row of the embeddings' gradient, which takes another
    time."""
    for ids in [batch[name] for name in ("input_ids", "labels") if "pixel_values" not in batch and name in batch]:
        ids.random_(config.get_text_config().vocab_size)
    return batch


class Allocator:
    """The caching allocator's counts: requested bytes, and the most that was allocated in blocks and reserved. If
    memory is short, the allocator gives blocks back within a step."""

    def __init__(self) -> None:
        self.allocated = 0
        self.reserved = 0

    def begin(self) -> None:
        """Begin a phase. The allocator counts a freed block that another stream has used until that stream is through with it,
        and asks only when it allocates."""
        self._look()
        torch.cuda.synchronize()
        torch.empty(1, device=DEVICE)
        torch.cuda.reset_peak_memory_stats()

    @property
    def highest(self) -> int:
        self._look()
        return torch.cuda.memory_stats()["requested_bytes.all.peak"]

    def _look(self) -> None:
        """Record peaks before the next phase resets them."""
        self.allocated = max(self.allocated, torch.cuda.max_memory_allocated())
        self.reserved = max(self.reserved, torch.cuda.max_memory_reserved())

    @property
    def now(self) -> int:
        return torch.cuda.memory_stats()["requested_bytes.all.current"]


def _run(setup: Setup, job: Job, here: Place) -> Measured:
    gc.collect()
    torch.cuda.empty_cache()
    weights = Gathered(job)
    for _ in range(2):  # states and workspaces are allocated, DDP's buckets ordered
        job.step(lambda phase: None)
    measured = _step(setup, job, weights)
    torch.cuda.synchronize()
    device = here.used()
    history = _history(job)
    return measured._replace(
        device=device,
        workspaces=_workspaces(),  # a step after this allocates them again, which is no part of the history
        context=here.context,
        environment=here.environment(),
        history=history,
        saved_by_hooks=_saved_by_hooks(setup, job),
        seconds=_seconds(job),
        **_called(setup, job),
    )


def _step(setup: Setup, job: Job, weights: Gathered) -> Measured:
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    allocator = Allocator()
    meter = Meter(allocator, weights.nbytes)
    gradients = job.step(meter.enter)
    meter.close()
    found = components(setup, job, meter, gradients, DEVICE)
    return Measured(
        **found._asdict(),
        forward=meter.peaks["forward"],
        backward=meter.peaks["backward"],
        step=meter.peaks["step"],
        calls=None,  # counted in another step
        environment={},
        allocated=allocator.allocated,
        reserved=allocator.reserved,
    )


def _workspaces() -> int:
    """Return the bytes of cuBLAS's workspaces. The next products allocate them again."""
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    torch._C._cuda_clearCublasWorkspaces()
    return before - torch.cuda.memory_stats()["requested_bytes.all.current"]


def _history(job: Job) -> dict[str, Any]:
    """Run one more step, and return the allocator's record of it."""
    memory, device = torch.cuda.memory, torch.cuda.current_device()
    begun: list[tuple[str, int]] = []

    def length() -> int:
        return len(memory._snapshot()["device_traces"][device])

    gc.collect()
    live = torch.cuda.memory_stats()["requested_bytes.all.current"]
    memory._record_memory_history("all", context=None, stacks="python", clear_history=True)
    try:
        job.step(lambda phase: begun.append((phase, length())))
        trace = memory._snapshot()["device_traces"][device]
    finally:
        memory._record_memory_history(None)
    return {"phases": phases_of(trace, begun, live)}


def _called(setup: Setup, job: Job) -> dict[str, Any]:
    """Run one more step without measuring memory. Returns this rank's collectives, whether the others are running or
    not, and its attention kernels."""
    with Collectives() as sent, AttentionSeen() as seen:
        job.step(lambda phase: None)
    return {"calls": None if setup.engine == "none" else sent.calls, "attention": tuple(sorted(seen.kernels))}


def _saved_by_hooks(setup: Setup, job: Job) -> int | None:
    """Return the bytes that hooks see. Recomputation has hooks of its own, which these would not see into, an engine's
    weights come and go, and a trainer's loss is not the model's: None for all three."""
    if setup.engine != "none" or setup.recompute != "none" or is_of_trl(setup):
        return None
    return saved_by_hooks(setup, job)


def _seconds(job: Job) -> float:
    """Return the seconds of a step, the mean of some."""
    first = _timed(job, 1)
    steps = torch.tensor(max(1, min(_TIMED_STEPS, int(_TIMED_SECONDS / first))), device=DEVICE)
    if dist.is_initialized():  # a rank that took one step more than the others would wait for them forever
        dist.all_reduce(steps, op=dist.ReduceOp.MIN)
    rest = int(steps) - 1
    return (first + _timed(job, rest)) / (1 + rest)


def _timed(job: Job, steps: int) -> float:
    """Return the seconds of `steps` steps."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(steps):
        job.step(lambda phase: None)
    torch.cuda.synchronize()
    return time.perf_counter() - began
