"""Keys of DeepSpeed's JSON for swapping to NVMe: runtime/zero/offload_config.py, runtime/swap_tensor/aio_config.py."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from memcalc.formats.deepspeed_names import OF_FILES
from memcalc.formats.found import Value
from memcalc.formats.section import Section

_BLOCK: Final = 1024**2
"""The bytes of DeepSpeed's own block, and of the smallest tensor that has a file."""


def sizes_of_files(key: str, section: Section) -> dict[str, Value]:
    """Return the sizes of the buffers between files and the host."""
    out: dict[str, Value] = {}
    for name, option in OF_FILES[key].items():
        size = section.whole(name, 0)
        if size is not None:
            out[option] = section.value(name, size)
    return out


def threads_of_files(top: Section, options: Mapping[str, Value]) -> dict[str, Value]:
    """Return the threads of a request to NVMe."""
    in_files = any(options[name].value == "nvme" for name in ("offload_optimizer", "offload_params") if name in options)
    if not in_files:
        return {}
    aio = top.section("aio")
    if aio.flag("use_gds"):
        aio.refuse("use_gds", "buffers on the GPU (GPUDirect storage) are not modelled; allowed: false")
    if (aio.whole("block_size") or 0) > _BLOCK:
        aio.refuse(
            "block_size", f"which parts have files with larger blocks is not modelled; allowed: at most {_BLOCK}"
        )
    threads = aio.whole("intra_op_parallelism", 1, 1024)
    return {} if threads is None else {"nvme_threads": aio.value("intra_op_parallelism", threads)}


def notes_on_files(section: Section, stage: int) -> Iterator[str]:
    """Yield a note for what is said of files and is not modelled."""
    if stage in (1, 2):
        yield f"{section.where('device')} nvme: with stage {stage} DeepSpeed has no files and keeps it on the host, as with cpu"
        return
    piped = [key for key in ("pipeline_read", "pipeline_write") if section.flag(key)]
    if piped:
        least = 12 if len(piped) == 2 else 8
        yield (
            f"{section.where(piped[0])} true: bytes are the same; with several sub-groups DeepSpeed stops with a buffer_count "
            f"below {least}"
        )
    if section.flag("fast_init"):
        yield f"{section.where('fast_init')} true: changes how files are first written, not a step"
