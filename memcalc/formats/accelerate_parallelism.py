"""The parallelism_config of an accelerate configuration: replicas, shards, tensor parallel ranks, shared sequences.

Source: accelerate/parallelism_config.py, prepare_extend_env_parallelism_config of utils/launch.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

from memcalc.formats.accelerate_processes import Processes
from memcalc.formats.accelerate_sections import unread
from memcalc.formats.found import Found, Value
from memcalc.formats.section import Section
from memcalc.formats.trainer_kernels import VERSIONS

PREFIX: Final = "parallelism_config_"
_SIZES: Final = ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "sp_size")
_RINGS: Final = {"allgather": "all_gather", "alltoall": "p2p"}
"""torch's rotation of keys and values, in memcalc's words: its alltoall sends all to one neighbour."""
_ATTENTIONS: Final = ("sdpa", *VERSIONS)
_NEEDS_FSDP: Final = "needs distributed_type FSDP with fsdp_version 2; allowed: 1"
_OF_AXES: Final = tuple(
    PREFIX + name
    for name in ("cp_comm_strategy", "sp_seq_length", "sp_seq_length_is_variable", "sp_attn_implementation")
)
"""The keys that are read only if their axis is used."""


class Sizes(NamedTuple):
    """The degrees of a parallelism_config, and the section itself."""

    replicas: int
    shards: int
    tp: int
    cp: int
    sp: int
    section: Section

    @property
    def total(self) -> int:
        """Return the processes that the degrees make."""
        return self.replicas * self.shards * self.tp * self.cp * self.sp

    @property
    def first_key(self) -> str:
        """Return the key of the first degree above 1."""
        degrees = (self.replicas, self.shards, self.tp, self.cp, self.sp)
        return next(PREFIX + name for name, degree in zip(_SIZES, degrees, strict=True) if degree > 1)


class Parallelism(NamedTuple):
    """The degrees, and the options that they mean."""

    sizes: Sizes | None
    """None without a parallelism_config."""
    found: Found


def read_parallelism(section: Section, kind: str, processes: Processes) -> Parallelism:
    """Return what a parallelism_config says. Raises InputError for degrees that accelerate refuses."""
    if not section.content:
        return Parallelism(None, Found({}))
    sizes = _sizes(section)
    for name in ("cp_backend", "sp_backend"):
        section.choice(f"{PREFIX}{name}", ("torch",) if name == "cp_backend" else ("deepspeed",))
    _check_together(sizes)
    _check_kind(sizes, kind)
    _check_total(sizes, kind, processes)
    return Parallelism(sizes, Found(_options(sizes, kind, processes), notes=tuple(_notes(sizes, kind))))


def _sizes(section: Section) -> Sizes:
    replicas, shards, tp, cp, sp = (section.whole(f"{PREFIX}{name}", 1, 10**6) or 1 for name in _SIZES)
    return Sizes(replicas, shards, tp, cp, sp, section)


def _check_together(sizes: Sizes) -> None:
    """Raise InputError for degrees that exclude each other (ParallelismConfig.__post_init__)."""
    if sizes.cp > 1 and sizes.sp > 1:
        sizes.section.refuse(f"{PREFIX}sp_size", f"excludes cp_size {sizes.cp}; allowed: 1, or cp_size 1")
    if max(sizes.tp, sizes.cp) > 1 and sizes.replicas > 1 and sizes.shards == 1:
        name = "tp_size" if sizes.tp > 1 else "cp_size"
        why = f"with dp_replicate_size {sizes.replicas} needs shards"
        sizes.section.refuse(f"{PREFIX}{name}", f"{why}; allowed: 1, or dp_shard_size 2 or more")


def _check_kind(sizes: Sizes, kind: str) -> None:
    """Raise InputError for degrees that a distributed_type does not have."""
    refuse = sizes.section.refuse
    if sizes.sp > 1 and kind != "DEEPSPEED":
        refuse(f"{PREFIX}sp_size", "needs distributed_type DEEPSPEED; allowed: 1")
    if kind == "FSDP":
        return
    if sizes.cp > 1:
        refuse(f"{PREFIX}cp_size", _NEEDS_FSDP)
    if sizes.tp > 1 and (sizes.shards > 1 or kind in ("NO", "DEEPSPEED", "MEGATRON_LM")):
        refuse(f"{PREFIX}tp_size", _NEEDS_FSDP)
    if sizes.total > 1 and kind in ("NO", "MEGATRON_LM"):
        refuse(sizes.first_key, f"accelerate refuses it with distributed_type {kind}; allowed: 1")


def _check_total(sizes: Sizes, kind: str, processes: Processes) -> None:
    """Raise InputError if the degrees do not make the processes. DeepSpeed's shared sequences are not checked."""
    if processes.total is None or sizes.total in (1, processes.total) or sizes.sp > 1:
        return
    why = f"the degrees make {sizes.total} processes, and num_processes is {processes.total}"
    sizes.section.refuse(sizes.first_key, f"{why}; allowed: degrees whose product is {processes.total}")


