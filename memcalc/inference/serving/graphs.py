"""The CUDA graphs of serving engines: which sizes are captured, what is known of their memory, and what is not.

vLLM (0.33) captures a decode step of each size in one graph (FULL), and each size once more in pieces between attention
(PIECEWISE; config/vllm.py, `_set_cudagraph_sizes`; v1/worker/gpu/cudagraph_utils.py, `_init_candidates`). It subtracts an
estimate of their memory from the cache, which it measures: it captures all PIECEWISE graphs and the two largest FULL ones,
and takes the second's bytes, 1 MiB at least, for each further one (`profile_cudagraph_memory`). So no rule gives the bytes;
a lower bound is known.

SGLang (0.5.23) measures nothing: it reserves by a rule of thumb of its own (arg_groups/memory_hook.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from memcalc.core.dims import Dim
from memcalc.core.dtypes import boolean, int32, int64, uint8
from memcalc.core.rows import Row
from memcalc.units import MIB

if TYPE_CHECKING:
    from collections.abc import Sequence

    from memcalc.core.dtypes import DType
    from memcalc.inference.serving.vllm import Batching
    from memcalc.inputs.gpu import GPU

_MOST: Final = 512
_MOST_ON_BLACKWELL: Final = 1024
_DATA_CENTER_BLACKWELL: Final = "10"
"""The major compute capability of B200, B300 and GB200 (`is_device_capability_family(100)`)."""
LEAST_OF_A_GRAPH: Final = MIB
"""The least that vLLM takes for each FULL graph but the first (`_MIN_PER_GRAPH_BYTES`)."""
STATIC_OUTPUT: Final = "static output of the graphs"
AT_LEAST: Final = "CUDA graphs, at least"
BUFFERS: Final = "vllm 0.33 v1/worker/gpu/input_batch.py, InputBuffers"
UTILITIES: Final = "vllm 0.33 v1/worker/gpu/cudagraph_utils.py"


class Graphs(NamedTuple):
    """The CUDA graphs of one GPU."""

    sizes: tuple[int, ...]
    """The numbers of tokens that are captured."""
    full: int
    """The graphs of whole decode steps."""
    piecewise: int
    """The sizes that are captured in pieces."""
    rows: tuple[Row, ...]
    """The known bytes: static buffers, and the least that is taken for graphs."""
    measured: int | None
    """The bytes of the graphs that vLLM has measured, as the user gives them; None: not known."""

    @property
    def known(self) -> int:
        """Return the bytes that are known: all of them, or a lower bound if the graphs' own are not."""
        return sum(row.nbytes for row in self.rows) + (self.measured or 0)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object."""
        return {
            "capture_sizes": list(self.sizes),
            "full_graphs": self.full,
            "piecewise_sizes": self.piecewise,
            "bytes": None if self.measured is None else self.known,
            "at_least": self.known,
            "items": [
                {"name": row.name, "nbytes": row.nbytes, "basis": row.basis, "source": row.source} for row in self.rows
            ],
        }


def capture_sizes(gpu: GPU, batch: Batching) -> tuple[int, ...]:
    """Return the numbers of tokens that vLLM captures graphs for by default (`_set_cudagraph_sizes`)."""
    blackwell = gpu.compute_capability.partition(".")[0] == _DATA_CENTER_BLACKWELL
    most = min(2 * batch.sequences, _MOST_ON_BLACKWELL if blackwell else _MOST)
    decodes = {batch.sequences} if batch.sequences <= most else set[int]()
    most = min(batch.tokens, most)
    sizes = {1, 2, 4, *range(8, min(most + 1, 256), 8), *range(256, most + 1, 16), *decodes}
    if batch.tokens <= most:
        sizes.add(batch.tokens)
    return tuple(sorted(size for size in sizes if size <= (batch.tokens if size in decodes else most)))


def vllm_graphs(gpu: GPU, batch: Batching, hidden: Dim, dtype: DType, measured: int | None) -> Graphs:
    """Return vLLM's graphs. `measured` is what its log says of them ("CUDA graph memory"), 0 with --enforce-eager."""
    tokens, sequences = Dim("max_num_batched_tokens", batch.tokens), Dim("max_num_seqs", batch.sequences)
    buffers = tuple(_input_buffers(tokens, sequences))
    if measured == 0:
        return Graphs((), 0, 0, buffers, 0)
    sizes = capture_sizes(gpu, batch)
    full = [size for size in sizes if size <= batch.sequences]
    if measured is not None:
        return Graphs(sizes, len(full), len(sizes), buffers, measured)
    return Graphs(sizes, len(full), len(sizes), (*buffers, *_least(full, hidden, dtype)), None)


def _input_buffers(tokens: Dim, sequences: Dim) -> Sequence[Row]:
    """Return the static inputs of a step, which graphs read."""
    places = Dim("max_num_seqs+1", sequences.size + 1)
    of = (
        ("input_ids", (tokens,), int32), ("positions", (tokens,), int64), ("is_padding", (tokens,), boolean),
        ("query_start_loc", (places,), int32), ("seq_lens", (sequences,), int32), ("dcp_local_seq_lens", (sequences,), int32),
    )  # fmt: skip
    return [Row("buffers", f"static input: {name}", shape, dtype, source=BUFFERS) for name, shape, dtype in of]


def _least(full: Sequence[int], hidden: Dim, dtype: DType) -> Sequence[Row]:
    """Return the least that is taken for graphs: the static output of the largest, and what each further one counts for."""
    if not full:
        return []
    output = Dim("largest decode size", full[-1]), hidden
    each = Dim("FULL graphs-1", len(full) - 1), Dim("1 MiB", LEAST_OF_A_GRAPH)
    source = f"{UTILITIES}, ModelCudaGraphManager"
    least = f"{UTILITIES}, _extrapolate_full_graph_memory"
    return [
        Row("buffers", STATIC_OUTPUT, output, dtype, source=source),
        Row("buffers", AT_LEAST, each, uint8, basis="modelled", source=least),
    ]
