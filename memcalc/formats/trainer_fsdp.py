"""FSDP in TrainingArguments: the keys `fsdp` and `fsdp_config`, which LLaMA-Factory and axolotl have too.

Source: transformers/training_args.py (_process_fsdp_args, _apply_legacy_fsdp_to_config); accelerate/utils/constants.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, cast

from memcalc.formats.fsdp1_together import fsdp1_of
from memcalc.formats.section import Section
from memcalc.formats.trainer_findings import Findings, is_on, mapping

_STAGES: Final = {"full_shard": 3, "shard_grad_op": 2, "hybrid_shard": 3, "hybrid_shard_zero2": 2}
_BY_NUMBER: Final = {
    "1": "full_shard",
    "2": "shard_grad_op",
    "3": "no_shard",
    "4": "hybrid_shard",
    "5": "hybrid_shard_zero2",
}
_STRATEGIES: Final = (*_STAGES, "no_shard")
_OTHERS: Final = ("offload", "auto_wrap")
_NODE: Final = 8
"""The GPUs of a node, which hybrid sharding shards over. A file does not say them."""


def read_fsdp(
    found: Findings, *, default_version: int = 2, needs_switch: bool = True, offload_params: bool = False
) -> bool:
    """Set the engine, the stage and offload by `fsdp` and `fsdp_config`. Tell whether there is FSDP.

    `needs_switch`: `fsdp_config` alone switches nothing on. `offload_params`: the tool reads that key too.
    """
    section = found.section
    items = _items(section)
    config = _config(found)
    if not items and (needs_switch or not config.content):
        return False
    where = "fsdp" if items else "fsdp_config"
    version = config.whole("version", 1, 2) or default_version
    strategy = _strategy(config) or next((item for item in items if item in _STRATEGIES), "full_shard")
    if strategy == "no_shard":
        found.give("engine", where, "ddp")
        found.note(where, "FSDP without shards is counted as DistributedDataParallel")
        return False
    found.give("engine", where, "fsdp1" if version == 1 else "fsdp2")
    if version == 1:
        found.options |= fsdp1_of(config, "")
    found.give("zero", where, _STAGES[strategy])
    if strategy.startswith("hybrid"):
        found.assume("shard_group", where, _NODE)
        found.note(where, f"hybrid sharding is over nodes, which are taken to have {_NODE} GPUs")
    _read_offload(found, items, config, offload_params=offload_params)
    _read_rest(found, config)
    return True


def _items(section: Section) -> tuple[str, ...]:
    """Return the words of `fsdp`; "true" for a switch that is on."""
    if not is_on(section, "fsdp"):
        return ()
    value = section.raw("fsdp")
    if value is True:
        return ("true",)
    words = value.replace(",", " ").split() if isinstance(value, str) else value
    if not isinstance(words, list):
        section.refuse("fsdp", f"allowed: true, {', '.join((*_STRATEGIES, *_OTHERS))}")
    items = tuple(str(word).strip().lower() for word in cast("list[object]", words))
    for item in items:
        if item not in (*_STRATEGIES, *_OTHERS, "true"):
            section.refuse("fsdp", f"allowed: true, {', '.join((*_STRATEGIES, *_OTHERS))}")
    return items


def _config(found: Findings) -> Section:
    """Return `fsdp_config` without the prefixes of its keys; empty for the path of a file, which is noted."""
    section, key = found.section, "fsdp_config"
    value = section.raw(key)
    if isinstance(value, str) and value.strip() and not value.lstrip().startswith("{"):
        found.note(key, "this file is not read; transformers' defaults are assumed")
        return Section(section.option, section.file, {}, f"{section.path}{key}.")
    if value in ("", [], False):
        return Section(section.option, section.file, {}, f"{section.path}{key}.")
    given = mapping(section, key).content
    plain: dict[str, Any] = {str(one).removeprefix("fsdp_"): given[one] for one in given}
    return Section(section.option, section.file, plain, f"{section.path}{key}.")


def _strategy(config: Section) -> str | None:
    """Return the sharding that `fsdp_config` asks for: a strategy, FSDP 1's number of one, or reshard_after_forward."""
    for key in ("sharding_strategy", "reshard_after_forward"):
        value = config.raw(key)
        if value is None:
            continue
        word = str(value).strip().lower()
        word = _BY_NUMBER.get(word, word) if key == "sharding_strategy" else word
        if word in _STRATEGIES:
            return word
        if key == "sharding_strategy":
            config.refuse(key, f"allowed: {', '.join(_STRATEGIES)}, 1 to 5")
        return "full_shard" if config.flag(key) else "shard_grad_op"
    return None


def _read_offload(found: Findings, items: tuple[str, ...], config: Section, *, offload_params: bool) -> None:
    if "offload" in items:
        found.give("offload_params", "fsdp", "cpu")
    keys = ("cpu_offload", "offload_params") if offload_params else ("cpu_offload",)
    for key in keys:
        if config.flag(key):
            found.options["offload_params"] = config.value(key, "cpu")
    if not offload_params and config.flag("offload_params"):
        found.notes.append(
            f"{config.where('offload_params')}: TrainingArguments reads cpu_offload alone: nothing is offloaded"
        )


def _read_rest(found: Findings, config: Section) -> None:
    if config.flag("xla"):
        config.refuse("xla", "allowed: false (XLA is not modelled)")
    if config.flag("activation_checkpointing"):
        found.options["recompute"] = config.value("activation_checkpointing", "full")
    policy = config.text("auto_wrap_policy")
    if policy is not None and policy.upper() != "TRANSFORMER_BASED_WRAP":
        found.notes.append(f"{config.where('auto_wrap_policy')} {policy}: each layer is taken to be a unit")


def has_fsdp(content: Mapping[str, Any]) -> bool:
    """Tell whether a file has keys of FSDP at all."""
    return content.get("fsdp") is not None or content.get("fsdp_config") is not None
