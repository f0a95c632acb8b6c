"""GPUs: one JSON file each in `memcalc/hardware/gpus/`, every quantity with its unit and source."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

from memcalc.errors import InputError, nearest, one_line
from memcalc.inputs.files import hardware_folder, read_bundled
from memcalc.units import to_bytes

FOLDERS: Final = [hardware_folder()]
"""The folders with the files of GPUs."""
AUTO: Final = "auto"
"""The name of whichever GPU is in this machine."""
_MOST_SHOWN: Final = 12
_NUMBER: Final = re.compile(r"[0-9]{1,9}(?:\.[0-9]{1,3})?", re.ASCII)
_SIZE: Final = re.compile(r"[-+]?(?:[0-9][0-9.,_]*|\.[0-9]+)(?:e[-+]?[0-9]+)?\s*(?:[kmgtp]i?b|[kmgtp])", re.ASCII)
"""Matches any text that is meant as a memory size, even if it cannot be read as one."""


class Quantity(NamedTuple):
    """A number with its unit and the source that published it."""

    value: float
    unit: str
    source: str

    @property
    def nbytes(self) -> int:
        return to_bytes(self.value, self.unit)


class GPU(NamedTuple):
    """The specifications of one GPU. FLOP/s are dense; links are bidirectional totals."""

    name: str
    full_name: str
    aliases: list[str]
    vendor: str
    architecture: str
    compute_capability: str
    memory: Quantity
    nominal_memory: Quantity
    memory_bandwidth: Quantity | None
    """The bandwidth of its memory; None for a GPU given only by its memory. The rates, links and compute capability
    ('') of such a GPU are not known either."""
    dense_flops_per_second: dict[str, Quantity]
    links: dict[str, Quantity]
    nvlink_group: Quantity | None = None
    """The number of GPUs that an NVLink bridge joins; None: all of a node."""
    network: Quantity | None = None
    """The network of one GPU, in each direction, in NVIDIA's own node with it; None if there is no such node."""

    @property
    def capacity(self) -> int:
        """Return the bytes of device memory that a process can see: cudaMemGetInfo's total, without the driver's
        reserve."""
        return self.memory.nbytes


def from_file(name: str, content: dict[str, Any]) -> GPU:
    """Return a GPU from the content of its file. Raises TypeError if a key is missing or unknown."""
    made: dict[str, Any] = dict(content)
    for key in ("memory", "nominal_memory", "memory_bandwidth"):
        made[key] = Quantity(**content[key])
    for key in ("dense_flops_per_second", "links"):
        made[key] = {name: Quantity(**quantity) for name, quantity in content[key].items()}
    for key in {"nvlink_group", "network"} & content.keys():
        made[key] = Quantity(**content[key])
    return GPU(name=name, **made)


@cache
def _files() -> dict[str, Path]:
    found = {path.stem: path for folder in FOLDERS for path in folder.glob("*.json")}
    return {name: found[name] for name in sorted(found)}


@cache
def _read(name: str) -> GPU:
    return from_file(name, read_bundled(_files()[name]))


def all_gpus() -> list[GPU]:
    """Return every GPU, by name."""
    return [_read(name) for name in _files()]


@cache
def load_gpu(name: str) -> GPU:
    """Return a GPU by name or alias, or any other GPU by its memory ("80GB"). Raises InputError with likely names."""
    found = of_capacity(name)
    return named_gpu(name) if found is None else found


@cache
def named_gpu(name: str) -> GPU:
    """Return a GPU of the list by name or alias. Raises InputError with likely names."""
    wanted = name.strip().lower()
    if wanted in _files():
        return _read(wanted)
    known: dict[str, str] = {}
    for gpu in all_gpus():
        known[gpu.name] = gpu.name
        known.update((alias.lower(), gpu.name) for alias in gpu.aliases)
    if wanted in known:
        return _read(known[wanted])
    also = f"or with a unit: {wanted}GB" if _NUMBER.fullmatch(wanted) else "or the memory of any other GPU, as 80GB"
    raise InputError(f"--gpu {one_line(name)}: {_which(wanted, known)} ({also})")


def _which(wanted: str, known: dict[str, str]) -> str:
    """Return what an unknown name may mean: GPUs whose names begin with it or that have so many GB, else GPUs of a
    similar name."""
    begin = [name for alias, name in known.items() if wanted and alias.startswith(wanted)]
    meant = list(dict.fromkeys([*begin, *_with_so_much(wanted)]))
    if len(meant) > 1:
        shown = ", ".join(_with_memory(name) for name in meant[:_MOST_SHOWN])
        return f"there are several; allowed: {shown}{', …' if len(meant) > _MOST_SHOWN else ''}"
    close = meant or nearest(wanted, known)
    shown = ", ".join(dict.fromkeys(_with_memory(known[name]) for name in close))
    return f"unknown GPU; {f'did you mean {shown}?' if close else 'see `memcalc gpus`'}"


def _with_so_much(wanted: str) -> list[str]:
    """Return the GPUs with that nominal memory, for a number without a unit."""
    number = float(wanted) if _NUMBER.fullmatch(wanted) else None
    return [gpu.name for gpu in all_gpus() if gpu.nominal_memory.value == number]


def _with_memory(name: str) -> str:
    nominal = _read(name).nominal_memory
    return f"{name} ({nominal.value:g} {nominal.unit})"


def of_capacity(text: str) -> GPU | None:
    """Return a GPU of which only the memory is known, as a process sees it: "80GB", "24 GiB". Return None for text that
    is no size. Raises InputError for a size that cannot be read.
    """
    match = re.fullmatch(rf"({_NUMBER.pattern}) ?([mgt])(i?)b", text.strip().lower(), re.ASCII)
    if match is None and _SIZE.fullmatch(text.strip().lower()):
        allowed = "allowed: digits and a unit (80GB, 24GiB, 1.5TB), or a name of `memcalc gpus`"
        raise InputError(f"--gpu {one_line(text)}: no memory that can be read; {allowed}")
    if match is None:
        return None
    value, unit = float(match[1]), f"{match[2].upper()}{match[3]}B"
    memory = Quantity(value, unit, "as given")
    if not to_bytes(1, "GB") <= memory.nbytes <= to_bytes(100, "TB"):
        raise InputError(f"--gpu {one_line(text)}: allowed: a memory from 1GB to 100TB, or a name of `memcalc gpus`")
    size = f"{value:.12g}"
    return GPU(f"{size}{unit}", f"a GPU of {size} {unit}", [], "", "", "", memory, memory, None, {}, {})
