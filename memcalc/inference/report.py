"""The report of an inference run: rows, and totals that are their sums."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from memcalc.core.dims import Dim
from memcalc.core.rows import Row, copied, dims_formula, named_sizes
from memcalc.device import shown
from memcalc.inference.heights import KV, STATE, On, Scale, alive, highest, rounding
from memcalc.inference.loaded import weights
from memcalc.inference.options import DTYPES, kv_dtype_of

if TYPE_CHECKING:
    from memcalc.core.tensor import StorageRow
    from memcalc.families.base.program import Program
    from memcalc.inference.options import Asked
    from memcalc.inference.parallel import Stage
    from memcalc.inference.serving.served import Serving
    from memcalc.inference.steps import Step
    from memcalc.inference.timed import Times
    from memcalc.inference.weights import Method
    from memcalc.inference.zero_inference import Needs
    from memcalc.inputs.gpu import GPU
    from memcalc.inputs.model import Model
    from memcalc.timing.kernels import Unknown

GATHERED: Final = "weights that are on the GPU at once (ZeRO-Inference)"
PARTITIONED: Final = "deepspeed 0.19 runtime/zero/partitioned_param_coordinator.py"
CACHES: Final = "transformers 5.23 cache_utils.py, DynamicCache"
RUN: Final = "transformers' forward without autograd, generation/utils.py _sample"


class Ran(NamedTuple):
    """The steps of a run: the prefill, then the first and the last decode step."""

    program: Program
    prefill: Step
    decodes: tuple[Step, ...]
    stages: tuple[Stage, ...]


class Item(NamedTuple):
    """A row as reported. `nbytes` counts in its component's total, `at_peak` in `total`."""

    component: str
    name: str
    nbytes: int
    at_peak: int
    shape: tuple[tuple[str, int], ...]
    dtype: str
    life: str
    formula: str
    basis: str
    source: str


class Fit(NamedTuple):
    """The verdict on a GPU. `needs` are the bytes of the device."""

    gpu: str
    capacity: int
    fits: bool | None
    """None if what is known fits, and a part is not known: vLLM's CUDA graphs, the compiled steps of a static cache."""
    headroom: int
    needs: int


