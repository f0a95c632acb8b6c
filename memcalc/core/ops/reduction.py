"""The partial sums of CUDA's reductions over leading dims, which blocks of threads that share an output leave in memory.

A kernel that reduces rows gives each thread some outputs that lie side by side, and splits the rows over the threads of a
block. If a thread would still add 256 rows or more, the rows are split over blocks too, which leave their sums in global memory
(setReduceConfig and ReduceConfig::global_memory_size in aten/src/ATen/native/cuda/Reduce.cuh). How many blocks share an output
depends on the GPU: here it has the multiprocessors of an H100 or H200; an A100 takes the same or up to a fifth less.

The sizes are those that an H200 has allocated (tests/measured_ops).
"""

from __future__ import annotations

from typing import Final

_MULTIPROCESSORS: Final = 132
_THREADS: Final = 2048  # of a multiprocessor
_MOST_THREADS: Final = 512  # of a block
_WARP: Final = 32
_MOST_OUTPUTS: Final = 4  # of a thread
_FEWEST_VALUES: Final = 16
_MOST_VALUES: Final = 256
_SUM: Final = 4  # bytes of a partial sum, which is in fp32
_INDEX_LIMIT: Final = 2**31 - 1


def reduction_scratch(rows: int, columns: int, itemsize: int, stacks: int = 1) -> int:
    """Return the bytes of the partial sums when (stacks, rows, columns) is reduced over its rows; 0 if there are none."""
    while rows * columns * stacks * itemsize > _INDEX_LIMIT and rows > 1:
        rows = -(-rows // 2)  # one half after the other (with_32bit_indexing)
    vector = next(size for size in (_MOST_OUTPUTS, 2, 1) if columns % size == 0)
    outputs = columns * stacks
    width, height = _block(outputs // vector, rows, _MOST_THREADS // vector)
    values = -(-rows // height)
    if rows < min(height * _FEWEST_VALUES, _MOST_VALUES) or values < _MOST_VALUES:
        return 0
    grid = -(-(outputs // vector) // width)
    wanted = _MULTIPROCESSORS * (_THREADS // (width * height))
    if grid > wanted:
        return 0
    blocks = max(min(-(-wanted // grid), -(-values // _FEWEST_VALUES)), -(-values // _MOST_VALUES))
    return _SUM * outputs * blocks * width * vector if blocks > 1 else 0


def _block(outputs: int, rows: int, threads: int) -> tuple[int, int]:
    """Return the threads of a block along the outputs, and along the rows (set_block_dimension)."""
    across, along = (min(_power(size), threads) for size in (outputs, rows))
    height = min(along, threads // min(across, _WARP))
    return min(across, threads // height), height


def _power(size: int) -> int:
    """Return the largest power of two that is not above `size`."""
    return 1 << (size.bit_length() - 1) if size else 1
