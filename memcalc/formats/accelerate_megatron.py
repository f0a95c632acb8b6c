"""Megatron-LM in an accelerate configuration.

Source: MegatronLMPlugin of accelerate/utils/dataclasses.py, prepare_multi_gpu_env of utils/launch.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from memcalc.formats.accelerate_precision import Mixed, as_stored
from memcalc.formats.accelerate_processes import Processes
from memcalc.formats.accelerate_sections import unread
from memcalc.formats.found import ACCUMULATION, Found, Value
from memcalc.formats.section import Section

PREFIX: Final = "megatron_lm_"
_DEGREES: Final = {
    "tp": "tp_degree",
    "pp": "pp_degree",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
    ACCUMULATION: "num_micro_batches",
}
DEFAULT_CP: Final = 2
"""The context_parallel_size that MegatronLMPlugin of accelerate 1.15 takes if none is given."""
_IGNORED: Final = tuple(
    f"{PREFIX}{name}"
    for name in (
        "attention_backend",
        "attention_softmax_in_fp32",
        "calculate_per_token_loss",
        "eod_mask_loss",
        "no_load_optim",
        "no_save_optim",
        "overlap_cpu_optimizer_d2h_h2d",
        "use_rotary_position_embeddings",
    )
)


def read_megatron(section: Section, mixed: Mixed, processes: Processes) -> Found:
    """Return what a megatron_lm_config says. Raises InputError."""
    options: dict[str, Value] = {}
    for option, name in _DEGREES.items():
        degree = section.whole(PREFIX + name, 1, 10**6)
        if degree is not None:
            options[option] = section.value(PREFIX + name, degree)
    if "ep" in options and "etp" not in options:
        options["etp"] = section.default(PREFIX + "expert_tensor_parallel_size", 1)
    options |= _switches(section)
    if section.flag(PREFIX + "use_custom_fsdp"):
        section.refuse(PREFIX + "use_custom_fsdp", "Megatron-FSDP is not modelled; allowed: false")
    precision = as_stored(mixed)
    recompute, shared = _recomputed(section), _shared(section, options, processes)
    notes = (*precision.notes, *shared.notes, *recompute.notes, *_notes(section), *unread(section, _IGNORED, PREFIX))
    return Found({**options, **precision.options, **recompute.options, **shared.options}, notes=notes)


def _switches(section: Section) -> dict[str, Value]:
    """Return the options of switches. The launcher gives each a value, so without the key it is off."""
    out: dict[str, Value] = {}
    key = PREFIX + "sequence_parallelism"
    sliced = section.flag(key)
    tp = section.whole(PREFIX + "tp_degree", 1, 10**6) or 1  # validate_args of Megatron-LM switches it off with tp 1
    out["sequence_parallel"] = (section.default if sliced is None else section.value)(key, bool(sliced) and tp > 1)
    key = PREFIX + "use_distributed_optimizer"
    sharded = section.flag(key)
    out["zero"] = (section.default if sharded is None else section.value)(key, int(bool(sharded)))
    key = PREFIX + "gradient_clipping"
    clipping = section.number(key)
    say = section.default if clipping is None else section.value
    out["clip_grad_norm"] = say(key, clipping is None or clipping > 0)
    if section.flag(PREFIX + "optimizer_cpu_offload"):
        out["offload_optimizer"] = section.value(PREFIX + "optimizer_cpu_offload", "cpu")
    last = section.whole(PREFIX + "decoder_last_pipeline_num_layers", 1, 10**6)
    if last is not None:
        out["last_stage_layers"] = section.value(PREFIX + "decoder_last_pipeline_num_layers", last)
    return out


def _recomputed(section: Section) -> Found:
    """Return the recomputation. accelerate 1.15 recomputes all layers unless it is told to recompute attention, and
    does not hand recompute_activations on."""
    key = PREFIX + "recompute_granularity"
    granularity = section.choice(key, ("full", "selective"))
    method = section.choice(PREFIX + "recompute_method", ("uniform", "block"))
    layers = section.whole(PREFIX + "recompute_num_layers", 1, 10**6)
    selects = section.flag(PREFIX + "recompute_activations")
    notes: list[str] = []
    if granularity is None:
        older = "selective" if selects else "none"
        why = f"{section.path}{key} is not given: accelerate 1.15 takes full"
        notes.append(f"{why}, and so it is estimated (--recompute {older} for older versions).")
        options = {"recompute": section.default(key, "full")}
    else:
        options = {"recompute": section.value(key, granularity)}
    if granularity != "selective":
        if method == "block":
            options["recompute_layers"] = section.value(PREFIX + "recompute_num_layers", layers or 1)
        elif layers is not None and layers > 1:
            name = f"{section.path}{PREFIX}recompute_num_layers {layers}"
            notes.append(f"{name}: each layer is estimated as recomputed by itself, not {layers} together.")
    return Found(options, notes=tuple(notes))


def _shared(section: Section, degrees: dict[str, Value], processes: Processes) -> Found:
    """Return the context parallel degree: accelerate 1.15 takes 2 if none is given, which few files mean. Processes
    that are not divisible by it cannot run so, and older versions took 1."""
    key = PREFIX + "context_parallel_size"
    given = section.whole(key, 1, 10**6)
    if given is not None:
        return Found({"cp": section.value(key, given)})
    product = DEFAULT_CP
    for name in ("tp", "pp"):
        product *= degrees[name].value if name in degrees else 1
    name = f"{section.path}{key} is not given"
    if processes.total is not None and processes.total % product:
        note = f"{name}: accelerate 1.15 takes {DEFAULT_CP}, which {processes.total} processes cannot have; 1 is estimated."
        return Found({}, notes=(note,))
    note = f"{name}: accelerate 1.15 takes {DEFAULT_CP}, and so it is estimated (--cp 1 for older versions)."
    return Found({"cp": section.default(key, DEFAULT_CP)}, notes=(note,))


def _notes(section: Section) -> Iterable[str]:
    for name in ("attention_dropout", "hidden_dropout"):
        rate = section.number(PREFIX + name)
        if rate:
            yield f"{section.path}{PREFIX}{name} {rate:g}: its masks are not estimated."
    if section.flag(PREFIX + "use_precision_aware_optimizer"):
        yield f"{section.path}{PREFIX}use_precision_aware_optimizer true: Megatron's own optimizer is estimated."