@dataclass(frozen=True)
class Inferred:
    """The bytes that a model needs per GPU while it generates: those of the rank with the highest peak."""

    model: Model
    asked: Asked
    gpu: GPU | None
    run: Ran
    method: Method | None = None
    """How the weights are quantised."""

    # --- sizes

    def scale(self, batch: int | None = None) -> Scale:
        """Return the scale of a batch; None: the asked one."""
        return Scale(batch or self.asked.batch_size, DTYPES[self.asked.dtype], kv_dtype_of(self.asked))

    @cached_property
    def stage(self) -> Stage:
        """Return the pipeline stage with the highest peak."""
        return max(self.run.stages, key=lambda stage: self._peak_of(stage, self.run))

    def _peak_of(self, stage: Stage, run: Ran) -> int:
        size = self.scale().nbytes
        steps = (run.prefill, *run.decodes)
        return self.weights_of(stage) + max(highest(On(step, stage), size).nbytes for step in steps)

    def weight_rows(self, stage: Stage) -> list[tuple[str, Row]]:
        asked, dtype = self.asked, DTYPES[self.asked.dtype]
        if self.zero_inference is not None:
            row = Row(
                "parameters",
                GATHERED,
                (Dim("elements", self.zero_inference.gpu // dtype.itemsize),),
                dtype,
                basis="modelled",
            )
            return [("gathered", row._replace(source=PARTITIONED))]
        return weights(self.model, self.run.program, dtype, self.method, stage, asked.ep)

    @cached_property
    def zero_inference(self) -> Needs | None:
        """Return what ZeRO-Inference takes; None if the weights are on the GPU."""
        if self.asked.zero_inference == "none":
            return None
        from memcalc.inference.zero_inference import needs

        return needs(self.model, DTYPES[self.asked.dtype], self.asked.zero_inference)

    @cached_property
    def serving(self) -> Serving | None:
        """Return what a serving engine reserves, and the sequences that fit; None for transformers, or without a GPU."""
        if self.gpu is None or self.asked.engine == "transformers":
            return None
        from memcalc.inference.serving.served import serving_of

        return serving_of(self)

    @cached_property
    def times(self) -> Times | Unknown:
        """Return the time of the run, or why it is not known."""
        from memcalc.inference.timed import times_of

        return times_of(self, self.method, served=self.asked.engine != "transformers")

    def weights_of(self, stage: Stage) -> int:
        """Return the bytes of a stage's weights."""
        return sum(row.nbytes for _, row in self.weight_rows(stage))

    @cached_property
    def weights(self) -> int:
        return self.weights_of(self.stage)

    @property
    def prefill_peak(self) -> int:
        """Return the peak of the prefill."""
        return self.weights + highest(On(self.run.prefill, self.stage), self.scale().nbytes).nbytes

    @property
    def decode_peak(self) -> int | None:
        """Return the peak of all decode steps; None without new tokens."""
        size = self.scale().nbytes
        peaks = [highest(On(step, self.stage), size).nbytes for step in self.run.decodes]
        return self.weights + max(peaks) if peaks else None

    @property
    def total(self) -> int:
        """Return the most bytes alive."""
        return max(self.prefill_peak, self.decode_peak or 0)

    @property
    def _peak_step(self) -> Step:
        return max(
            (self.run.prefill, *self.run.decodes), key=lambda s: highest(On(s, self.stage), self.scale().nbytes).nbytes
        )

    @property
    def last(self) -> Step:
        """Return the last step of the run."""
        return self.run.decodes[-1] if self.run.decodes else self.run.prefill

    def _cached(self, component: str) -> int:
        scale = self.scale()
        return sum(scale.nbytes(row) for row in alive(On(self.last, self.stage)) if row.component == component)

    @property
    def kv_cache(self) -> int:
        """Return the bytes of keys and values that the cache holds after the last token."""
        return self._cached(KV)

    @property
    def state_cache(self) -> int:
        return self._cached(STATE)

    def kv_bytes_per_token(self, stage: Stage | None = None) -> int:
        """Return the bytes that one token of one sequence adds on the rank, in layers whose window is not full yet."""
        layers = (stage or self.stage).layers
        itemsize = kv_dtype_of(self.asked).itemsize
        kept = (one for layer, one in self.run.prefill.cached.items() if layer in layers)
        return (
            sum(one.keys[1].size * one.keys[2].size + one.values[1].size * one.values[2].size for one in kept)
            * itemsize
        )

    @property
    def kv_bytes_per_token_all_gpus(self) -> int:
        """Return the bytes that one token of one sequence takes on all GPUs of its group, repeated heads included."""
        return self.asked.tp * sum(self.kv_bytes_per_token(stage) for stage in self.run.stages)

    @property
    def rule_of_thumb(self) -> int:
        """Return 1.2 times the weights, as is often said."""
        return self.weights * 12 // 10

    @property
    def notes(self) -> list[str]:
        from memcalc.inference.notes import notes

        return notes(self)

    # --- rows

    @cached_property
    def items(self) -> list[Item]:
        """Return the rows: weights, then what the cache holds at the end, then everything else that is alive at the peak."""
        return [*self._weight_items, *self._run_items, *self._device_items]

    @property
    def _device_items(self) -> list[Item]:
        """Return what the device holds besides tensors: rows that add `total` up to what the device needs."""
        lost = self.needs() - self.besides - self.total
        workspace = shown.workspace_of(self.gpu)
        own = [
            ("rounding of blocks to 512 B", lost, "per block", "exact", "CUDACachingAllocator.cpp"),
            ("cuBLAS workspace", workspace, f"1 handle·{workspace} B", "modelled", "CublasHandlePool.cpp"),
        ]
        out = [Item("device", name, nbytes, 0, (), "", "always", *rest) for name, nbytes, *rest in own]
        return [
            *out,
            *(
                Item("device", i.name, i.nbytes, 0, (), "", "always", i.formula, i.basis, i.source)
                for i in self.outside
            ),
        ]

    @property
    def _weight_items(self) -> list[Item]:
        out: list[Item] = []
        for part, row in self.weight_rows(self.stage):
            shape = copied(named_sizes(row.shape, 1, 1), row.name, row.copies, len(self.stage.layers))
            formula = dims_formula(shape, row.dtype)
            out.append(
                Item(
                    "weights",
                    row.name,
                    row.nbytes,
                    row.nbytes,
                    shape,
                    str(row.dtype),
                    part,
                    formula,
                    row.basis,
                    row.source,
                )
            )
        return out

    @property
    def _run_items(self) -> list[Item]:
        scale, peak_step = self.scale(), self._peak_step
        place = highest(On(peak_step, self.stage), scale.nbytes).place
        at_peak = _counted(alive(On(peak_step, self.stage), place))
        at_end = _counted(row for row in alive(On(self.last, self.stage)) if row.component in (KV, STATE))
        out: list[Item] = []
        for key in [*at_end, *(key for key in at_peak if key not in at_end)]:
            row = key.row
            if row.component == "parameters":
                continue
            one = scale.nbytes(row)
            kept, high = at_end.get(key, 0), at_peak.get(key, 0)
            shape = copied(named_sizes(row.shape, scale.batch, 1), key.name, kept or high, len(self.stage.layers))
            component = row.component if row.component in (KV, STATE, "buffers") else "temporaries"
            nbytes = one * kept if component in (KV, STATE) else one * high if component == "buffers" else 0
            source = CACHES if component in (KV, STATE) else RUN
            life = "until the end" if kept else "at the peak"
            dtype = scale.dtype(row)
            out.append(
                Item(
                    component,
                    key.name,
                    nbytes,
                    one * high,
                    shape,
                    str(dtype),
                    life,
                    dims_formula(shape, dtype),
                    "exact",
                    source,
                )
            )
        return out

    # --- the device

    def needs(self, batch: int | None = None) -> int:
        """Return the bytes of the device that the run needs: tensors, their rounding, cuBLAS's workspace, CUDA context and
        NCCL."""
        size = self.scale(batch).nbytes
        most = 0
        for step in (self.run.prefill, *self.run.decodes):
            on = On(step, self.stage)
            high = highest(on, size)
            most = max(most, high.nbytes + rounding(alive(on, high.place), size))
        return self.weights + most + self.besides

    @property
    def besides(self) -> int:
        """Return the bytes of the device that do not depend on the batch, besides the weights."""
        workspace = shown.workspace_of(self.gpu)
        return workspace + sum(item.nbytes for item in self.outside)

    @property
    def outside(self) -> list[Any]:
        return shown.device_items(self.asked.pp * max(self.asked.tp, self.asked.ep), self.gpu)

    @cached_property
    def fit(self) -> Fit | None:
        if self.gpu is None:
            return None
        if self.serving is not None:
            return _fit_of(self.serving, self.gpu, self.asked.batch_size)
        needs, capacity = self.needs(), self.gpu.capacity
        fits = None if needs <= capacity and self.asked.cache == "static" else needs <= capacity
        return Fit(self.gpu.name, capacity, fits, capacity - needs, needs)

    @property
    def fits(self) -> bool | None:
        """Tell whether the GPU has room; None without a GPU."""
        return None if self.fit is None else self.fit.fits

    @cached_property
    def max_sequences(self) -> int | None:
        """Return the largest batch of such sequences that the GPU has room for; None without a GPU."""
        if self.gpu is None:
            return None
        if self.serving is not None:
            return self.serving.sequences
        from memcalc.inference.largest import largest_batch

        return largest_batch(self)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON document."""
        from memcalc.inference.document import document

        return document(self)


def _fit_of(serving: Serving, gpu: GPU, batch: int) -> Fit:
    """Return whether a batch fits into the cache of a serving engine; what it needs are the reserved bytes that it fills."""
    each = serving.cache / serving.max_concurrency if serving.max_concurrency else serving.bytes_per_sequence
    headroom = round(serving.cache - batch * each)
    fits = batch <= serving.sequences
    if fits and not serving.is_known:
        return Fit(gpu.name, gpu.capacity, None, headroom, serving.reserved - headroom)
    return Fit(gpu.name, gpu.capacity, fits, headroom, serving.reserved - headroom)


class _Key(NamedTuple):
    name: str
    sizes: tuple[tuple[str, int], ...]
    row: StorageRow

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and self[:2] == other[:2] and _kind(self.row) == _kind(other.row)

    def __hash__(self) -> int:
        return hash((self[:2], _kind(self.row)))


def _kind(row: StorageRow) -> tuple[str, str]:
    return row.component, row.dtype.name


def _counted(rows: Any) -> dict[_Key, int]:
    """Count equal blocks of all layers."""
    counts: Counter[_Key] = Counter()
    for row in rows:
        counts[_Key(row.label, tuple((dim.name, dim.size) for dim in row.shape), row)] += 1
    return counts
