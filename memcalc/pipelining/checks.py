"""Checks of a setup with torch.distributed.pipelining: its demands, and the limits of what is modelled. Each refusal is
an InputError of one line."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, cast

from memcalc.families import supporting
from memcalc.inputs.options import NOT_YET, refuse
from memcalc.pipelining.encoded import layers_of_stages
from memcalc.pipelining.orders import micro_batches_per_round
from memcalc.pipelining.placement import stages as stages_in_all
from memcalc.pipelining.programs import divided
from memcalc.pipelining.schedules import NAMES, has_halves, placement_of, schedule_of

if TYPE_CHECKING:
    from memcalc.families.base.encoder_decoder import EncoderDecoder
    from memcalc.inputs.model import Model
    from memcalc.inputs.options import Options

_WITH: Final = "with engine fsdp2 and pp above 1 "
_PRECISIONS: Final = "fp32, bf16, fp16, bf16-mixed, fp16-mixed"
ENCODED_SCHEDULES: Final = ("gpipe", "1f1b")
SCHEDULES: Final = ("gpipe", "1f1b", "interleaved", "zero-bubble", *NAMES)


def check_stages(options: Options, micro_batches: int, model: Model | None) -> None:
    """Raise InputError for a setup that cannot be run in stages. Options are checked first, then the model."""
    if model is None:
        why = "with engine fsdp2 a bare number of parameters has no stages"
        refuse("pp", options.pp, f"{why}; allowed: 1, or --model")
    if str(options.precision).endswith("-autocast"):
        refuse("precision", options.precision, f"{_WITH}{NOT_YET}{_PRECISIONS}")
    if options.padded:
        refuse("padded", "on", f"{_WITH}{NOT_YET}off")
    if options.kernels not in (None, "hf"):
        refuse("kernels", options.kernels, f"{_WITH}{NOT_YET}hf")
    if options.tp == 1 and options.cross_entropy not in (None, "eager"):
        refuse("cross_entropy", options.cross_entropy, f"{_WITH}{NOT_YET}eager")
    _check_model(options, model)
    _check_schedule(options, micro_batches, model)


def _check_schedule(options: Options, micro_batches: int, model: Model) -> None:
    schedule, ranks = options.schedule, options.pp
    if schedule not in SCHEDULES:
        refuse("schedule", schedule, f"{_WITH}{NOT_YET}{', '.join(SCHEDULES)}")
    if schedule in NAMES:
        _check_of_a_file(options, micro_batches)
    elif schedule != "zero-bubble" and (schedule == "interleaved") != (options.virtual_stages > 1):
        allowed = "2 or more with schedule interleaved, any with zero-bubble, 1 with the others"
        refuse("virtual_stages", options.virtual_stages, f"does not go with schedule {schedule}; allowed: {allowed}")
    if has_halves(schedule):
        _check_halves(options, model)
    if schedule == "1f1b" and micro_batches < ranks:
        why = f"torch's Schedule1F1B needs at least {ranks} micro-batches (one for each stage), not {micro_batches}"
        allowed = f"gpipe, or {ranks} micro-batches by --global-batch-size"
        refuse("schedule", "1f1b", f"{why}; allowed: {allowed}")
    if schedule in ("interleaved", "zero-bubble"):
        try:
            micro_batches_per_round(ranks, micro_batches)
        except ValueError as error:
            refuse("schedule", schedule, f"{error}; allowed: another --global-batch-size")


def _check_of_a_file(options: Options, micro_batches: int) -> None:
    """Raise InputError for a step that a schedule with a file of its own does not take."""
    schedule = schedule_of(options.schedule)
    if options.virtual_stages not in (1, schedule.chunks):
        has = f"schedule {schedule.name} has {schedule.chunks} model chunk{'s' if schedule.chunks > 1 else ''} a rank"
        refuse("virtual_stages", options.virtual_stages, f"{has}; allowed: leave it out")
    for name in ("first_stage_layers", "last_stage_layers"):
        if getattr(options, name) is not None and schedule.placement == "in a V":
            refuse(
                name, getattr(options, name), f"schedule {schedule.name} has two stages a rank; allowed: leave it out"
            )
    why = schedule.unfit(options.pp, micro_batches)
    if why is not None:
        other = "another --pp" if "ranks, not" in why else "another --global-batch-size"
        refuse("schedule", schedule.name, f"{why}; allowed: {other}, or another schedule such as 1f1b")
    if schedule.update_every is not None:
        _check_never_emptied(options, schedule.name)


def _check_never_emptied(options: Options, schedule: str) -> None:
    """Raise InputError for what is not modelled of updates while micro-batches are in flight."""
    why = f"with schedule {schedule}, which updates weights while micro-batches are in flight,"
    for name in ("tp", "cp"):
        if getattr(options, name) > 1:
            refuse(name, getattr(options, name), f"{why} {NOT_YET}1")


def _check_halves(options: Options, model: Model) -> None:
    """Raise InputError where backward cannot be cut into two halves (torch/distributed/pipelining/_backward.py)."""
    split = f"with schedule {options.schedule}"
    if options.zero == 3:
        why = "torch takes a stage's resharded parameters before backward, and those get no gradient"
        refuse("schedule", options.schedule, f"with --zero 3, the default of fsdp2, {why}; allowed: with --zero 2")
    if options.recompute == "op":
        why = f"torch fails: a selective checkpoint serves one backward, and {options.schedule} runs two"
        refuse("recompute", options.recompute, f"{split} {why}; allowed: none, or another --schedule")
    if options.recompute != "none":
        why = "torch recomputes a layer for its input and again for each weight, which"
        refuse("recompute", options.recompute, f"{split} {why} {NOT_YET}none, or another --schedule")
    if not model.support.halves:
        others = "gpipe, 1f1b, interleaved"
        refuse("schedule", options.schedule, f"with engine fsdp2 for a {model.model_type} {NOT_YET}{others}")
    plan = model.support.tensor_parallel or {}
    if options.tp > 1 and not options.sequence_parallel and "replicated_with_grad_allreduce" in plan.values():
        name = model.name or f"this {model.model_type}"
        why = f"torch's split backward skips the hooks that sum the gradients of {name}'s q and k norms"
        refuse("tp", options.tp, f"{split} {why}; allowed: 1, or another --schedule")


def _check_encoded(options: Options, model: Model) -> None:
    """Raise InputError for what is not modelled of the stages of an encoder and a decoder."""
    name, program = model.name or f"this {model.model_type}", cast("EncoderDecoder", model.program)
    why = f"with engine fsdp2 for a {model.model_type}"
    if options.schedule not in ENCODED_SCHEDULES:
        refuse("schedule", options.schedule, f"{why} {NOT_YET}{', '.join(ENCODED_SCHEDULES)}")
    for field in ("first_stage_layers", "last_stage_layers"):
        if (value := getattr(options, field)) is not None:
            refuse(field, value, f"{why}, whose stages are of the encoder or of the decoder, {NOT_YET}leave it out")
    for field in ("tp", "cp"):
        if getattr(options, field) > 1:
            refuse(field, getattr(options, field), f"{why} in stages {NOT_YET}1")
    if options.lora_rank:
        refuse("lora_rank", options.lora_rank, f"{why} in stages {NOT_YET}0, or --pp 1")
    if options.freeze is not None:
        refuse("freeze", options.freeze, f"{why} in stages {NOT_YET}leave it out, or --pp 1")
    try:
        layers_of_stages(program.encoder_layers, program.decoder_layers, options.pp, options.encoder_stages)
    except ValueError as error:
        field = "pp" if options.encoder_stages is None else "encoder_stages"
        refuse(field, getattr(options, field), f"{name}: {error}; allowed: at least one layer in each")


def _check_model(options: Options, model: Model) -> None:
    name, program = model.name or f"this {model.model_type}", model.program
    if not program.one_stack:
        _check_encoded(options, model)
        return
    if not model.support.stages:
        staged = ", ".join(supporting(lambda s: s.stages))
        refuse("pp", options.pp, f"with engine fsdp2 for a {model.model_type} {NOT_YET}1 (more for {staged})")
    config: Any = program.config
    if config.tie_word_embeddings:
        each = "which the first and the last stage would train separately"
        why = f"{name} has tied embeddings, {each}"
        refuse("pp", options.pp, f"with engine fsdp2: {why}; allowed: 1, or a config with tie_word_embeddings false")
    chunks = schedule_of(options.schedule).chunks if options.schedule in NAMES else options.virtual_stages
    stages = stages_in_all(placement_of(options.schedule), options.pp, chunks)
    first, last = options.first_stage_layers, options.last_stage_layers
    try:
        divided(model.layers, stages, first, last)
    except ValueError as error:
        field = "first_stage_layers" if first is not None else "last_stage_layers" if last is not None else "pp"
        value = getattr(options, field)
        if field == "pp" and stages > options.pp:
            value = f"{value} · virtual-stages {chunks} = {stages}"
        refuse(field, value, f"{name}: {error}; allowed: at least one layer in each")
