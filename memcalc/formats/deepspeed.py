"""DeepSpeed's JSON.

Source: deepspeed/runtime/config.py, runtime/zero/config.py, runtime/zero/offload_config.py, runtime/precision_config.py
(0.19.8). "auto" is what transformers' Trainer makes of it (transformers/integrations/deepspeed.py, 5.23).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple

from memcalc.errors import InputError, one_line
from memcalc.formats.deepspeed_files import notes_on_files, sizes_of_files, threads_of_files
from memcalc.formats.deepspeed_names import (
    CHECKPOINTING,
    IGNORED,
    NOT_MODELLED,
    OFFLOAD_KEYS,
    PRECISION_KEYS,
    REMOVED,
    SECTIONS,
    ZERO_IGNORED,
    ZERO_KEYS,
)
from memcalc.formats.deepspeed_optimizer import read_optimizer
from memcalc.formats.found import ACCUMULATION, Found, Value
from memcalc.formats.section import AUTO, Section

_SIZES: Final = {
    "reduce_bucket_size": "reduce_bucket_size",
    "stage3_prefetch_bucket_size": "prefetch_bucket_size",
    "stage3_param_persistence_threshold": "param_persistence_threshold",
    "stage3_max_live_parameters": "max_live_parameters",
    "stage3_max_reuse_distance": "max_reuse_distance",
    "sub_group_size": "sub_group_size",
}
"""A key of zero_optimization -> the option that has its elements."""
_GONE: Final = "DeepSpeed 0.19 has it no more, and refuses the key"
_OF_STAGES: Final = {"reduce_bucket_size": (1, 2, 3)}
"""The stages that use a size; the others are stage 3's."""


class Others(NamedTuple):
    """The other options and files, from which "auto" is filled."""

    hidden_size: Callable[[str], int]
    """Returns the model's hidden size; takes the place of the key that asks, for the refusal if there is none."""
    half: str | None = "bf16"
    """The 16-bit dtype of mixed precision that the other options ask for: bf16, fp16; None: fp32."""
    is_launched: bool = False
    """True if the Trainer's arguments or accelerate's file stand beside: accelerate then puts in the section of its dtype
    where the file has none (DeepSpeedPlugin.set_mixed_precision)."""
    stage: int | None = None
    """The ZeRO stage that replaces the file's: the file's sizes and places are then those of that stage. None: its own."""


def read(file: str, content: Mapping[str, Any], others: Others) -> Found:
    """Return what a DeepSpeed configuration says. Raises InputError."""
    top = Section("--deepspeed", file, content)
    zero = _zero_section(top)
    options: dict[str, Value] = {"engine": Value("deepspeed", f"{file or '--deepspeed'}")}
    options |= _zero(zero)
    stage: int = options["zero"].value if others.stage is None else others.stage
    options |= _sizes(zero, stage, others)
    options |= _offload(zero, stage)
    options |= threads_of_files(top, options)
    options |= _precision(top, others)
    options |= _batches(top)
    options |= _clipping(top)
    options |= read_optimizer(top, offloads=_offloads(options))
    options |= _parallel(top)
    options |= _overlap(zero, stage)
    options |= _plus_plus(zero, stage)
    notes = (*_zero_notes(top, zero, stage, offloads=_offloads(options)), *_notes(top))
    zero.ignore(*ZERO_IGNORED)
    zero.refuse_unknown(ZERO_KEYS)
    top.ignore(*IGNORED, *SECTIONS)
    return Found(options, notes=(*notes, *_unread(top)))


def _zero_section(top: Section) -> Section:
    """Return zero_optimization; the deprecated form `true` is stage 1. Of an "auto" that nobody fills DeepSpeed drops the key
    (DeepSpeedConfigModel)."""
    old = top.raw("zero_optimization")
    if isinstance(old, bool):
        stage = {"stage": 1 if old else 0}
        return Section(top.option, top.file, stage, "zero_optimization.")
    content = _without_auto(top.section("zero_optimization").content)
    for key in ("offload_optimizer", "offload_param"):
        if isinstance(content.get(key), Mapping):
            content[key] = _without_auto(content[key])
    return Section(top.option, top.file, content, "zero_optimization.")


