# pyright: basic
"""Backend `fake`: a whole steady-state step of tensors that have sizes and no data, on the reported rank of a group.

To torch everything is on the CPU. Where the CPU takes another way than a GPU (dropout, fused attention), it is made to
take the GPU's. CPU tensors have no streams: lives are those of the objects. Tensors are torch's fake ones or, with DDP,
DeepSpeed, tensor, context and expert parallelism, real ones that are not touched (`untouched.py`): the waits of
functional collectives give fake tensors storages that they do not have, and DDP's reducer and DeepSpeed copy by
pointers.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore

from memcalc.errors import InputError, one_line
from memcalc.kernels.attention_on_gpu import fused_kernels
from memcalc.tracing.modules import quiet
from memcalc.tracing.realism import collected_by_hand, gpu_dropout, not_initialized
from memcalc.validate import deepspeed, liger
from memcalc.validate.attention_kernels import as_on_cuda, kernels_of_cuda
from memcalc.validate.auto_ep import kernels_of_a_gpu
from memcalc.validate.autocast import cuda_lists_on_the_cpu
from memcalc.validate.checks import fields_of
from memcalc.validate.collectives import Collectives
from memcalc.validate.comparison import Measured, rank_of
from memcalc.validate.components import components
from memcalc.validate.engines import mesh_of, shard, split, wrapped
from memcalc.validate.experts import balanced_routing, routing
from memcalc.validate.gathered import Gathered
from memcalc.validate.jobs import enter_all, job_of
from memcalc.validate.left import Left
from memcalc.validate.live import Live, resizing, whole_shapes_uncounted
from memcalc.validate.meter import Meter
from memcalc.validate.optimizers import on_the_cpu, one_seed
from memcalc.validate.pipeline import pipeline
from memcalc.validate.preference import is_of_trl, preference_job, triton_of_a_gpu
from memcalc.validate.quantized import four_bit_products_of_cuda
from memcalc.validate.realism import cuda_kernels, not_traced
from memcalc.validate.reference import Job, build, environment, make_batch, nbytes, of_rank
from memcalc.validate.special import has_two_stacks_in_stages, is_special, looks_at_tensors
from memcalc.validate.two_places import places_of
from memcalc.validate.untouched import Untouched

if TYPE_CHECKING:
    from memcalc.estimation.report import Report
    from memcalc.setup.setup import Setup

_SENT_IN_FORWARD: Final = ("tp", "cp", "ep")


def measure(report: Report) -> Measured:
    """Measure a steady-state step of the report's setup. Raises InputError if transformers' code cannot be run without
    data."""
    setup, model = report.setup, report.model
    try:
        if setup.engine == "deepspeed":
            return worst([_measure_rank(report, rank) for rank in deepspeed.ranks_to_run(setup, model)])
        return _measure_rank(report, rank_of(report))
    except InputError:
        raise
    except Exception as error:
        why = f"{type(error).__name__}: {one_line(error, 200)}"
        raise InputError(f"--backend fake: {model.name} cannot be run without data ({why})") from error


def _can_be_fake(setup: Setup) -> bool:
    """Tell whether tensors may be fake ones."""
    plain = setup.quantize == "none"  # bitsandbytes' parameters are a subclass that wraps real tensors alone
    return (
        plain
        and not (is_special(setup) and looks_at_tensors(setup))
        and setup.engine not in ("ddp", "deepspeed")
        and not is_of_trl(setup)
        and all(getattr(setup, axis) == 1 for axis in _SENT_IN_FORWARD)
    )


def _measure_rank(report: Report, rank: int) -> Measured:
    """Measure one rank, with fake tensors if possible. Code that looks at values (experts that are run in a loop) needs
    other tensors."""
    if _can_be_fake(report.setup):
        with contextlib.suppress(DataDependentOutputException, DynamicOutputShapeException):
            return _measure_over(report, rank, fake=True)
    return _measure_over(report, rank, fake=False)


def _measure_over(report: Report, rank: int, *, fake: bool) -> Measured:
    setup = report.setup
    live = Live()
    with contextlib.ExitStack() as stack:
        if setup.engine != "none":
            stack.enter_context(process_group(setup.gpus, rank))
        if not fake:
            stack.enter_context(Untouched())
        masks = not_traced(padded=setup.padded, encoder_decoder=report.model.support.decodes_encoded)
        for context in (
            masks if not setup.shares_sequences else not_initialized(), cuda_kernels(fused_kernels(setup.gpu)),
            gpu_dropout(), collected_by_hand(), one_seed(setup), resizing(live), whole_shapes_uncounted(), quiet(),
        ):  # fmt: skip
            stack.enter_context(context)
        stack.enter_context(liger.patched(setup, report.model.model_type))
        if not fake:
            stack.enter_context(as_on_cuda() if setup.shares_sequences else kernels_of_cuda())
        if setup.autocast_dtype is not None:
            stack.enter_context(cuda_lists_on_the_cpu())
        live.places = places_of(setup)
        if setup.engine == "deepspeed":
            stack.enter_context(deepspeed.on_the_cpu(live.places))
            if setup.ep > 1:
                stack.enter_context(kernels_of_a_gpu())
        if is_of_trl(setup):
            stack.enter_context(triton_of_a_gpu())
        stack.enter_context(routing(setup, alone=True))
        if is_special(setup):
            enter_all(setup, live.places, stack)
        else:
            stack.enter_context(four_bit_products_of_cuda(setup))
        if setup.ep == 1 and not fake:  # experts that are run in a loop have their rows
            stack.enter_context(balanced_routing())
        mesh = mesh_of(setup, "cpu") if setup.engine == "fsdp2" else None
        if mesh is not None:
            live.leave_out(mesh._rank_map)
        if fake:
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        return _run(live, setup, _job(live, report, mesh, stack))


def worst(ranks: Sequence[Measured]) -> Measured:
    """Return the measurement of the rank with the highest peak, with the highest peak of every phase, and the gradients
    of the rank with most in the step."""
    phases = ("forward", "backward", "step")
    highest = max(ranks, key=lambda m: max(getattr(m, phase) for phase in phases))
    in_step = max(ranks, key=lambda m: m.step).gradients_in_step
    peaks = {phase: max(getattr(m, phase) for m in ranks) for phase in phases}
    return highest._replace(**peaks, gradients_in_step=in_step)


def _job(live: Live, report: Report, mesh: Any, stack: contextlib.ExitStack) -> Job:
    setup, model = report.setup, report.model

    def made(of: Setup = setup) -> Any:
        return build(of, model if of is setup else model.whole, fields_of(model))

    if is_special(setup) or has_two_stacks_in_stages(report):
        return job_of(live, report, mesh, stack)
    if is_of_trl(setup):
        return preference_job(setup, made, "cpu", live, stack)
    if setup.pp > 1:
        cpu = torch.device("cpu")
        number = report.rank.number
        return pipeline(
            setup,
            model,
            number,
            lambda: split(setup, made(), mesh),
            lambda m: shard(setup, m, mesh, cpu),
            mesh,
            alone=True,
        )
    module = made()
    if setup.engine == "deepspeed":
        batch = make_batch(setup, module.config)
        for tensor in (*module.parameters(), *module.buffers(), *batch.values()):
            live.register(tensor)
        with live, live.on_two_places():
            return deepspeed.deepspeed_job(setup, module, batch, stack)
    return wrapped(setup, module, make_batch(setup, module.config), mesh, live)


@contextlib.contextmanager
def process_group(ranks: int, rank: int = 0) -> Iterator[None]:
    """Make this process one of `ranks` within a block; nothing is sent."""
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
        # DTensor's cache of a mesh names groups that are gone, and an equal mesh's groups have other names.
        _clear_sharding_prop_cache()


def _run(live: Live, setup: Setup, job: Job) -> Measured:
    for tensor in [*job.parameters(), *job.buffers(), *job.batch.values()]:
        live.register(of_rank(tensor))
    weights = Gathered(job)
    with live, live.on_two_places():
        for tensor in getattr(job.optimizer, "masters", ()):
            live.register(tensor)
        for _ in range(_steps_before(setup)):
            _step(live, setup, job, weights)
        for tensor in job.states():  # bitsandbytes' codes are made before
            live.register(of_rank(tensor))
        return _step(live, setup, job, weights)


def _steps_before(setup: Setup) -> int:
    """Return the number of steps before the measured one. In its second step DDP tells all ranks its new buckets, and
    ZeRO-3 records which parameters are used in which order."""
    return 2 if setup.engine == "ddp" or (setup.engine == "deepspeed" and setup.zero == 3) else 1


def _step(live: Live, setup: Setup, job: Job, weights: Gathered) -> Measured:
    gc.collect()
    places = live.places
    counters = nbytes(t for t in on_the_cpu(job.optimizer) if places is None or not places.is_of_host(t))
    meter, left = Meter(live), Left(live, weights, in_flight=setup.pp > 1)

    def enter(phase: str) -> None:
        live.numbers_are_ones = phase == "step"
        meter.enter(phase)
        left.enter(phase)

    with Collectives() as sent:
        gradients = job.step(enter)
    meter.close()
    found = components(setup, job, meter, gradients, "cpu", live.places)
    return Measured(
        parameters=found.parameters,
        gradients=found.gradients,
        gradients_in_step=found.gradients_in_step,
        optimizer_states=found.optimizer_states - counters,
        saved_activations=left.most(),
        forward=meter.peaks["forward"] - counters,
        backward=meter.peaks["backward"] - counters,
        step=meter.peaks["step"] - counters,
        calls=sent.calls if setup.engine != "none" else None,
        environment=environment(),
    )
