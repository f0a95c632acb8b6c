"""The engine of a setup: the one that was asked for, or the one that its other options mean."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcalc.inputs.options import Options, refuse
from memcalc.optimizers import load_optimizer
from memcalc.setup.optimizer_checks import check_engine_of_optimizer, check_optimizer_of_deepspeed
from memcalc.setup.parameter_server_checks import check_parameter_server
from memcalc.setup.refusals import check_fsdp2
from memcalc.setup.tuning_checks import check_ddp
from memcalc.setup.zero_checks import check_stage

if TYPE_CHECKING:
    from memcalc.inputs.model import Model


def with_engine(options: Options, model: Model) -> Options:
    """Return the options with the engine, if only a part of the model trains: engines differ in the weights that have names."""
    if options.freeze is None and not options.lora_rank:
        return options
    return options._replace(engine=engine_of(options, model))


def engine_of(options: Options, model: Model | None) -> str:
    """Return the engine that was asked for, or the default one."""
    own = load_optimizer(options.optimizer).only_engine
    if options.engine is not None:
        return options.engine
    if model is not None and model.support.only_engine is not None:
        return model.support.only_engine
    if options.tp_dims != "1":
        return "colossalai"
    if options.autotp:
        return "deepspeed"
    if own is not None:
        return own
    if options.gpus == 1:
        return "none"
    if max(options.tp, options.pp, options.cp, options.ep) > 1:
        return "fsdp2" if options.zero > 1 else "megatron"
    return "deepspeed" if options.zero else "ddp"


def checked_engine(options: Options, dp: int, model: Model | None) -> str:
    """Return the engine. Raises InputError for one that has not what the options ask for."""
    engine = engine_of(options, model)
    parallel = max(options.tp, options.pp, options.cp, options.ep) > 1
    if engine == "none" and options.gpus > 1:
        if parallel:
            refuse("engine", "none", f"runs on 1 GPU, not on {options.gpus}; allowed: {_split_by(options, model)}")
        engines = ("deepspeed, fsdp2" if options.zero > 1 else "deepspeed") if options.zero else "ddp, deepspeed"
        refuse("engine", "none", f"runs on 1 GPU, not on {options.gpus}; allowed: {engines}")
    check_stage(options, engine, states_only=model is None)
    check_engine_of_optimizer(options, engine, states_only=model is None)
    if engine == "fsdp2":
        check_fsdp2(options, model)
    if engine == "fsdp1":
        from memcalc.setup.fsdp1_checks import check_fsdp1

        check_fsdp1(options, model, dp)
    if engine == "data-parallel":
        from memcalc.setup.data_parallel_checks import check_data_parallel

        check_data_parallel(options, model)
    if engine == "parameter-server":
        check_parameter_server(options, model)
    if engine == "ddp":
        check_ddp(model)
    if engine == "deepspeed":
        check_optimizer_of_deepspeed(options, states_only=model is None)
    return engine


def _split_by(options: Options, model: Model | None) -> str:
    """Return the engines that split a model, in words."""
    from memcalc.pipelining.schedules import NAMES  # only a refusal needs the schedules' files

    if options.schedule in NAMES or (model is not None and not model.program.one_stack):
        return "fsdp2 with --zero 2"
    if options.schedule == "zero-bubble":
        return "fsdp2 with --zero 2"
    if options.schedule in ("gpipe", "interleaved"):
        return "fsdp2" if options.zero > 1 else "megatron, fsdp2 with --zero 2"
    return "fsdp2, deepspeed" if options.zero > 1 else "megatron, deepspeed"


def check_engine_of_model(options: Options, model: Model | None) -> None:
    """Raise InputError for another engine, or a task of another tool, with a model that is an engine's own."""
    only = None if model is None else model.support.only_engine
    if model is None or only is None:
        return
    why = f"a {model.model_type} is Megatron-LM's GPTModel; allowed: "
    if options.engine not in (None, only):
        refuse("engine", options.engine, f"{why}{only}")
    if options.lora_rank:
        refuse("lora_rank", options.lora_rank, f"{why}0")
    if options.task != "pretrain":
        refuse("task", options.task, f"{why}pretrain")
