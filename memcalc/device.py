"""From live tensors to what tools show: `allocated`, `reserved` and `device`, each the one before plus rows.

Sources: c10/cuda/CUDACachingAllocator.cpp (blocks of 512 B, segments of 2 MiB), aten/src/ATen/cuda/CublasHandlePool.cpp
(one workspace per handle and stream: the thread that runs forward and autograd's own thread have a handle each).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from memcalc.inputs.gpu import GPU
from memcalc.rows import Item
from memcalc.units import KIB, MIB

BLOCK: Final = 512
SEGMENT: Final = 2 * MIB
_HOPPER_WORKSPACE: Final = 32 * MIB
_WORKSPACE: Final = 2 * 4 * MIB + 8 * 16 * KIB  # 8 519 680 B, ":4096:2:16:8"
HANDLES: Final = 2
_CUDA_CONTEXT: Final = 426 * MIB  # an RTX 6000 Ada with CUDA 13.0 and lazy loading
_NCCL_TWO: Final = 544 * 10**6  # one communicator of 2 ranks on A100s, github.com/NVIDIA/nccl issue 964
_NCCL_MORE: Final = 688 * 10**6  # of more than 2 ranks, same source


def _item(component: str, name: str, nbytes: int, formula: str, basis: str, source: str) -> Item:
    return Item(component, name, nbytes, 0, (), "", "always", formula, basis, source)  # type: ignore[arg-type]


def cublas_workspace(compute_capability: str) -> int:
    """Of one handle and stream."""
    return _HOPPER_WORKSPACE if compute_capability == "9.0" else _WORKSPACE


def allocator_items(items: Iterable[Item], gpu: GPU | None) -> list[Item]:
    """What `torch.cuda.max_memory_allocated` counts besides the tensors at the peak."""
    lost = 0
    for item in items:
        if item.at_peak:
            block = item.at_peak // item.blocks
            lost += item.blocks * (-block % BLOCK)
    workspace = cublas_workspace("" if gpu is None else gpu.compute_capability)
    return [
        _item("allocator", "rounding of blocks to 512 B", lost, "per block", "exact", "CUDACachingAllocator.cpp"),
        _item(
            "allocator",
            "cuBLAS workspaces",
            HANDLES * workspace,
            f"{HANDLES} handles·{workspace} B",
            "modelled" if gpu is not None else "assumed",
            "CublasHandlePool.cpp" + ("" if gpu is not None else "; no --gpu given: not a Hopper GPU"),
        ),
    ]


def reserved_items(allocated: int) -> list[Item]:
    """The least that the caching allocator must hold for `allocated` bytes; fragmentation comes on top of it."""
    return [
        _item(
            "reserved",
            "rounding to 2 MiB segments (fragmentation not modelled)",
            -allocated % SEGMENT,
            "up to a multiple of 2 MiB",
            "modelled",
            "CUDACachingAllocator.cpp",
        )
    ]


def device_items(gpus: int) -> list[Item]:
    """What a process holds outside torch."""
    out = [
        _item("device", "CUDA context", _CUDA_CONTEXT, "measured on an RTX 6000 Ada, CUDA 13.0, lazy loading", "assumed",
              "differs by GPU, driver and loaded kernels: 300 to 430 MiB since CUDA 11.7")
    ]  # fmt: skip
    if gpus > 1:
        size = _NCCL_TWO if gpus == 2 else _NCCL_MORE
        out.append(
            _item(
                "device",
                "NCCL communicator",
                size,
                "measured on 4 A100s",
                "assumed",
                "github.com/NVIDIA/nccl issue 964",
            )
        )
    return out