def _without_auto(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return a section without keys that are "auto", but for those that the Trainer may fill."""
    filled = ("stage", *_SIZES, *_SIZES.values())
    return {key: value for key, value in content.items() if value != AUTO or key in filled}


def _zero(zero: Section) -> dict[str, Value]:
    stage = zero.whole("stage", 0, 3)
    return {"zero": zero.default("stage", 0) if stage is None else zero.value("stage", stage)}


def _sizes(zero: Section, stage: int, others: Others) -> dict[str, Value]:
    """Return the sizes of buckets and thresholds that the stage uses."""
    out: dict[str, Value] = {}
    for key, option in _SIZES.items():
        least = 1 if key == "reduce_bucket_size" else 0
        name = zero.first(key, option)  # pydantic takes the name of the field, too
        if zero.is_auto(name):
            filled = _filled(key, zero.where(name), others) if stage in _OF_STAGES.get(key, (3,)) else None
            if filled is not None:
                out[option] = Value(filled, f'{zero.where(name)} "auto"')
            continue
        value = zero.whole(name, least)
        value = 1 if value == 0 and key == "sub_group_size" else value  # each parameter is a group of its own
        if value is not None and stage in _OF_STAGES.get(key, (3,)):
            out[option] = zero.value(name, value)
    return out


def _filled(key: str, where: str, others: Others) -> int | None:
    """Return what the Trainer fills in; None for DeepSpeed's default, which an "auto" that nobody fills is."""
    if key not in ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold"):
        return None
    hidden = others.hidden_size(where)
    if key == "reduce_bucket_size":
        return hidden * hidden
    return int(0.9 * hidden * hidden) if key == "stage3_prefetch_bucket_size" else 10 * hidden


def _offload(zero: Section, stage: int) -> dict[str, Value]:
    """Return where the optimizer and the weights are kept; the old keys are switches. DeepSpeed reads them from the stage on
    that shards what they move."""
    out: dict[str, Value] = {}
    for key, old, option, least in (
        ("offload_optimizer", "cpu_offload", "offload_optimizer", 1),
        ("offload_param", "cpu_offload_param", "offload_params", 3),
    ):
        section = zero.section(key)
        device = section.choice("device", ("none", "cpu", "nvme"))
        section.refuse_unknown(OFFLOAD_KEYS)
        is_old = zero.flag(zero.first(old, f"{old}s"))  # an older plural
        if stage >= least and device is not None:
            of_stage = "cpu" if device == "nvme" and stage < 3 else device  # stages 1 and 2 have no files
            out[option] = section.value("device", of_stage)
            if of_stage == "nvme":
                out |= sizes_of_files(key, section)
        elif stage >= least and is_old:
            out[option] = zero.value(zero.first(old, f"{old}s"), "cpu")
    zero.ignore("cpu_offload_use_pin_memory")
    return out


def _overlap(zero: Section, stage: int) -> dict[str, Value]:
    """Return the switch of ZeRO-2's second bucket."""
    overlaps = None if zero.is_auto("overlap_comm") or stage != 2 else zero.flag("overlap_comm")
    return {} if overlaps is None else {"overlap_comm": zero.value("overlap_comm", overlaps)}


def _plus_plus(zero: Section, stage: int) -> dict[str, Value]:
    """Return the parts of ZeRO++ that are on; stages below 3 have none."""
    ranks = zero.whole("zero_hpz_partition_size", 0, 10**6)
    switches = {key: zero.flag(key) for key in ("zero_quantized_weights", "zero_quantized_gradients")}
    if stage < 3:
        return {}
    out = {key: zero.value(key, True) for key, is_on in switches.items() if is_on}
    if ranks is not None and ranks > 1:
        out["zero_hpz_partition_size"] = zero.value("zero_hpz_partition_size", ranks)
    return out


def _precision(top: Section, others: Others) -> dict[str, Value]:
    """Return the precision and the dtype of gradients. Both switches at once are refused, as DeepSpeed refuses them."""
    on: dict[str, str] = {}
    for name, key in (("fp16", "fp16"), ("bf16", top.first("bf16", "bfloat16"))):
        section = top.section(key)
        if section.is_auto("enabled"):
            if others.half == name:
                on[name] = f'{section.where("enabled")} "auto"'
        elif section.flag("enabled"):
            on[name] = section.where("enabled")
        section.refuse_unknown(PRECISION_KEYS)
        masters = f"{name}_master_weights_and_grads"
        if section.flag(masters):
            section.refuse(masters, "16-bit master weights are not modelled; allowed: false")
    if len(on) > 1:
        top.section("fp16").refuse("enabled", "bf16 is enabled too; allowed: one of them")
    out: dict[str, Value] = {}
    if not on and others.is_launched and others.half and not {"fp16", "bf16", "bfloat16"} & top.content.keys():
        on[others.half] = f"{top.where('bf16')}: missing, so accelerate's"
    if on:
        ((name, where),) = on.items()
        out["precision"] = Value(f"{name}-mixed", where)
    else:
        out["precision"] = Value("fp32", f"{top.where('bf16.enabled')}, {top.path}fp16.enabled: off")
    dtypes = top.section("data_types")
    gradients = dtypes.choice("grad_accum_dtype", ("fp32", "bf16", "fp16"))
    if gradients is not None:
        out["grad_dtype"] = dtypes.value("grad_accum_dtype", gradients)
    return out


def _batches(top: Section) -> dict[str, Value]:
    """Return the batch sizes that are numbers; "auto" is left to the other options."""
    out: dict[str, Value] = {}
    for key, option in (
        ("train_micro_batch_size_per_gpu", "micro_batch_size"),
        ("gradient_accumulation_steps", ACCUMULATION),
        ("train_batch_size", "global_batch_size"),
    ):
        if not top.is_auto(key):
            value = top.whole(key, 1, 10**10)
            if value is not None:
                out[option] = top.value(key, value)
        top.ignore(key)
    return out


def _clipping(top: Section) -> dict[str, Value]:
    """Return whether gradients are clipped: by default DeepSpeed does, at a norm of 1."""
    if top.is_auto("gradient_clipping"):
        top.ignore("gradient_clipping")
        return {"clip_grad_norm": Value(True, f'{top.where("gradient_clipping")} "auto"', is_given=False)}
    most = top.number("gradient_clipping")
    if most is None:  # the engine clips by its own default, whatever the Trainer's arguments say
        return {"clip_grad_norm": Value(True, f"{top.where('gradient_clipping')}, its default")}
    return {"clip_grad_norm": top.value("gradient_clipping", most > 0)}


def _parallel(top: Section) -> dict[str, Value]:
    """Return the ranks that share a sequence (Ulysses), those that share experts (AutoEP), and linear layers (AutoTP)."""
    out: dict[str, Value] = {}
    ranks = top.whole("sequence_parallel_size", 1, 10**6)
    if ranks is not None and ranks > 1:
        out["cp"] = top.value("sequence_parallel_size", ranks)
    experts = top.section("expert_parallel")
    if experts.flag("enabled"):
        for key, option in (("autoep_size", "ep"), ("expert_tensor_parallel_size", "etp")):
            degree = experts.whole(key, 1, 10**6)
            if degree is not None and degree > 1:
                out[option] = experts.value(key, degree)
    tensor = top.section("tensor_parallel")
    slices = tensor.whole("autotp_size", 0, 10**6)
    if slices is not None and slices > 1:
        out["tp"] = tensor.value("autotp_size", slices)
        out["autotp"] = tensor.value("autotp_size", True)
    return out


# --- what is not modelled


def _zero_notes(top: Section, zero: Section, stage: int, *, offloads: bool) -> Iterator[str]:
    """Yield a note for each key of zero_optimization that changes memory or communication and is not modelled. Refuse
    what an estimate would be wrong without."""
    mics = zero.number("mics_shard_size")
    if mics is not None and mics > 0 and stage == 3:
        others = "-1, zero_hpz_partition_size, or --engine fsdp2 with --shard-group, which shards and replicates so"
        zero.refuse("mics_shard_size", f"DeepSpeed 0.19 has no MiCS any more and refuses the key; allowed: {others}")
    for key in ("mics_shard_size", "mics_hierarchical_params_gather"):
        if key in zero:
            yield f"{zero.where(key)}: is off; DeepSpeed 0.19, which has no MiCS any more, refuses the key itself"
    if zero.flag("zero_quantized_nontrainable_weights") and stage == 3:
        zero.refuse(
            "zero_quantized_nontrainable_weights",
            "frozen weights that are kept as codes are not modelled; allowed: false",
        )
    if "zenflow" in zero:
        zero.refuse("zenflow", "is not modelled; allowed: without it")
    overlap = None if zero.is_auto("overlap_comm") else zero.flag("overlap_comm")
    if overlap and stage == 1:
        yield f"{zero.where('overlap_comm')} true: is not modelled with stage 1, which is estimated with it off"
    elif overlap and stage == 2:
        yield f"{zero.where('overlap_comm')} true: its two buckets are counted; in the time of a step nothing is hidden"
    if overlap is False and stage == 3:
        yield f"{zero.where('overlap_comm')} false: is not modelled; stage 3 is estimated with it on"
    for key, used in (("contiguous_gradients", (1, 2)), ("reduce_scatter", (1, 2)), ("memory_efficient_linear", (3,))):
        if not zero.is_auto(key) and zero.flag(key) is False and stage in used:
            yield f"{zero.where(key)} false: is not modelled; it is estimated as true"
    if zero.flag("round_robin_gradients") and stage in (1, 2):
        yield f"{zero.where('round_robin_gradients')} true: is not modelled; partitions are of neighbouring parameters"
    if offloads and top.section("optimizer").section("params").flag("torch_adam"):
        where = top.where("optimizer.params.torch_adam")
        yield f"{where} true: on the host DeepSpeed's own Adam is estimated; torch's has the same states"
    if offloads and "optimizer" not in top and top.flag("zero_force_ds_cpu_optimizer") is False:
        yield f"{top.where('zero_force_ds_cpu_optimizer')} false: DeepSpeed's own Adam is estimated on the host all the same"
    for key, default, used in NOT_MODELLED:
        value = zero.raw(key)
        if stage in used and value not in (None, "auto", default):
            yield f"{zero.where(key)} {one_line(value)}: is not modelled; it is estimated as {str(default).lower()}"
    for key in ("offload_optimizer", "offload_param"):
        section = zero.section(key)
        if section.content.get("device") in ("cpu", "nvme") and section.flag("pin_memory") is False:
            yield f"{section.where('pin_memory')} false: is not modelled; the host's buffers are counted as pinned"
        ratio = section.number("ratio")
        if ratio is not None and ratio < 1 and section.content.get("device") in ("cpu", "nvme"):
            section.refuse("ratio", "a part of the states on the GPU (twin flow) is not modelled; allowed: 1.0")
        if section.content.get("device") == "nvme":
            yield from notes_on_files(section, stage)
        if section.flag("super_offload"):
            section.refuse("super_offload", "is not modelled; allowed: false")


def _offloads(options: Mapping[str, Value]) -> bool:
    """Tell whether the host has the optimizer."""
    return "offload_optimizer" in options and options["offload_optimizer"].value != "none"


def _notes(top: Section) -> Iterator[str]:
    """Yield a note for each other key that is not modelled."""
    checkpointing = top.section("activation_checkpointing")
    for key in CHECKPOINTING:
        if checkpointing.flag(key):
            yield (
                f"{checkpointing.where(key)} true: only deepspeed.checkpointing reads it, which transformers' models do not "
                "call; not modelled"
            )
    if top.section("amp").flag("enabled"):
        top.section("amp").refuse("enabled", "Apex's amp is not modelled; allowed: false, with fp16 or bf16")
    if top.section("torch_autocast").flag("enabled"):
        top.section("torch_autocast").refuse("enabled", "is not modelled with DeepSpeed; allowed: false")
    yield from _notes_of_experts(top.section("expert_parallel"))
    backend = top.section("optimizer").section("params").text("comm_backend_name")
    if backend not in (None, "nccl"):
        where = top.where("optimizer.params.comm_backend_name")
        yield f"{where} {one_line(backend)}: signs are counted as sent by NCCL, without buffers of the host"
    if top.section("flops_profiler").flag("enabled"):
        yield f"{top.where('flops_profiler.enabled')} true: the profiled step keeps more and is slower; not modelled"
    if top.section("compile").flag("deepcompile"):
        yield f"{top.where('compile.deepcompile')} true: compilation is not modelled; the step is estimated without it"
    for key in ("curriculum_learning", "data_efficiency"):
        if top.section(key).flag("enabled"):
            yield f"{top.where(key)}.enabled true: lengths that change are not modelled; all sequences have --seq-len"
    if top.section("elasticity").flag("enabled"):
        yield f"{top.where('elasticity')}.enabled true: the batch that it chooses is not modelled; give --global-batch-size"
    if top.section("compression_training").content:
        yield f"{top.where('compression_training')}: is not modelled; {_GONE}"
    for key in REMOVED:
        if top.section(key).flag("enabled"):
            yield f"{top.where(key)}.enabled true: is not modelled; {_GONE}"
    if "sparse_attention" in top:
        top.refuse("sparse_attention", "is not modelled; allowed: without it")
    kind = top.text("communication_data_type")
    if kind is not None:
        yield f"{top.where('communication_data_type')} {kind}: is not modelled; gradients are sent in their own dtype"
    if top.flag("sparse_gradients"):
        yield f"{top.where('sparse_gradients')} true: is not modelled; gradients of embeddings are dense"


def _notes_of_experts(experts: Section) -> Iterator[str]:
    """Yield a note for each way of AutoEP's that is not the one by default (module_inject/auto_ep_config.py)."""
    if not experts.flag("enabled"):
        return
    for key, default in (("use_grouped_mm", True), ("disable_triton_grouped_mm", False)):
        if experts.flag(key) not in (None, default):
            yield f"{experts.where(key)} {str(not default).lower()}: is not modelled; AutoEP's grouped product is estimated"
    backend = experts.text("comm_backend")
    if backend not in (None, "comm"):
        yield f"{experts.where('comm_backend')} {one_line(backend)}: is not modelled; torch's all-to-all is estimated"


def _unread(top: Section) -> Iterator[str]:
    """Yield a note for keys that DeepSpeed does not know, and ignores without a word."""
    unread = top.left()
    if unread and len(unread) == len(top.content):
        raise InputError(f"{top.option} {top.file}: has no key that DeepSpeed knows; expected its JSON")
    if unread:
        yield f"{top.file or top.option}: DeepSpeed does not know and ignores {', '.join(unread[:6])}"
