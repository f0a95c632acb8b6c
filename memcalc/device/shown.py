"""From live tensors to what tools show: `allocated`, `reserved` and `device`, each the number before plus rows.

Sources: c10/cuda/CUDACachingAllocator.cpp (blocks of 512 B, segments of 2 MiB), aten/src/ATen/cuda/CublasHandlePool.cpp
(one workspace per handle and stream: the thread that runs forward and autograd's own thread have a handle each). What else
the allocator loses comes from playing the run (memcalc.device.replay), if the order of its allocations is known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from memcalc.core.rows import Item
from memcalc.device.allocator import BLOCK, ROUNDING
from memcalc.hardware.figures import CONTEXT, NCCL, WORKSPACES, Size, figures
from memcalc.units import KIB, MIB

if TYPE_CHECKING:
    from memcalc.device.fragmentation import Assumed
    from memcalc.inputs.gpu import GPU
    from memcalc.setup.setup import Setup

_LARGE_WORKSPACE: Final = 32 * MIB
_LARGE: Final = ("9", "10", "12")  # Blackwell's since February 2026 (pytorch's pull request 175344)
_ROCM_WORKSPACE: Final = 128 * MIB
_ROCM_LARGE: Final = ("gfx94", "gfx95")
_WORKSPACE: Final = 2 * 4 * MIB + 8 * 16 * KIB  # 8 519 680 B, ":4096:2:16:8"
HANDLES: Final = 2
_TE_HOPPER_WORKSPACE: Final = 32 * MIB + 1024
_TE_WORKSPACE: Final = 4 * MIB
_TE_STREAMS: Final = 4  # for grouped products, one workspace each
_CUDA_CONTEXT: Final = 426 * MIB  # an RTX 6000 Ada with CUDA 13.0 and lazy loading
_NCCL_TWO: Final = 544 * 10**6  # one communicator of 2 ranks on A100s, github.com/NVIDIA/nccl issue 964
_NCCL_MORE: Final = 688 * 10**6  # one communicator of more than 2 ranks, same source
MEGATRON_ERROR: Final = 5
"""The stated error of `device` with Megatron, in percent: the largest error of `reserved` on its published runs
(docs/accuracy.md), rounded up. All these estimates are too low: NCCL's streams hold blocks until a collective is done, which
depends on time."""
TRAINER_ERROR: Final = 7
"""The stated error of `device` with all other engines, in percent: how much more nvidia-smi showed on the published runs of
Mistral-7B under HF's Trainer, on one GPU and sharded over two (6.4 %; tests/published_measurements.json), rounded up. One
run was published three times, with up to 9 % between the measurements."""
LEAST_ERROR: Final = 2
"""The stated error of the least memory that a run needs, in percent: `allocated` is within 0.7 % of every published run, and
the sizes of the context and of NCCL are figures of other GPUs. Blocks that streams hold longer do not count here: they are
free before the allocator gives up."""


class Played(Protocol):
    """The result of a run that was played through the allocator, in bytes and steps (memcalc.device.replay.Replay)."""

    @property
    def reserved(self) -> int: ...
    @property
    def allocated(self) -> int: ...
    @property
    def steps(self) -> int: ...


def _item(component: str, name: str, nbytes: int, formula: str, basis: str, source: str) -> Item:
    return Item(component, name, nbytes, 0, (), "", "always", formula, basis, source)  # type: ignore[arg-type]


def cublas_workspace(compute_capability: str) -> int:
    """Return the bytes of cuBLAS's workspace for one handle and stream, by torch's rule (parseChosenWorkspaceSize in
    CublasHandlePool.cpp): 32 MiB on Hopper and Blackwell. hipBLAS's on ROCm: 128 MiB on gfx94 and gfx95, 32 MiB elsewhere."""
    if compute_capability.startswith("gfx"):
        return _ROCM_WORKSPACE if compute_capability.startswith(_ROCM_LARGE) else _LARGE_WORKSPACE
    return _LARGE_WORKSPACE if compute_capability.split(".")[0] in _LARGE else _WORKSPACE


def _measured(name: str, gpu: GPU | None, ranks: int = 1) -> Size | None:
    return None if gpu is None else figures().size(name, gpu.name, ranks)


def workspace_of(gpu: GPU | None) -> int:
    """Return the bytes of cuBLAS's workspace for one handle and stream on a GPU: measured if there is a measurement, else by
    torch's rule. Without a GPU it is the workspace of Ampere and Ada."""
    measured = _measured(WORKSPACES, gpu)
    if measured is not None:
        return measured.nbytes // HANDLES
    return cublas_workspace(_capability(gpu))


def _capability(gpu: GPU | None) -> str:
    """Return the compute capability for the rules of workspaces; '' without a GPU. A GPU that is given by its memory alone
    counts as Hopper, which has the largest workspaces of NVIDIA's."""
    return "" if gpu is None else gpu.compute_capability or "9.0"


class Kernels(NamedTuple):
    """The libraries that multiply a step's matrices, as far as their workspaces differ."""

    transformer_engine: int = 0
    """The number of Transformer Engine's workspaces."""
    workspace: int | None = None
    """The bytes of one of cuBLAS's workspaces, if the job's environment says it."""


TORCH: Final = Kernels()


def kernels_of(setup: Setup, model: Any) -> Kernels:
    """Return the kernels of a model's step. Megatron's own layers, which have its own attention, use no Transformer Engine.
    Products of several experts are computed at once, on several streams."""
    own = setup.te_workspaces
    if own is None and setup.engine == "megatron" and setup.attention != "eager":
        own = 1 + _TE_STREAMS if model.active_parameters != model.num_parameters else 1
    if setup.cublas_workspace_config is None:
        return Kernels(own or 0)
    from memcalc.inputs.cublas import workspace_config

    return Kernels(own or 0, workspace_config(setup.cublas_workspace_config))