def _options(sizes: Sizes, kind: str, processes: Processes) -> dict[str, Value]:
    section = sizes.section
    out: dict[str, Value] = {}
    if processes.total is None and sizes.total > 1 and sizes.sp == 1:
        out["gpus"] = section.value(sizes.first_key, sizes.total)
    if sizes.tp > 1:
        out["tp"] = section.value(f"{PREFIX}tp_size", sizes.tp)
    if sizes.cp > 1:
        out |= _shared(sizes)
    if sizes.sp > 1:
        out |= _exchanged(sizes)
    if sizes.tp > 1 and kind != "FSDP":  # slices alone: transformers' plan, and nothing is sharded
        where = f"{PREFIX}tp_size"
        out |= {"engine": section.value(where, "fsdp2"), "zero": section.value(where, 2)}
        out["shard_group"] = section.value(where, 1)
    if kind == "FSDP" and sizes.replicas > 1:
        out["shard_group"] = section.value(f"{PREFIX}dp_shard_size", sizes.shards * sizes.cp)
    return out


def _shared(sizes: Sizes) -> dict[str, Value]:
    """Return the options of torch's context parallelism."""
    key = f"{PREFIX}cp_comm_strategy"
    way = sizes.section.choice(key, tuple(_RINGS))
    say = sizes.section.default if way is None else sizes.section.value
    out = {"cp": sizes.section.value(f"{PREFIX}cp_size", sizes.cp)}
    return {**out, "cp_comm_type": say(key, _RINGS[way or "allgather"])}


def _exchanged(sizes: Sizes) -> dict[str, Value]:
    """Return the options of DeepSpeed's shared sequences (Ulysses)."""
    section = sizes.section
    size, kernel = f"{PREFIX}sp_size", f"{PREFIX}sp_attn_implementation"
    out = {"cp": section.value(size, sizes.sp), "cp_comm_type": section.value(size, "a2a")}
    attention = section.text(kernel)
    if attention is None:
        out["attention"] = section.default(kernel, "sdpa")
    else:
        is_hosted = "/" in attention and "flash-attn" in attention  # a kernel of the Hub
        if attention not in _ATTENTIONS and not is_hosted:
            section.refuse(kernel, f"allowed: {', '.join(_ATTENTIONS)}")
        out["attention"] = section.value(kernel, "sdpa" if attention == "sdpa" else "flash")
        if attention in VERSIONS:
            out["flash_attention_version"] = section.value(kernel, VERSIONS[attention])
    length = section.whole(f"{PREFIX}sp_seq_length", 1)
    if section.flag(f"{PREFIX}sp_seq_length_is_variable") is False and length is not None:
        out["seq_len"] = section.value(f"{PREFIX}sp_seq_length", length)
    return out


def _notes(sizes: Sizes, kind: str) -> Iterable[str]:
    section = sizes.section
    if kind not in ("FSDP", "DEEPSPEED") and sizes.shards > 1:
        name = f"{section.path}{PREFIX}dp_shard_size"
        yield f"{name} {sizes.shards}: {kind} shards nothing, so whole replicas are estimated."
    yield from unread(section, _OF_AXES, PREFIX)
