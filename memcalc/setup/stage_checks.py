"""Checks of written stages, of groups of micro-batches and of gradients that wait, which are Megatron's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcalc.inputs.options import refuse
from memcalc.megatron.schedules import ends_of

if TYPE_CHECKING:
    from memcalc.inputs.options import Options

_LAYERS = "stage_layers"
_GROUP = "microbatch_group_size"
_DEFERRED = "wgrad_deferral_limit"


def with_stages(options: Options, layers: int | None) -> Options:
    """Return options whose written stages are without spaces, or are said by the layers of the first and the last stage, or
    by nothing if these make them too. `layers`: those of the model."""
    if options.stage_layers is None:
        return options
    counts = counts_of(options.stage_layers)
    ends = ends_of(counts, whole=options.virtual_stages > 1) if sum(counts) == layers else None
    if ends is None:
        return options._replace(stage_layers=",".join(map(str, counts)))
    return options._replace(stage_layers=None, first_stage_layers=ends[0], last_stage_layers=ends[1])


def counts_of(text: str) -> list[int]:
    """Return the layers of each stage. Raises InputError for other text than whole numbers with commas."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and len(part) < 7 for part in parts):
        refuse(_LAYERS, text, "allowed: the layers of each stage with commas, such as 3,2,2,1")
    return [int(part) for part in parts]


def check_stages(options: Options, engine: str, micro_batches: int) -> None:
    """Raise InputError for another engine than Megatron, and for stages and groups that it refuses
    (core/transformer/pipeline_parallel_layer_layout.py; forward_backward_pipelining_with_interleaving of
    core/pipeline_parallel/schedules.py)."""
    for name in (_LAYERS, _GROUP, _DEFERRED):
        value = getattr(options, name)
        if value is not None and (engine != "megatron" or options.pp == 1):
            refuse(name, value, "needs --engine megatron and --pp 2 or more; allowed: leave it out")
    if options.stage_layers is not None:
        _check_layers(options, options.stage_layers)
    if options.wgrad_deferral_limit is not None and options.gradient_accumulation_fusion is False:
        why = "Megatron defers no gradient that the kernel does not accumulate"
        refuse(_DEFERRED, options.wgrad_deferral_limit, f"{why}; allowed: with --gradient-accumulation-fusion")
    group = options.microbatch_group_size
    if group is not None:
        _check_groups(options, group, micro_batches)


def _check_layers(options: Options, given: str) -> None:
    counts, stages = counts_of(given), options.pp * options.virtual_stages
    if options.first_stage_layers is not None or options.last_stage_layers is not None:
        refuse(
            _LAYERS,
            given,
            "has the first and the last stage too; allowed: without --first-stage-layers, --last-stage-layers",
        )
    if len(counts) != stages:
        product = f"pp {options.pp} · virtual-stages {options.virtual_stages} = {stages}"
        refuse(_LAYERS, given, f"has {len(counts)} stages; allowed: {product} numbers")
    if 0 in counts[1:-1]:
        refuse(
            _LAYERS,
            given,
            "a stage between the first and the last has nothing without layers; allowed: 1 or more there",
        )


def _check_groups(options: Options, group: int, micro_batches: int) -> None:
    if options.virtual_stages == 1:
        refuse(_GROUP, group, "needs a pipeline with --virtual-stages 2 or more; allowed: leave it out")
    if not options.pp <= group <= micro_batches:
        why = f"Megatron wants at least pp {options.pp} micro-batches, and at most the {micro_batches} of a step"
        refuse(_GROUP, group, f"{why}; allowed: {options.pp} to {micro_batches}")
    if 0 < micro_batches % group < options.pp:
        why = f"{micro_batches} micro-batches per step leave {micro_batches % group} for the last group"
        refuse(_GROUP, group, f"{why}; allowed: a size that leaves 0, or {options.pp} or more")
