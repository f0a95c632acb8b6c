"""Refusals of frozen weights and adapters on the parallel axes: where real code fails or trains nothing, and where it is not
modelled."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from memcalc.inputs.options import NOT_YET, Options, refuse
from memcalc.pipelining.placement import stages as stages_in_all
from memcalc.pipelining.programs import RankProgram, spans
from memcalc.pipelining.schedules import NAMES, flushes, has_halves, placement_of, schedule_of
from memcalc.tuning.saved import is_named

if TYPE_CHECKING:
    from memcalc.families.base.linear_modules import Place
    from memcalc.families.base.program import Program
    from memcalc.inputs.model import Model

_LOCAL: Final = "peft makes the adapter as wide as a rank's part of the layer"
_NO_ADAPTER: Final = {
    "rowwise": f"{_LOCAL}, and transformers takes that for the whole width (RowwiseParallel)",
    "colwise_gather_output": f"{_LOCAL}, whose gathered output it does not fit",
    "rowwise_split_input": f"{_LOCAL}, whose whole input it does not fit",
}
"""The reasons why a layer of a style cannot have an adapter."""


def check_split(options: Options, engine: str, model: Model | None, name: str, value: object) -> None:
    """Raise InputError for what trains (`name`, `value`) where layers, experts or stages are shared by ranks."""
    if engine != "fsdp2":
        _check_other_engines(options, engine, model, name, value)
    if model is None:
        return
    if options.tp > 1 and options.lora_rank:
        _check_adapters(options, model)
    if options.pp > 1:
        _check_stages(options, model, name, value)


def _check_other_engines(options: Options, engine: str, model: Model | None, name: str, value: object) -> None:
    """Raise InputError for an axis of an engine with which this is not modelled, and for experts that AutoEP does not take."""
    if engine == "deepspeed" and options.ep > 1 and model is not None:
        program = model.program
        trained = [w for w in program.weights() if w.component == "experts" and program.wants_gradient(w)]
        if not trained:
            why = "DeepSpeed fails if no expert trains: none of the param groups are marked as MoE"
            refuse(name, value, f"with --ep {options.ep} {why}; allowed: --ep 1, or --engine fsdp2 --zero 3")
    for axis in ("tp", "pp", "ep"):
        degree = getattr(options, axis)
        is_auto_tp = axis == "tp" and options.autotp and not options.lora_rank
        if degree > 1 and not is_auto_tp:
            refuse(name, value, f"with engine {engine} and --{axis} {degree} {NOT_YET}{_instead(axis)}")


def _instead(axis: str) -> str:
    return f"with --{axis} 1, or --engine fsdp2 --zero 3" if axis != "pp" else "with --pp 1, or --engine fsdp2 --zero 2"


def _check_adapters(options: Options, model: Model) -> None:
    """Raise InputError for adapters that peft does not split as transformers splits their layers, or that fail."""
    plan, program = dict(model.support.tensor_parallel or {}), model.program
    if options.sequence_parallel:
        why = (
            "peft splits adapters by transformers' plan alone (get_tp_plan_and_mesh), which has no sequence parallelism"
        )
        refuse("lora_rank", options.lora_rank, f"{why}; allowed: without --sequence-parallel, or --freeze")
    if options.dora:
        why = (
            "peft adds a magnitude's plain tensors to a DTensor, which torch refuses (DoraLinearLayer.get_weight_norm)"
        )
        refuse("dora", True, f"with --tp {options.tp} {why}; allowed: off")
    fit = [path for path, _ in _places(program) if plan.get(path) not in _NO_ADAPTER]
    for path, _ in _places(program):
        why = _NO_ADAPTER.get(plan.get(path, ""))
        if why is not None:
            last = path.rpartition(".")[2]
            others = ", ".join(dict.fromkeys(path.rpartition(".")[2] for path in fit))
            other = f"--lora-targets {others}" if others else "other --lora-targets"
            refuse(
                "lora_targets",
                options.lora_targets or "default",
                f"with --tp {options.tp}, {last}: {why}; allowed: {other}",
            )
    if options.modules_to_save is not None:
        _check_copies(options, program, list(plan))


def _places(program: Program) -> list[Place]:
    adapters: Any = program.adapters
    return [] if adapters is None else list(adapters.calls)


def _check_copies(options: Options, program: Program, plan: list[str]) -> None:
    adapters: Any = program.adapters
    saved: list[str] = [] if adapters is None else [path for path, _ in adapters.saved]
    split = next((path for path in saved if any(is_named(path, one) or is_named(one, path) for one in plan)), None)
    if split is not None:
        why = f"{split.rpartition('.')[2]} is split, and its copy would run the original's forward and not train"
        kept = "norms that are whole on every rank, or leave it out"
        refuse("modules_to_save", options.modules_to_save, f"with --tp {options.tp} {why}; allowed: {kept}")


def _check_stages(options: Options, model: Model, name: str, value: object) -> None:
    """Raise InputError for a schedule in which frozen stages are not modelled, or in which torch trains no weight of a stage
    whose input requires no gradient."""
    if not flushes(options.schedule):
        why = f"with schedule {options.schedule}, which updates weights while micro-batches are in flight,"
        refuse(name, value, f"{why} {NOT_YET}another --schedule such as 1f1b")
    if not has_halves(options.schedule) or not model.support.stages:
        return
    for number, program in enumerate(_ranks(options, model)):
        for stage in program.stages:
            untrained = stage.backward_from(asks=False) is not None and not stage.input_wants_gradient(asks=False)
            if untrained and not stage.span.first:
                why = f"torch's split backward trains no weight of a stage whose input requires no gradient, as on rank {number}"
                refuse(name, value, f"with schedule {options.schedule} {why}; allowed: gpipe, 1f1b, interleaved")


def _ranks(options: Options, model: Model) -> list[RankProgram]:
    placement = placement_of(options.schedule)
    chunks = schedule_of(options.schedule).chunks if options.schedule in NAMES else options.virtual_stages
    if stages_in_all(placement, options.pp, chunks) > model.layers:
        return []  # refused by itself
    ends = options.first_stage_layers, options.last_stage_layers
    whole = model.program
    return [RankProgram(whole, own) for own in spans(whole.layers, options.pp, chunks, *ends, placement)]  # type: ignore[arg-type]
