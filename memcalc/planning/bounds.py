"""The least that a layout needs, without a run of its own.

Two bounds, each never above the exact estimate (tests/planning/test_search.py):

- From the model alone: the bytes of parameters, gradients and optimizer states of a GPU, and what one GPU that has the whole
  model computes and saves for a sequence (memcalc/planning/alone.py), shared equally by all GPUs, with the bubble that a
  pipeline has at least.
- From a run without a pipeline that has the same tp, cp, ep and recomputation (`Probe`): what a layer saves for backward,
  for each micro-batch that a stage has in flight, and the seconds of all kernels of a micro-batch.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final, NamedTuple

from memcalc.core.dims import numel
from memcalc.errors import InputError
from memcalc.estimation.report import Report
from memcalc.estimation.sizing import SizeOnly
from memcalc.pipelining.orders import GATHERED_AT_ONCE
from memcalc.pipelining.schedules import NAMES
from memcalc.planning.alone import Alone, alone_of
from memcalc.planning.probes import EXACT as _EXACT
from memcalc.planning.stages import Least, Split, in_flight, least_of, least_seconds, together
from memcalc.setup.resolved import resolve

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memcalc.families.base.module import Weight
    from memcalc.families.base.program import Program
    from memcalc.inputs.gpu import GPU
    from memcalc.inputs.model import Model
    from memcalc.inputs.options import Options
    from memcalc.planning.layouts import Degrees, Layout
    from memcalc.planning.probes import Probe

_WAITING: Final = ("gpipe", "1f1b", "interleaved")
"""The schedules in which a stage waits for the forwards and backwards of those before it."""
_HALF: Final = 2
"""The bytes of a number in 16 bits."""
_SHORT: Final = ("bf16", "fp16", "fp8")
"""The dtypes of gradients that have 16 bits."""
_MANY: Final = 10**12
"""The parameters of a model whose states are measured: so many that no constant counts."""
_WHOLE: Final = 1 - 1e-6
"""The share of a time that sizes have which are rounded to whole bytes."""
_STATES: Final = ("parameters", "gradients", "optimizer_states")


class Bound(NamedTuple):
    """The least seconds of a step and the least bytes of its peak."""

    seconds: float
    nbytes: int
    row: str
    """The name of what most of the bytes are."""


NO_BOUND: Final = Bound(0.0, 0, "")


class States(NamedTuple):
    """The bytes of model states for each parameter of a GPU's slice: those that it holds whole, and those that a group of
    ranks shards."""

    whole: float
    sharded: float
    largest: str


def states_of(base: Options, engine: str, zero: int, pipeline: bool, *, components: tuple[str, ...]) -> States:
    """Return the bytes of some components for each parameter, as a bare number of parameters has them."""
    few, many = (_measured(base, engine, zero, pipeline, ranks, components) for ranks in (2, 4))
    sums = sum(few.values()), sum(many.values())
    sharded = 4 * (sums[0] - sums[1])
    largest = max(few, key=lambda name: few[name]) if few else ""
    return States(sums[0] - sharded / 2, sharded, largest.replace("_", " "))


def _measured(
    base: Options, engine: str, zero: int, pipeline: bool, ranks: int, components: tuple[str, ...]
) -> dict[str, float]:
    stages = 2 if pipeline and engine == "deepspeed" else 1
    if engine == "none":
        ranks = stages = 1
    options = base._replace(
        engine=engine, zero=zero, gpus=ranks * stages, pp=stages, tp=1, cp=1, ep=1, etp=None, dp=None, shard_group=None,
        sequence_parallel=None, micro_batch_size=1, global_batch_size=None, seq_len=None, recompute="none", gpu=None,
        network_gbps=None, gemm_efficiency=None, attention_efficiency=None, memory_efficiency=None, schedule="1f1b",
        virtual_stages=1, first_stage_layers=None, last_stage_layers=None, kernels=None, attention=None,
        cross_entropy=None, cp_comm_type=None, padded=False, expert_imbalance=1.0, pp_rank=None, recompute_layers=None,
    )  # fmt: skip
    try:
        report = Report(SizeOnly(_MANY), resolve(options, None))
    except InputError:  # an optimizer whose states depend on shapes
        return dict.fromkeys(components, 0.0)
    sums = dict.fromkeys(components, 0.0)
    for item in report.items:
        if item.component in sums:
            sums[item.component] += item.at_peak * stages / _MANY
    return sums


class Shares(NamedTuple):
    """The parts of an average rank's states that a rank has at least."""

    trained: float
    frozen: float