class Workspaces(NamedTuple):
    """The bytes of each workspace that stays allocated from the first forward on, and from the first backward on."""

    forward: tuple[int, ...]
    backward: tuple[int, ...]

    @property
    def total(self) -> int:
        return sum(self.forward) + sum(self.backward)


def transformer_engine_workspace(compute_capability: str) -> int:
    """Return the bytes of Transformer Engine's workspace for one stream (get_cublas_workspace_size_bytes in
    transformer_engine/pytorch/cpp_extensions/gemm.py)."""
    major = compute_capability.split(".")[0]
    return _TE_HOPPER_WORKSPACE if major.isdigit() and int(major) >= 9 else _TE_WORKSPACE


def workspaces_of(gpu: GPU | None, kernels: Kernels) -> Workspaces:
    """Return the workspaces of a step on a GPU; without a GPU, those of Ampere and Ada."""
    each = workspace_of(gpu) if kernels.workspace is None else kernels.workspace
    own = [transformer_engine_workspace(_capability(gpu))] * kernels.transformer_engine
    return Workspaces((each, *own), (each,) * (HANDLES - 1))


def allocator_items(items: Iterable[Item], gpu: GPU | None, kernels: Kernels = TORCH) -> list[Item]:
    """Return the rows that `torch.cuda.max_memory_allocated` counts besides the tensors at the peak: the rounding of blocks and
    the workspaces. Blocks that are not split have a row of their own (`whole_blocks_item`)."""
    lost = 0
    for item in items:
        if item.at_peak:
            block = item.at_peak // item.blocks
            lost += item.blocks * (-block % BLOCK)
    workspace, *own = workspaces_of(gpu, kernels).forward
    basis, source = "modelled", "CublasHandlePool.cpp"
    measured = _measured(WORKSPACES, gpu)
    if kernels.workspace is not None:
        source = f"CUBLAS_WORKSPACE_CONFIG; {source}"
    elif gpu is None:
        basis, source = "assumed", f"{source}; no --gpu given: not a Hopper GPU"
    elif not gpu.compute_capability:
        basis, source = "assumed", f"{source}; compute capability not known: the largest"
    elif measured is not None:
        basis, source = "measured", measured.source
    elif gpu.vendor == "amd":
        basis, source = "assumed", f"{source}; on ROCm hipBLAS's, and hipBLASLt's own of 76 MiB are not counted"
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
    """Return the row of the blocks that are not split: a block with a rest of up to 1 MiB counts whole.

    `counted`: the bytes of `allocated` without this row. Their rounding takes each row's mean block, so a tiny run can allocate
    a few kilobytes less than `counted`. Then the row has 0 bytes.
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
    """Return the row of what the caching allocator reserves beyond `allocated` bytes: from recorded runs, else from the played
    run, else `assumed`."""
    source = "CUDACachingAllocator.cpp"
    recorded = figures().fragmentation_of(engine)
    if recorded is not None:
        lost = -(-round(allocated * (1 + recorded.share)) // ROUNDING) * ROUNDING - allocated
        formula = f"{recorded.share:.2%} of {allocated} B, up to a multiple of 2 MiB"
        return [_item("reserved", "fragmentation", lost, formula, "measured", recorded.source)]
    if played is None:
        lost, formula, source, _ = assumed()
        return [_item("reserved", "fragmentation (not played)", lost, formula, "assumed", source)]
    more = max(0, allocated - played.allocated) // ROUNDING * ROUNDING  # if another rank was played
    formula = f"segments of {played.steps} steps, played - {allocated} B"
    return [_item("reserved", "fragmentation", played.reserved + more - allocated, formula, "modelled", source)]


def margin(device: int, engine: str) -> int:
    """Return by how many bytes `device` may be too low: the largest error of the engine's recorded and published runs."""
    recorded, published = figures().error_of(engine), MEGATRON_ERROR if engine == "megatron" else TRAINER_ERROR
    percent = published if recorded is None else max(recorded.percent, published)
    return device * percent // 100


def device_items(gpus: int, gpu: GPU | None) -> list[Item]:
    """Return the rows of what a process holds outside torch: the CUDA context and, with several GPUs, NCCL."""
    alike = None if gpu is None else _context_of_like(gpu)
    if alike is None:
        of_another, formula = _CUDA_CONTEXT, "measured on an RTX 6000 Ada, CUDA 13.0, lazy loading"
        source = "differs by GPU, driver and loaded kernels: 300 to 430 MiB since CUDA 11.7"
    else:
        of_another, source = alike.nbytes, alike.source
        formula = f"measured on {alike.gpu}, with the same compute capability"
    out = [_outside(CONTEXT, _measured(CONTEXT, gpu), of_another, formula, source)]
    if gpus > 1:
        size = _NCCL_TWO if gpus == 2 else _NCCL_MORE
        measured = _measured(NCCL, gpu, gpus)
        out.append(_outside(NCCL, measured, size, "measured on 4 A100s", "github.com/NVIDIA/nccl issue 964"))
    return out


def _context_of_like(gpu: GPU) -> Size | None:
    """Return the context of a GPU with the same compute capability, which loads the same kernels; None if there is none."""
    sizes = (size for size in figures().sizes if (size.name, size.ranks) == (CONTEXT, 1))
    from memcalc.inputs.gpu import load_gpu

    return next((size for size in sizes if load_gpu(size.gpu).compute_capability == gpu.compute_capability), None)


def _outside(name: str, measured: Size | None, nbytes: int, formula: str, source: str) -> Item:
    if measured is not None:
        return _item("device", name, measured.nbytes, "median of recorded runs", "measured", measured.source)
    return _item("device", name, nbytes, formula, "assumed", source)
