# pyright: basic
"""Backend `cuda`: the same step for real, and what the caching allocator and the device say of it.

Peaks are of requested bytes (`requested_bytes.all.peak` of torch.cuda.memory_stats), which no block is rounded in, so they
are compared with tensors and cuBLAS workspaces. With an engine one GPU is rank 0 of a `fake` process group of the setup's
size: shards, gathered units and buckets are there, only the transfers do nothing. Under torchrun the ranks are real.
"""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import time
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist

from memcalc.errors import InputError, one_line
from memcalc.tracing.modules import quiet
from memcalc.validate.checks import fields_of
from memcalc.validate.comparison import Measured
from memcalc.validate.engines import mesh_of, wrapped
from memcalc.validate.fake import process_group
from memcalc.validate.reference import DTYPES, Job, build, environment, make_batch, nbytes

if TYPE_CHECKING:
    from memcalc.estimation import Report
    from memcalc.setup import Setup

_TIMED_STEPS: Final = 3


def device_name() -> str:
    """What torch calls this rank's GPU. InputError without one."""
    if not torch.cuda.is_available():
        raise InputError("--backend cuda: torch sees no CUDA device; allowed: fake")
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    return torch.cuda.get_device_name()


def capability() -> str:
    """The GPU's compute capability, as "9.0"."""
    return ".".join(map(str, torch.cuda.get_device_capability()))


def measure(report: Report) -> Measured:
    """A steady-state step of the report's setup on this GPU. torch's OutOfMemoryError is not caught."""
    setup, model = report.setup, report.model
    device_name()
    gc.collect()
    torch.cuda.empty_cache()
    before = used_on_device()
    real_ranks = "RANK" in os.environ
    if real_ranks and int(os.environ["WORLD_SIZE"]) != setup.gpus:
        raise InputError(f"--gpus {setup.gpus}: torchrun started {os.environ['WORLD_SIZE']} ranks; allowed: as many")
    with contextlib.ExitStack() as stack:
        if setup.engine != "none" and not real_ranks:
            stack.enter_context(process_group(setup.gpus))
        elif setup.engine != "none":
            dist.init_process_group("nccl")
            stack.callback(dist.destroy_process_group)
        torch.cuda.reset_peak_memory_stats()
        mesh = mesh_of(setup, "cuda") if setup.engine == "fsdp2" else None
        with quiet():
            with torch.device("cuda" if mesh is None else "meta"):  # a model to be sharded is never there as a whole
                module = build(setup, model.model_type, fields_of(model))
            with torch.device("cuda"):
                job = wrapped(setup, module, make_batch(setup, module.config), mesh, None)
        return _run(setup, job, before)


def used_on_device() -> int | None:
    """Bytes that nvidia-smi counts on this rank's GPU, by its place on the bus; None where there is no such command."""
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(rank + 1)))
    own = visible.split(",")[rank]
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "-i", own]
    try:
        shown = subprocess.run(query, capture_output=True, text=True, check=True, timeout=60).stdout
        return int(shown.strip().splitlines()[0]) * 2**20
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None


def _run(setup: Setup, job: Job, before: int | None) -> Measured:
    losses: list[Any] = [None]
    _step(setup, job, losses)
    _step(setup, job, losses)
    measured = _step(setup, job, losses)
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(_TIMED_STEPS):
        _bare_step(setup, job)
    torch.cuda.synchronize()
    seconds = (time.perf_counter() - began) / _TIMED_STEPS
    after = used_on_device()
    device = None if after is None or before is None else after - before
    where = environment() | _gpu()
    return measured._replace(seconds=seconds, device=device, environment=where, real_ranks="RANK" in os.environ)


def _bare_step(setup: Setup, job: Job) -> None:
    """To be timed: nothing but the step."""
    dtype = setup.autocast_dtype
    for micro_batch in range(setup.micro_batches):
        with job.accumulating(micro_batch < setup.micro_batches - 1):
            with torch.autocast("cuda", None if dtype is None else DTYPES[dtype], enabled=dtype is not None):
                loss = job.model(**job.batch).loss
            loss.backward()
    job.optimizer.step()
    job.optimizer.zero_grad(set_to_none=True)


class _Allocator:
    """The allocator's own counts, over phases."""

    def __init__(self) -> None:
        self.allocated = 0

    def begin(self) -> None:
        torch.cuda.reset_peak_memory_stats()

    def peak(self) -> int:
        """Requested bytes of this phase."""
        self.allocated = max(self.allocated, torch.cuda.max_memory_allocated())
        return torch.cuda.memory_stats()["requested_bytes.all.peak"]

    def now(self) -> int:
        return torch.cuda.memory_stats()["requested_bytes.all.current"]


def _step(setup: Setup, job: Job, losses: list[Any]) -> Measured:
    """One step. The caller holds the last loss until there is a new one."""
    gc.collect()
    allocator = _Allocator()
    dtype = setup.autocast_dtype
    forward = backward = saved = 0
    for micro_batch in range(setup.micro_batches):
        before = allocator.now()
        allocator.begin()
        with job.accumulating(micro_batch < setup.micro_batches - 1):
            with torch.autocast("cuda", None if dtype is None else DTYPES[dtype], enabled=dtype is not None):
                out = job.model(**job.batch)
            losses[0] = out.loss
            del out
            forward = max(forward, allocator.peak())
            saved = allocator.now() - before if micro_batch == 0 else saved
            allocator.begin()
            losses[0].backward()
        backward = max(backward, allocator.peak())
    gradients = nbytes(p.grad for p in job.module.parameters())
    allocator.begin()
    job.optimizer.step()
    job.optimizer.zero_grad(set_to_none=True)
    step = allocator.peak()
    states = [s for state in job.optimizer.state.values() for s in state.values() if s.device.type == "cuda"]
    return Measured(
        parameters=nbytes(job.module.parameters()),
        gradients=None if setup.engine == "fsdp2" else gradients,  # whole ones come and go
        optimizer_states=nbytes([*states, *getattr(job.optimizer, "masters", ())]),
        saved_activations=saved if setup.engine == "none" else None,
        forward=forward,
        backward=backward,
        step=step,
        calls=None,
        environment={},
        allocated=allocator.allocated,
        reserved=torch.cuda.max_memory_reserved(),
    )


def _gpu() -> dict[str, str]:
    """The GPU, its driver and the allocator's settings."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        driver = subprocess.run(query, capture_output=True, text=True, check=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError):
        driver = "unknown"
    return {
        "gpu": torch.cuda.get_device_name(),
        "compute_capability": capability(),
        "driver": one_line(driver.split("\n")[0]),
        "cuda": str(torch.version.cuda),
        "allocator": os.environ.get("PYTORCH_CUDA_ALLOC_CONF", os.environ.get("PYTORCH_ALLOC_CONF", "")),
    }