class Floors:
    """The bounds that need no run of a layout's own."""

    def __init__(self, model: Model, base: Options, gpu: GPU) -> None:
        self._model, self._base, self._gpu = model, base, gpu
        self._parameters = model.trainable_parameters
        frozen = [(_frozen_bytes(model.program, one), one.packing is not None) for one in model.program.weights()]
        self._frozen = sum(nbytes for nbytes, _ in frozen)
        self._frozen_codes = sum(nbytes for nbytes, is_packed in frozen if is_packed)
        self._states: dict[tuple[str, int, bool, tuple[str, ...]], States] = {}
        self._alone: dict[tuple[str, str, bool], Alone] = {}
        self._layers: dict[tuple[int, bool], Least] = {}

    def of_degrees(self, degrees: Degrees) -> Bound:
        """Return the bound of all layouts of some degrees: from the states that are sharded most, and the time with the most and
        smallest turns of a pipeline."""
        chunks, schedule = degrees.chunks[-1]
        first = degrees.first._replace(
            virtual_stages=chunks, schedule=schedule, shard_group=None, micro_batch_size=degrees.micro_batches[0]
        )
        states, row = self._all_states(first, gradients=True)
        alike = (first._replace(recompute=one) for one in degrees.recompute)
        seconds = min(self._seconds(one, self._alone_of(one)) for one in alike)
        return Bound(seconds, states, row)

    def bound(self, layout: Layout) -> Bound:
        """Return the bound of a layout from the model alone."""
        alone, many = self._alone_of(layout), self._micro_batches(layout)
        states, row = self._all_states(layout, gradients=True)
        whole = self._whole_gradients(layout, many) + self._whole_weights(layout, many)
        whole += self._whole_frozen_weights(layout, many)
        if whole and self._all_states(layout, gradients=False)[0] + whole > states:
            states, row = self._all_states(layout, gradients=False)[0] + whole, "gradients and weights that are whole"
        seconds = self._seconds(layout, alone)
        share = layout.micro_batch_size / (layout.tp * layout.cp)
        saved = Least(alone.saved.window * share, alone.saved.layer * share, alone.saved.period)
        return self._larger(Bound(seconds, states, row), layout, saved, many)

    def _seconds(self, layout: Layout, alone: Alone) -> float:
        """Return the least seconds of a layout, of what the whole model takes for a sequence on one GPU. Of attention, a ring
        leaves out the blocks above the diagonal."""
        each = alone.seconds - (alone.attention / 2 if layout.cp > 1 else 0.0)
        mean = each * (self._base.global_batch_size or 1) / layout.gpus
        return least_of_pipeline(layout, mean, self._micro_batches(layout))

    def _all_states(self, layout: Layout, *, gradients: bool) -> tuple[int, str]:
        """Return the least bytes of a GPU's model states, frozen weights among them, and the name of the largest."""
        trained, row = self.states(layout, gradients=gradients)
        frozen = self._frozen_states(layout)
        return trained + frozen, row if trained >= frozen else "model states (parameters)"

    def states(self, layout: Layout, *, gradients: bool) -> tuple[int, str]:
        """Return the least bytes of a GPU's model states of what trains, and the name of the largest of them."""
        of = self._for_each(layout, tuple(name for name in _STATES if gradients or name != "gradients"))
        nbytes = self._on_a_gpu(layout, self._parameters * of.whole, self._parameters * of.sharded)
        return nbytes, f"model states ({of.largest})"

    def _for_each(self, layout: Layout, components: tuple[str, ...]) -> States:
        """Return the bytes of some components for each parameter that trains."""
        key = layout.engine, layout.zero, layout.pp > 1, components
        if key not in self._states:
            self._states[key] = states_of(self._base, *key[:3], components=components)
        return self._states[key]

    def _frozen_states(self, layout: Layout) -> int:
        """Return the least bytes of a GPU's frozen weights, which are held and sharded as those that train."""
        if not self._frozen:
            return 0
        of = self._for_each(layout, ("parameters",))
        each = of.whole + of.sharded
        if not each:
            return 0
        plain = (self._frozen - self._frozen_codes) / _HALF
        if self._frozen_codes:  # what is plain beside codes has 16 bits, whatever trains
            plain *= min(1.0, _HALF / each)
        whole, sharded = (part * (plain + self._frozen_codes / each) for part in (of.whole, of.sharded))
        return self._on_a_gpu(layout, whole, sharded)

    @staticmethod
    def _on_a_gpu(layout: Layout, whole: float, sharded: float) -> int:
        """Return the bytes of a GPU, of those of the model: some that a group of ranks shards, and some that it does not."""
        replicas = layout.dp * layout.cp // (layout.shard_group or layout.dp * layout.cp)
        return int((whole / (layout.tp * layout.pp * layout.ep) + sharded * replicas / layout.gpus) * _EXACT)

    def _alone_of(self, layout: Layout) -> Alone:
        """Return what the whole model takes for a sequence on one GPU, with a layout's kernels."""
        legacy = layout.engine == "deepspeed" and max(layout.tp, layout.pp) > 1
        key = layout.engine, layout.recompute, legacy
        if key not in self._alone:
            self._alone[key] = alone_of(self._model, self._base, self._gpu, *key)
        found = self._alone[key]
        if legacy and layout.tp > 1:  # the run had one of two slices
            saved = found.saved._replace(window=2 * found.saved.window, layer=2 * found.saved.layer)
            return found._replace(seconds=2 * found.seconds, attention=2 * found.attention, saved=saved)
        return found

    def _micro_batches(self, layout: Layout) -> int:
        return max(1, (self._base.global_batch_size or 1) // (layout.dp * layout.micro_batch_size))

    def shared(self, layout: Layout, run: Probe, other: Layout) -> float:
        """Return the least seconds of a layout from the run of another one, whose micro-batch is no smaller and whose sequences
        are shared by fewer ranks.

        A sequence takes no longer in a larger micro-batch, and a part of it no less than its part of the seconds: kernels and
        collectives share latencies and weights, and tiles of experts' rows are fuller.
        """
        if not self._runs_alike(layout):
            return 0.0
        many = self._micro_batches(layout)
        parts = layout.cp // other.cp
        each = (run.seconds - (run.attention / 2 if parts > 1 else 0.0)) / (other.micro_batch_size * parts)
        return least_of_pipeline(layout, many * layout.micro_batch_size * each / layout.pp, many) * _WHOLE

    def _runs_alike(self, layout: Layout) -> bool:
        """Tell whether a run without a pipeline has the kernels of all stages: experts in FSDP2's stages run others."""
        return layout.engine != "fsdp2" or layout.pp == 1 or self._model.program.routed[1] == 1

    def probed(self, layout: Layout, probe: Probe) -> Bound:
        """Return the bound of a layout from a run without a pipeline."""
        floor = self.bound(layout)
        many = self._micro_batches(layout)
        program = self._model.program
        alike = self._runs_alike(layout)
        mean = many * probe.seconds / layout.pp if alike else 0.0
        seconds = max(floor.seconds, least_of_pipeline(layout, mean, many))
        if layout.pp > 1 and layout.schedule in _WAITING and alike and program.one_stack:
            stages = least_seconds(layout, self._split(layout), probe.layers, probe.head, many)
            seconds = max(seconds, stages * _EXACT)
        return self._larger(floor._replace(seconds=seconds), layout, probe.saved, many)

    def _larger(self, least: Bound, layout: Layout, of: Least, many: int) -> Bound:
        """Return a bound with what the layers save for backward, if that is more. `of`: the bytes that a layer saves."""
        kept, row = self.states(layout, gradients=layout.engine == "megatron")
        frozen = self._frozen_states(layout)
        if many >= 2 * layout.pp:  # a forward follows the first backward, with as many micro-batches in flight
            kept += self._whole_gradients(layout, many) + self._whole_weights(layout, many)
            frozen += self._whole_frozen_weights(layout, many)
        elif layout.pp == 1 or layout.zero == 2:
            kept += self._whole_weights(layout, many)
            frozen += self._whole_frozen_weights(layout, many)
        row = row if kept >= frozen else "model states (parameters)"
        for shares, saved in self._saved(layout, of, many):
            held = int((kept * shares.trained + frozen * shares.frozen) * _EXACT)
            if saved and held + saved > least.nbytes:
                least = least._replace(nbytes=held + saved, row="saved activations" if saved > held else row)
        return least

    def _whole_gradients(self, layout: Layout, many: int) -> int:
        """Return the least bytes of the gradients that FSDP2 has whole, as it reduces them with the last micro-batch.

        A pipeline of several chunks has those of one at least: in a single round of micro-batches a chunk is reduced before the
        next one's backward begins.
        """
        base, piped = self._base, layout.pp > 1
        if layout.engine != "fsdp2" or (not piped and (many == 1 or base.sync_each_micro_batch)):
            return 0
        is_short = base.grad_dtype in _SHORT or (base.grad_dtype is None and base.precision in _SHORT)
        chunks = layout.virtual_stages if many < 2 * layout.pp else 1
        return self._sliced(layout, (_HALF if is_short else 2 * _HALF) / chunks)

    def _whole_weights(self, layout: Layout, many: int) -> int:
        """Return the least bytes of the weights that FSDP2 has gathered at once: ZeRO-2's after forward, and those of a stage
        after a backward that is not the last one."""
        return self._sliced(layout, _HALF * _gathered_part(layout, many))

    def _whole_frozen_weights(self, layout: Layout, many: int) -> int:
        """Return the least bytes of the frozen weights that FSDP2 has gathered at once: those of layers in which others train,
        as it gathers no layer below them in backward."""
        if not self._of_layers(1, trained=True).layer:
            return 0
        return int(self._frozen * _gathered_part(layout, many) * _EXACT / (layout.tp * layout.pp * layout.ep))

    def _sliced(self, layout: Layout, nbytes: float) -> int:
        """Return the bytes of an average GPU's slice of all parameters that train, each of `nbytes`."""
        return int(nbytes * self._parameters * _EXACT / (layout.tp * layout.pp * layout.ep))

    def _saved(self, layout: Layout, of: Least, many: int) -> Iterator[tuple[Shares, int]]:
        """Yield for some ranks their shares of an average rank's states, at least, and the bytes that their layers have saved
        at once."""
        if layout.schedule in NAMES or (layout.pp > 1 and not self._model.program.one_stack):
            # their stages are counted by the estimate alone
            return
        if layout.pp == 1:
            yield Shares(1.0, 1.0), int(together([self._model.layers], of.period).least(of))
            return
        pipeline = layout.schedule, layout.pp, layout.virtual_stages
        for one in in_flight(self._split(layout), *pipeline, of.period, many):
            trained, frozen = (
                min(1.0, one.own.least(self._of_layers(of.period, trained=trained)) * layout.pp / whole)
                if whole
                else 0.0
                for trained, whole in ((True, self._parameters), (False, self._frozen))
            )
            yield Shares(trained, frozen), int(one.saved.least(of))

    def _of_layers(self, period: int, *, trained: bool) -> Least:
        """Return the parameters of a layer that train, or the bytes of its frozen weights, at least."""
        key = period, trained
        if key not in self._layers:
            sizes, program = Counter[int](), self._model.program
            for weight in program.weights():
                if weight.layer is not None:
                    trains = numel(weight.shape)[0] if program.wants_gradient(weight) else 0
                    sizes[weight.layer] += trains if trained else _frozen_bytes(program, weight)
            self._layers[key] = least_of([sizes[layer] for layer in sorted(sizes)], period)
        return self._layers[key]

    def _split(self, layout: Layout) -> Split:
        base = self._base
        return Split(self._model.layers, base.first_stage_layers, base.last_stage_layers, layout.engine)


def _frozen_bytes(program: Program, weight: Weight) -> int:
    """Return the least bytes of a frozen weight, in 16 bits or as its codes; 0 for one that trains."""
    if program.wants_gradient(weight):
        return 0
    if weight.packing is None:
        return _HALF * numel(weight.shape)[0]
    codes = weight.packing.stored(weight.shape)[0]
    return numel(codes.shape)[0] * codes.dtype.itemsize


def _gathered_part(layout: Layout, many: int) -> float:
    """Return the part of a stage's weights that FSDP2 has gathered at once, at least.

    ZeRO-2 has gathered them before the first backward, of several chunks those that torch's schedules run next. ZeRO-3 in a
    pipeline keeps those of a chunk after a backward that is not the last one.
    """
    if layout.engine != "fsdp2" or (layout.zero == 3 and (layout.pp == 1 or many == 1)):
        return 0.0
    chunks = GATHERED_AT_ONCE if layout.zero == 2 else 1
    return min(1.0, chunks / layout.virtual_stages)


def least_of_pipeline(layout: Layout, mean: float, many: int) -> float:
    """Return the least seconds of a step whose stages compute for `mean` seconds on average.

    A stage r that is the last one to matter waits for the first chunks of the stages before it and for their backwards:
    seconds >= t_r + sum of t_i / (m·v) for i < r. Of all stages with the mean t the fastest have t_i falling with i. The
    first of several chunks can be a smaller part of its rank's time; half of the equal part is counted.
    """
    if layout.pp == 1 or layout.schedule not in _WAITING:
        return mean * _EXACT
    turns = many * (layout.virtual_stages if layout.virtual_stages == 1 else 2 * layout.virtual_stages)
    return layout.pp * mean / turns / (1 - (1 - 1 / turns) ** layout.pp) * _EXACT
