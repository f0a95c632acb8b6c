# pyright: basic
"""Jobs of the backend `fake` for what the plain reference step has not (`special.py`)."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

from memcalc.setup.setup import DTYPES as BY_NAME
from memcalc.validate import activations, deepspeed, engines, own_optimizers, packed, sharded_codes, two_places
from memcalc.validate.built import JobWithScales, built, codes_of, products
from memcalc.validate.checks import fields_of
from memcalc.validate.context_parallel import joined
from memcalc.validate.dtypes import DTYPES
from memcalc.validate.encoded_stages import encoded_job
from memcalc.validate.experts import share_experts
from memcalc.validate.optimizers import by_mesh, make
from memcalc.validate.pipeline import pipeline
from memcalc.validate.preference import batch_of, is_of_trl
from memcalc.validate.reference import Around, Job, make_batch, plain_step
from memcalc.validate.special import comes_behind_the_split
from memcalc.validate.split_tuning import outputs_that_want_a_gradient, tuned_behind_the_split
from memcalc.validate.trainers import completions_of, trainer_job

if TYPE_CHECKING:
    from memcalc.estimation.report import Report
    from memcalc.setup.setup import Setup
    from memcalc.validate.host import Places
    from memcalc.validate.live import Live


def enter_all(setup: Setup, places: Places | None, stack: contextlib.ExitStack) -> None:
    """Enter the contexts of a special setup, as long as `stack` lasts."""
    stack.enter_context(products(setup))
    stack.enter_context(own_optimizers.moments_on_the_gpu(setup))
    if setup.packing:
        packed.check_lengths(setup)
        stack.enter_context(packed.packed_rows())
    if places is not None and setup.engine == "fsdp2":
        stack.enter_context(two_places.fsdp2_beside_the_host(places))
    if places is not None and "nvme" in (setup.offload_optimizer, setup.offload_params):
        stack.enter_context(two_places.beside_files(places))


def job_of(live: Live, report: Report, mesh: Any, stack: contextlib.ExitStack) -> Job:
    """Return the job of a special setup. DeepSpeed's engines last as long as `stack`."""
    job = _job(live, report, mesh, stack)
    return JobWithScales(*job) if codes_of(report.setup) is not None else job


def _job(live: Live, report: Report, mesh: Any, stack: contextlib.ExitStack) -> Job:
    setup, model = report.setup, report.model

    def made(of: Setup = setup) -> Any:
        return built(of, model if of is setup else model.whole, fields_of(model))

    def within(module: Any, around: Around) -> Around:
        return activations.around(setup, module, around, stack)

    if is_of_trl(setup):
        return trainer_job(setup, made, _batch_of_task(setup), within, live, stack)
    if comes_behind_the_split(setup):
        return _split_job(report, mesh)
    if setup.pp > 1:
        own = lambda stage: engines.shard(setup, stage, mesh, torch.device("cpu"))  # noqa: E731
        return encoded_job(setup, model, report.rank.number, made, own, mesh)
    module = made()
    batch = packed.batch_of(setup) if setup.packing else make_batch(setup, module.config)
    if setup.engine == "deepspeed":
        return _deepspeed_job(setup, module, batch, live, stack)
    if setup.engine == "fsdp2":
        return _fsdp2_job(setup, module, batch, mesh, live)
    if setup.optimizer in ("lomo", "adalomo"):
        return own_optimizers.lomo_job(setup, module, batch)
    if setup.engine == "ddp":
        wrapped, held_back = engines.replicated(setup, module, live)
        return _plain(setup, module, wrapped, batch, within(module, held_back))
    return _plain(setup, module, module, batch, within(module, _alone))


def _alone(follows: bool) -> Any:
    return contextlib.nullcontext()


def _plain(setup: Setup, module: Any, wrapped: Any, batch: dict[str, torch.Tensor], around: Around) -> Job:
    optimizer = own_optimizers.optimizer_of(setup, module)
    return Job([module], optimizer, batch, plain_step(setup, wrapped, optimizer, batch, around))


def _batch_of_task(setup: Setup) -> dict[str, torch.Tensor]:
    if setup.packing:
        return packed.batch_of(setup)
    return completions_of(setup) if setup.task == "grpo" else batch_of(setup)


# --- engines


