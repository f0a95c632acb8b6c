"""From live tensors to what tools show: `allocated`, `reserved` and `device`, each the one before plus rows.

Sources: c10/cuda/CUDACachingAllocator.cpp (blocks of 512 B, segments of 2 MiB), aten/src/ATen/cuda/CublasHandlePool.cpp
(one workspace per handle and stream: the thread that runs forward and autograd's own thread have a handle each). What the
allocator loses besides is in `played` (memcalc.device.replay), where the order of a run's allocations is known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from memcalc.core.rows import Item
from memcalc.device.allocator import BLOCK, ROUNDING
from memcalc.hardware.figures import CONTEXT, NCCL, WORKSPACES, Size, figures
from memcalc.inputs.gpu import GPU
from memcalc.units import KIB, MIB

if TYPE_CHECKING:
    from memcalc.device.fragmentation import Assumed

_HOPPER_WORKSPACE: Final = 32 * MIB
_WORKSPACE: Final = 2 * 4 * MIB + 8 * 16 * KIB  # 8 519 680 B, ":4096:2:16:8"
HANDLES: Final = 2
_TE_HOPPER_WORKSPACE: Final = 32 * MIB + 1024
_TE_WORKSPACE: Final = 4 * MIB
_TE_STREAMS: Final = 4  # of grouped products, a workspace each
_CUDA_CONTEXT: Final = 426 * MIB  # an RTX 6000 Ada with CUDA 13.0 and lazy loading
_NCCL_TWO: Final = 544 * 10**6  # one communicator of 2 ranks on A100s, github.com/NVIDIA/nccl issue 964
_NCCL_MORE: Final = 688 * 10**6  # of more than 2 ranks, same source
MEGATRON_ERROR: Final = 5
"""Percent of `device`: the largest error of `reserved` on Megatron's published runs (docs/accuracy.md), rounded up. All are
too low: what NCCL's streams hold until a collective is done depends on time."""
TRAINER_ERROR: Final = 7
"""Percent of `device` with all other engines: by how much nvidia-smi showed more on the published runs of Mistral-7B under HF's
Trainer, alone and sharded over two GPUs (6.4 %; tests/published_measurements.json), rounded up. The same run was published
three times, with up to 9 % between them."""
LEAST_ERROR: Final = 2
"""Percent of the least that a run was found to need: `allocated` is within 0.7 % of every published run, and the context and
NCCL are figures of other GPUs. What streams hold longer does not count here: it is free before the allocator gives up."""


class Played(Protocol):
    """This is what a run came to when it was played through the allocator (memcalc.device.replay.Replay)."""

    @property
    def reserved(self) -> int: ...
    @property
    def allocated(self) -> int: ...
    @property
    def steps(self) -> int: ...


def _item(component: str, name: str, nbytes: int, formula: str, basis: str, source: str) -> Item:
    return Item(component, name, nbytes, 0, (), "", "always", formula, basis, source)  # type: ignore[arg-type]


def cublas_workspace(compute_capability: str) -> int:
    """Of one handle and stream, by the rule."""
    return _HOPPER_WORKSPACE if compute_capability == "9.0" else _WORKSPACE


def _measured(name: str, gpu: GPU | None, ranks: int = 1) -> Size | None:
    return None if gpu is None else figures().size(name, gpu.name, ranks)


def workspace_of(gpu: GPU | None) -> int:
    """Of one handle and stream on this GPU, as measured where it was; without a GPU that of Ampere and Ada."""
    measured = _measured(WORKSPACES, gpu)
    if measured is not None:
        return measured.nbytes // HANDLES
    return cublas_workspace(_capability(gpu))


def _capability(gpu: GPU | None) -> str:
    """Return what the workspaces' rules go by; '' without a GPU. Of one that is only known by its memory Hopper's, which has the
    largest by either rule."""
    return "" if gpu is None else gpu.compute_capability or "9.0"


class Kernels(NamedTuple):
    """This is what multiplies matrices, as far as its workspaces go."""

    transformer_engine: bool = False
    grouped: bool = False
    """True if it multiplies those of several experts at once."""


TORCH: Final = Kernels()


def kernels_of(engine: str, model: Any) -> Kernels:
    """Of a model's step under an engine."""
    return Kernels(engine == "megatron", model.active_parameters != model.num_parameters)


class Workspaces(NamedTuple):
    """Bytes of what stays allocated from the first forward and from the first backward on."""

    forward: tuple[int, ...]
    backward: tuple[int, ...]

    @property
    def total(self) -> int:
        return sum(self.forward) + sum(self.backward)


def transformer_engine_workspace(compute_capability: str) -> int:
    """Of one stream (get_cublas_workspace_size_bytes in transformer_engine/pytorch/cpp_extensions/gemm.py)."""
    major = compute_capability.split(".")[0]
    return _TE_HOPPER_WORKSPACE if major.isdigit() and int(major) >= 9 else _TE_WORKSPACE


