"""FSDP in an accelerate configuration, versions 1 and 2.

Source: FullyShardedDataParallelPlugin of accelerate/utils/dataclasses.py, prepare_multi_gpu_env of utils/launch.py,
fsdp2_prepare_model of utils/fsdp_utils.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from memcalc.errors import one_line
from memcalc.formats.accelerate_parallelism import Sizes
from memcalc.formats.accelerate_precision import Mixed, in_autocast, in_shards
from memcalc.formats.accelerate_processes import Processes
from memcalc.formats.accelerate_sections import unread
from memcalc.formats.found import Found, Value
from memcalc.formats.fsdp1_together import fsdp1_of
from memcalc.formats.section import Section

STRATEGIES: Final = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
"""FSDP_SHARDING_STRATEGY of accelerate/utils/constants.py; a number from 1 to 5 is a place in it."""
POLICIES: Final = ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")
_STAGES: Final = {"FULL_SHARD": 3, "SHARD_GRAD_OP": 2, "HYBRID_SHARD": 3, "HYBRID_SHARD_ZERO2": 2}
_HYBRID: Final = ("HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
_LAYERS: Final = "fsdp_transformer_layer_cls_to_wrap"
_IGNORED: Final = (
    "fsdp_auto_wrap_policy", "fsdp_backward_prefetch", "fsdp_backward_prefetch_policy",
    "fsdp_cpu_ram_efficient_loading", "fsdp_forward_prefetch", "fsdp_limit_all_gathers", "fsdp_min_num_params",
    "fsdp_reshard_after_forward", "fsdp_state_dict_type", "fsdp_sync_module_states",
    "fsdp_transformer_layer_cls_to_wrap", "fsdp_use_orig_params",
)  # fmt: skip
"""Keys that say nothing, or nothing in one of the versions."""
_FLAGS: Final = ("fsdp_offload_params", "fsdp_activation_checkpointing", "fsdp_activation_checkpointing_offload")


def read_fsdp(given: Section, mixed: Mixed, processes: Processes, sizes: Sizes | None) -> Found:
    """Return what an fsdp_config says. Raises InputError for what the plugin refuses."""
    section = _prefixed(given)
    version = section.whole("fsdp_version", 1, 2) or 1
    _check_axes(section, sizes, version)
    for key in _FLAGS:
        section.flag(key)
    parts = _version_1(section, mixed, processes) if version == 1 else _version_2(section, mixed)
    options = {**parts.options, **_offloaded(section), **_recomputed(section, version)}
    units = () if "engine" in options else _wrap_notes(section)
    notes = (*parts.notes, *_notes(section), *units, *unread(section, _IGNORED))
    return Found(options, notes=notes)


def version_of(given: Section) -> int:
    """Return the version of FSDP that an fsdp_config asks for."""
    return _prefixed(given).whole("fsdp_version", 1, 2) or 1


def _prefixed(given: Section) -> Section:
    """Return the section with the names that accelerate gives its keys: "version" is fsdp_version, and of two spellings
    the last counts. A path in a message has the full name."""
    content: dict[str, Any] = {}
    for key, value in given.content.items():
        name = str(key)
        content[name if name.startswith("fsdp") else f"fsdp_{name}"] = value
    return Section(given.option, given.file, content, given.path)


def _check_axes(section: Section, sizes: Sizes | None, version: int) -> None:
    """Raise InputError for a parallelism_config that FSDP does not take (ParallelismConfig._validate_accelerator).
    Degrees of one are as good as none."""
    if sizes is None or sizes.total == 1:
        return
    if version == 1:
        section.refuse("fsdp_version", "a parallelism_config needs version 2; allowed: 2")
    if sizes.shards == 1 and sizes.cp == 1:
        key = "parallelism_config_dp_shard_size"
        sizes.section.refuse(key, "FSDP has no ranks to shard over; allowed: 2 or more, or cp_size 2 or more")


def _version_1(section: Section, mixed: Mixed, processes: Processes) -> Found:
    """Return the sharding of FSDP1. Its strategy has a default, so fsdp_reshard_after_forward is never asked."""
    key = "fsdp_sharding_strategy"
    strategy = _strategy(section)
    say = section.value if key in section else section.default
    if strategy == "NO_SHARD":
        precision = in_autocast(mixed)
        whole = f"{section.path}{key} NO_SHARD: whole replicas, estimated as DDP."
        return Found({"engine": say(key, "ddp"), **precision.options}, notes=(whole, *precision.notes))
    precision = in_shards(mixed)
    options: dict[str, Value] = {
        "zero": say(key, _STAGES[strategy]),
        **precision.options,
        **fsdp1_of(section, "fsdp_"),
    }
    notes = list(precision.notes)
    if strategy in _HYBRID:
        if processes.per_machine is None:
            notes.append(f"{section.path}{key} {strategy}: one group of shards is estimated without num_processes.")
        else:
            options["shard_group"] = section.value(key, processes.per_machine)
    if str(section.raw("fsdp_reshard_after_forward")).upper() not in ("NONE", strategy):
        notes.append(f"{section.path}fsdp_reshard_after_forward is not used: version 1 takes {key} {strategy}.")
    return Found(options, notes=tuple(notes))


def _strategy(section: Section) -> str:
    """Return the sharding strategy by its name. Numbers count from 1."""
    key = "fsdp_sharding_strategy"
    value = section.raw(key)
    if value is None:
        return "FULL_SHARD"
    word = "" if isinstance(value, bool) else str(value).strip().upper().removeprefix("_")
    if word in tuple(str(place) for place in range(1, 1 + len(STRATEGIES))):
        return STRATEGIES[int(word) - 1]
    if word not in STRATEGIES:
        section.refuse(key, f"allowed: {', '.join(STRATEGIES)}, or 1 to {len(STRATEGIES)}")
    return word


def _version_2(section: Section, mixed: Mixed) -> Found:
    """Return the sharding of FSDP2, which asks for no strategy."""
    key = "fsdp_reshard_after_forward"
    reshards = section.flag(key)
    stage = section.default(key, 3) if reshards is None else section.value(key, 3 if reshards else 2)
    precision = in_shards(mixed)
    notes = list(precision.notes)
    if "fsdp_sharding_strategy" in section:
        notes.append(f"{section.path}fsdp_sharding_strategy is not used: version 2 takes {key}.")
    section.ignore("fsdp_sharding_strategy")
    return Found({"zero": stage, **precision.options}, notes=tuple(notes))


def _offloaded(section: Section) -> dict[str, Value]:
    """Return where shards are between their uses: with offload the host has gradients and states too."""
    if not section.flag("fsdp_offload_params"):
        return {}
    cpu = section.value("fsdp_offload_params", "cpu")
    return {"offload_params": cpu, "offload_optimizer": cpu}


def _recomputed(section: Section, version: int) -> dict[str, Value]:
    """Return the recomputation of wrapped layers. Raises InputError for offload without it."""
    key = "fsdp_activation_checkpointing"
    if section.flag(f"{key}_offload"):
        if not section.flag(key):
            section.refuse(f"{key}_offload", f"needs {key}; allowed: false")
        if version == 1:
            section.refuse(f"{key}_offload", "needs fsdp_version 2; allowed: false")
    return {"recompute": section.value(key, "full")} if section.flag(key) else {}


def _notes(section: Section) -> Iterable[str]:
    path = section.path
    if section.flag("fsdp_activation_checkpointing_offload"):
        yield f"{path}fsdp_activation_checkpointing_offload true: the inputs of layers are estimated on the GPU."
    if section.raw("fsdp_ignored_modules") is not None:
        yield f"{path}fsdp_ignored_modules {one_line(section.raw('fsdp_ignored_modules'))}: estimated as sharded."


def _wrap_notes(section: Section) -> Iterable[str]:
    """Tell of units that are not the layers, which memcalc's are."""
    key = "fsdp_auto_wrap_policy"
    policy = section.choice(key, POLICIES)
    classes, least = section.raw(_LAYERS), section.raw("fsdp_min_num_params")
    if policy is None or policy == "NO_WRAP":
        shown = "is not given, so NO_WRAP" if policy is None else "NO_WRAP"
        yield f"{section.path}{key} {shown}: the whole model is gathered at once; units of one layer are estimated."
    elif policy == "SIZE_BASED_WRAP":
        size = "" if least is None else f" of {one_line(least)} parameters"
        yield f"{section.path}{key} SIZE_BASED_WRAP{size}: units of one layer are estimated."
    elif classes is not None and not all(_is_layer(name) for name in _names(classes)):
        yield f"{section.path}{_LAYERS} {one_line(classes)}: units of one layer are estimated."


def _names(classes: object) -> list[str]:
    return [one.strip(" '\"[]") for one in str(classes).split(",")]


def _is_layer(name: str) -> bool:
    """Tell whether a class sounds like a whole layer: LlamaDecoderLayer, GPT2Block, not MixtralSparseMoeBlock."""
    return name.endswith(("Layer", "Block")) and "Sparse" not in name and not name.endswith(("MoeBlock", "MLPBlock"))
