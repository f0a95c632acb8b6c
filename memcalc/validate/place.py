# pyright: basic
"""The GPU of this process: its properties, and the device's own count before and after there was a CUDA context."""

from __future__ import annotations

import os
import subprocess
from functools import cache
from typing import NamedTuple

import torch

from memcalc.errors import InputError, one_line
from memcalc.units import MIB
from memcalc.validate.reference import environment


class Place(NamedTuple):
    """A GPU. Bytes are the device's own count; None without nvidia-smi, or if nvidia-smi does not know this GPU."""

    name: str
    capability: str
    """The compute capability, such as "9.0"."""
    uuid: str
    memory: int
    """The bytes of all of its memory."""
    driver: str
    before: int | None
    context: int | None
    """The bytes that the context took."""

    def used(self) -> int | None:
        """Return the bytes used on the device beyond those used before this process."""
        now = shown_of(nvidia_smi(), self.uuid).used
        return None if now is None or self.before is None else now - self.before

    def environment(self) -> dict[str, str]:
        """Return the GPU, its driver, the allocator's settings and the versions."""
        return environment() | {
            "gpu": self.name,
            "compute_capability": self.capability,
            "memory": str(self.memory),
            "driver": self.driver,
            "cuda": str(torch.version.cuda),
            "allocator": " ".join(
                f"{name}={os.environ[name]}" for name in _SETTINGS if os.environ.get(name)
            ) or torch.cuda.get_allocator_backend(),
        }  # fmt: skip


_SETTINGS = (
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_NO_CUDA_MEMORY_CACHING",
    "CUBLAS_WORKSPACE_CONFIG",
)


@cache
def place() -> Place:
    """Return this rank's GPU, with a context on it. Raises InputError if torch sees none."""
    if not torch.cuda.is_available():
        raise InputError("--backend cuda: torch sees no CUDA device; allowed: fake")
    before = nvidia_smi()
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    if rank >= torch.cuda.device_count():
        raise InputError(
            f"--backend cuda: rank {rank} of this node has no GPU; allowed: {torch.cuda.device_count()} ranks"
        )
    torch.cuda.set_device(rank)
    torch.cuda.synchronize()  # makes a context, and nothing of the caching allocator
    properties = torch.cuda.get_device_properties(rank)
    uuid = str(properties.uuid)
    empty, after = shown_of(before, uuid), shown_of(nvidia_smi(), uuid)
    return Place(
        properties.name,
        f"{properties.major}.{properties.minor}",
        uuid,
        properties.total_memory,
        after.driver,
        empty.used,
        None if empty.used is None or after.used is None else after.used - empty.used,
    )


class Shown(NamedTuple):
    """nvidia-smi's answer for a GPU."""

    used: int | None
    """The used bytes; None if nvidia-smi does not count them, as with "[N/A]"."""
    driver: str


def shown_of(lines: str, uuid: str) -> Shown:
    """Return this GPU's line among lines of "GPU-<uuid>, <MiB>, <driver>"; unknown values if there is none."""
    for line in lines.splitlines():
        named, *rest = (field.strip() for field in line.split(","))
        if named.removeprefix("GPU-") == uuid.removeprefix("GPU-") and len(rest) == 2:
            used, driver = rest
            return Shown(int(used) * MIB if used.isdecimal() else None, one_line(driver))
    return Shown(None, "unknown")


def nvidia_smi() -> str:
    """Return a line for each GPU; nothing if there is no such command, or if it fails."""
    command = ["nvidia-smi", "--query-gpu=uuid,memory.used,driver_version", "--format=csv,noheader,nounits"]
    try:
        return subprocess.run(command, capture_output=True, text=True, errors="replace", check=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