def workspaces_of(gpu: GPU | None, kernels: Kernels) -> Workspaces:
    """Without a GPU those of Ampere and Ada."""
    capability = _capability(gpu)
    each, streams = workspace_of(gpu), 1 + _TE_STREAMS if kernels.grouped else 1
    own = [transformer_engine_workspace(capability)] * streams if kernels.transformer_engine else []
    return Workspaces((each, *own), (each,) * (HANDLES - 1))


def allocator_items(items: Iterable[Item], gpu: GPU | None, kernels: Kernels = TORCH) -> list[Item]:
    """Return what `torch.cuda.max_memory_allocated` counts besides the tensors at the peak, whole blocks apart."""
    lost = 0
    for item in items:
        if item.at_peak:
            block = item.at_peak // item.blocks
            lost += item.blocks * (-block % BLOCK)
    workspace, *own = workspaces_of(gpu, kernels).forward
    basis, source = "modelled", "CublasHandlePool.cpp"
    measured = _measured(WORKSPACES, gpu)
    if gpu is None:
        basis, source = "assumed", f"{source}; no --gpu given: not a Hopper GPU"
    elif not gpu.compute_capability:
        basis, source = "assumed", f"{source}; compute capability not known: the largest"
    elif measured is not None:
        basis, source = "measured", measured.source
    out = [
        _item("allocator", "rounding of blocks to 512 B", lost, "per block", "exact", "CUDACachingAllocator.cpp"),
        _item("allocator", WORKSPACES, HANDLES * workspace, f"{HANDLES} handles·{workspace} B", basis, source),
    ]
    if own:
        formula = f"{len(own)} stream{'s' if len(own) > 1 else ''}·{own[0]} B"
        name, source = "Transformer Engine's cuBLAS workspaces", "transformer_engine/pytorch/cpp_extensions/gemm.py"
        out.append(_item("allocator", name, sum(own), formula, basis, source))
    return out


def whole_blocks_item(counted: int, played: Played) -> Item:
    """A block that leaves up to 1 MiB is not split, and counts as a whole. `counted`: all that is known without that.

    Its rounding is that of the peak's mean block, which tiny runs can be below by a few kilobytes: then there is none.
    """
    name, formula = "blocks that are not split", f"allocated in {played.steps} steps, played - {counted} B"
    return _item(
        "allocator",
        name,
        max(0, played.allocated - counted),
        formula,
        "modelled",
        "CUDACachingAllocator.cpp, should_split",
    )


def reserved_items(allocated: int, played: Played | None, engine: str, assumed: Callable[[], Assumed]) -> list[Item]:
    """Return what the caching allocator holds beyond `allocated` bytes: as recorded, as played, or else as `assumed`."""
    source = "CUDACachingAllocator.cpp"
    recorded = figures().fragmentation_of(engine)
    if recorded is not None:
        lost = -(-round(allocated * (1 + recorded.share)) // ROUNDING) * ROUNDING - allocated
        formula = f"{recorded.share:.2%} of {allocated} B, up to a multiple of 2 MiB"
        return [_item("reserved", "fragmentation", lost, formula, "measured", recorded.source)]
    if played is None:
        lost, formula, source, _ = assumed()
        return [_item("reserved", "fragmentation (not played)", lost, formula, "assumed", source)]
    more = max(0, allocated - played.allocated) // ROUNDING * ROUNDING  # of another rank than the one that was played
    formula = f"segments of {played.steps} steps, played - {allocated} B"
    return [_item("reserved", "fragmentation", played.reserved + more - allocated, formula, "modelled", source)]


def margin(device: int, engine: str) -> int:
    """By how much `device` may be too low: the stated error, of the recorded runs, or where there are none of published ones."""
    recorded = figures().error_of(engine)
    if recorded is not None:
        percent = recorded.percent
    else:
        percent = MEGATRON_ERROR if engine == "megatron" else TRAINER_ERROR
    return device * percent // 100


def device_items(gpus: int, gpu: GPU | None) -> list[Item]:
    """Return what a process holds outside torch."""
    out = [
        _outside(CONTEXT, _measured(CONTEXT, gpu), _CUDA_CONTEXT, "measured on an RTX 6000 Ada, CUDA 13.0, lazy loading",
                 "differs by GPU, driver and loaded kernels: 300 to 430 MiB since CUDA 11.7")
    ]  # fmt: skip
    if gpus > 1:
        size = _NCCL_TWO if gpus == 2 else _NCCL_MORE
        measured = _measured(NCCL, gpu, gpus)
        out.append(_outside(NCCL, measured, size, "measured on 4 A100s", "github.com/NVIDIA/nccl issue 964"))
    return out


def _outside(name: str, measured: Size | None, nbytes: int, formula: str, source: str) -> Item:
    if measured is not None:
        return _item("device", name, measured.nbytes, "median of recorded runs", "measured", measured.source)
    return _item("device", name, nbytes, formula, "assumed", source)
