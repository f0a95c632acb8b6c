# pyright: basic
"""The GPU of this process: what it is, and what the device itself counted before and after there was a CUDA context."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from functools import cache
from typing import NamedTuple

import torch

from memcalc.errors import InputError, one_line
from memcalc.units import MIB
from memcalc.validate.reference import environment


class Place(NamedTuple):
    """A GPU. Bytes are the device's own count; None where there is no nvidia-smi, or where it does not know this GPU."""

    name: str
    capability: str
    """As "9.0"."""
    uuid: str
    memory: int
    """All that there is."""
    before: int | None
    context: int | None
    """What the context took."""

    def used(self) -> int | None:
        """What is used on the device beyond what was there before this process."""
        now = of_gpu(used_by_gpu(), self.uuid)
        return None if now is None or self.before is None else now - self.before

    def environment(self) -> dict[str, str]:
        """The GPU, its driver, the allocator's settings and the versions."""
        return environment() | {
            "gpu": self.name,
            "compute_capability": self.capability,
            "memory": str(self.memory),
            "driver": _driver(),
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
    """This rank's GPU, which it makes a context on. InputError where torch sees none."""
    if not torch.cuda.is_available():
        raise InputError("--backend cuda: torch sees no CUDA device; allowed: fake")
    before = used_by_gpu()
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    if rank >= torch.cuda.device_count():
        raise InputError(
            f"--backend cuda: rank {rank} of this node has no GPU; allowed: {torch.cuda.device_count()} ranks"
        )
    torch.cuda.set_device(rank)
    torch.cuda.synchronize()  # a context, and nothing of the caching allocator
    properties = torch.cuda.get_device_properties(rank)
    uuid = str(properties.uuid)
    empty, after = of_gpu(before, uuid), of_gpu(used_by_gpu(), uuid)
    return Place(
        properties.name,
        f"{properties.major}.{properties.minor}",
        uuid,
        properties.total_memory,
        empty,
        None if empty is None or after is None else after - empty,
    )


def used_by_gpu() -> dict[str, int]:
    """Bytes that nvidia-smi counts on each GPU of this machine, by its UUID; nothing where there is no such command."""
    shown = _nvidia_smi("uuid,memory.used")
    return {} if shown is None else parse_used(shown)


def parse_used(shown: str) -> dict[str, int]:
    """Lines of "GPU-<uuid>, <MiB>". What is no number, as with "[N/A]", is left out."""
    out: dict[str, int] = {}
    for line in shown.splitlines():
        uuid, _, mebibytes = line.partition(",")
        if mebibytes.strip().isdecimal():
            out[uuid.strip().removeprefix("GPU-")] = int(mebibytes) * MIB
    return out


def of_gpu(used: Mapping[str, int], uuid: str) -> int | None:
    """Of this GPU."""
    return used.get(uuid.removeprefix("GPU-"))


def _driver() -> str:
    shown = _nvidia_smi("driver_version")
    return "unknown" if not shown else one_line(shown.splitlines()[0])


def _nvidia_smi(fields: str) -> str | None:
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError):
        return None