def _deepspeed_job(
    setup: Setup, module: Any, batch: dict[str, torch.Tensor], live: Live, stack: contextlib.ExitStack
) -> Job:
    for tensor in (*module.parameters(), *module.buffers(), *batch.values()):
        live.register(tensor)
    with live, live.on_two_places():
        if not setup.offloads:
            return deepspeed.deepspeed_job(setup, module, batch, stack)
        deepspeed.load()
        engine = two_places.engine_of(setup, module, stack)
        step = deepspeed.stepping(setup, engine, module, lambda: engine(**batch).loss)
        return Job([module], engine.optimizer, batch, step)


def _fsdp2_job(setup: Setup, module: Any, batch: dict[str, torch.Tensor], mesh: Any, live: Live) -> Job:
    """Return the job of FSDP2 alone, or of ranks that share experts or a sequence."""
    for tensor in (*module.parameters(), *module.buffers(), *batch.values()) if live.places is not None else ():
        live.register(tensor)
    around = engines._sharing(setup, module, batch, mesh) if setup.shares_sequences else None
    if setup.keeps_whole_gradients:
        around = engines._reducing_last(module, around)
    with live if live.places is not None else contextlib.nullcontext(), live.on_two_places():
        shard(setup, module, mesh)
        optimizer: Any = make(setup, by_mesh(p for p in module.parameters() if p.requires_grad))
    if live.places is None:
        return Job([module], optimizer, batch, plain_step(setup, module, optimizer, batch, around or _alone))
    seeing = two_places.SeesGradients(optimizer, list(module.parameters()), live.places)
    return Job([module], seeing, batch, seeing.counted(plain_step(setup, module, seeing, batch, around or _alone)))


def shard(setup: Setup, module: Any, whole: Any) -> None:
    """Run `fully_shard` over every layer and then the module, with what `engines.shard` has not: codes that are left out, and a
    policy of offload."""
    over = tuple(name for name in whole.mesh_dim_names if name not in ("pp", "tp"))
    mesh = whole if over == whole.mesh_dim_names else whole[over]
    how: dict[str, Any] = {
        "mesh": joined(whole) if setup.shares_sequences else mesh,
        "reshard_after_forward": None if setup.zero == 3 else False,
    }
    if setup.has_master_weights:
        reduced = DTYPES[BY_NAME[setup.grad_dtype]]
        how["mp_policy"] = MixedPrecisionPolicy(param_dtype=DTYPES[setup.compute_dtype], reduce_dtype=reduced)
    if setup.offload_params == "cpu":
        how["offload_policy"] = CPUOffloadPolicy()
    if setup.ep > 1:
        share_experts(module, "cpu", engines.config_of(setup), whole["tp"] if setup.tp > 1 else None, **how)
    for unit in (*engines._layers(module), module):
        left_out = sharded_codes.left_out(unit)
        more: dict[str, Any] = {"ignored_params": left_out} if left_out else {}
        fully_shard(unit, **how, **more)


def _split_job(report: Report, mesh: Any) -> Job:
    """Return the job of FSDP2's ranks that share layers or stages."""
    setup, model = report.setup, report.model
    device = torch.device("cpu")

    def made() -> Any:
        return tuned_behind_the_split(setup, model, mesh)

    if setup.pp > 1:
        wanted = outputs_that_want_a_gradient(setup, model)
        own = lambda stage: engines.shard(setup, stage, mesh, device)  # noqa: E731
        return pipeline(setup, model, report.rank.number, made, own, mesh, alone=True, wanted=wanted)
    module = made()
    batch = make_batch(setup, module.config)
    if setup.sequence_parallel:  # transformers would count the tokens of a shard
        batch = {"position_ids": torch.arange(batch["input_ids"].shape[1]).unsqueeze(0)} | batch
    around = engines._sharing(setup, module, batch, mesh) if setup.shares_sequences else None
    if setup.keeps_whole_gradients:
        around = engines._reducing_last(module, around)
    engines.shard(setup, module, mesh, device)
    optimizer = make(setup, by_mesh(p for p in module.parameters() if p.requires_grad))
    step = plain_step(setup, module, optimizer, batch, around or _alone)
    return Job([module], optimizer, batch, engines.under_loss_parallel(step) if engines.split_logits(setup) else step)
