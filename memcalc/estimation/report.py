"""The report of one setup: its rows, and every total as a sum of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

from memcalc.core.collector import without_collections
from memcalc.core.dims import evaluate, numel
from memcalc.core.rows import COMPONENTS, Item, Row, copied, dims_formula, named_sizes
from memcalc.device.on_device import OnDevice
from memcalc.engines.rank import Rank
from memcalc.engines.ranks import ranks
from memcalc.estimation.names import with_names_of_their_own
from memcalc.estimation.peaks import peaks_on
from memcalc.estimation.rank_peaks import Key, RankPeaks, Sized, buffers_after_backward
from memcalc.inputs.model import Model
from memcalc.layout.collectives import Collective, wire_bytes
from memcalc.megatron.schedules import State
from memcalc.setup.setup import Setup
from memcalc.tasks import ONLINE
from memcalc.tasks.tasked import tasked

if TYPE_CHECKING:
    from memcalc.device.verdict import Verdict
    from memcalc.estimation.compute import Computed
    from memcalc.estimation.rollout import Rollout
    from memcalc.hardware.cost import Cost, Unknown
    from memcalc.inputs.file_options import FromFiles
    from memcalc.inputs.gpu import GPU
    from memcalc.offload.host import HostItem
    from memcalc.timing.kernels import Unknown as NoTime
    from memcalc.timing.step import StepTime


PHASES: Final = ("forward", "backward", "step")
ROLLOUT: Final = "rollout"
"""The phase before a step that trains on what the model has generated."""


class Report(OnDevice):
    """The estimate of one setup. Numbers are bytes of the worst rank. Rows are computed at the first use."""

    def __init__(
        self,
        model: Any,
        setup: Setup,
        peaks: RankPeaks | None = None,
        given: Mapping[str, Any] | None = None,
        files: FromFiles | None = None,
        *,
        fullest: bool = False,
    ) -> None:
        """Report on the worst rank of a setup, or on the rank of `peaks`. `fullest`: `rank_peaks` and `each_rank` may lack ranks
        that are no fuller than others.

        `given` has the options that `setup` was resolved from, to tell them from defaults; None if `setup` was not resolved
        from options. `files`: what configuration files said of them; None without one.
        """
        self.model = model = tasked(model, setup) if isinstance(model, Model) else model
        self.setup, self.given, self.files = setup, given, files
        self.gpu: GPU | None = None
        if setup.gpu is not None:
            from memcalc.inputs.gpu import load_gpu

            self.gpu = load_gpu(setup.gpu)
        self._batch, self._seq = setup.micro_batch_size, setup.tokens_per_part
        self._peaks_of_ranks = [peaks] if peaks else self._worst_of_stages(ranks(model, setup, fullest=fullest))
        self.rank_peaks = {one.rank.number: max(one.phases.values()) for one in self._peaks_of_ranks}
        self._take(max(self._peaks_of_ranks, key=lambda one: self.rank_peaks[one.rank.number]))

    def _worst_of_stages(self, found: Iterable[Rank]) -> list[RankPeaks]:
        """Return for each pipeline stage its rank with the highest peak; of equal peaks, the rank with the highest in
        backward."""
        worst: dict[int, RankPeaks] = {}
        for one in map(self.find, found):
            before = worst.get(one.rank.number)
            if before is None or one.highest() > before.highest():
                worst[one.rank.number] = one
        return list(worst.values())

    def find(self, rank: Rank) -> RankPeaks:
        """Return a rank with its peaks, as `Report` takes it."""
        return peaks_on(rank, self._batch, self._seq)

    def _take(self, peaks: RankPeaks) -> None:
        """Make the rank of `peaks` the one that is reported."""
        self.rank, self.phases, self._at, self._last = peaks
        self.peak_phase = max(PHASES, key=lambda phase: self.phases[phase])
        self.peak = self.phases[self.peak_phase]
        self.rollout = self._find_rollout()
        if self.rollout is not None and self.rollout.peak > self.peak:
            self.peak_phase, self.peak = ROLLOUT, self.rollout.peak
            self.rank_peaks[self.rank.number] = self.peak

    def _find_rollout(self) -> Rollout | None:
        """Return what is done before a step that trains on what the model has generated; None without that."""
        if self.setup.task not in ONLINE:
            return None
        from memcalc.estimation.rollout import rollout_of  # which few setups have

        return rollout_of(self.model, self.setup, self.rank)

    @property
    def is_of_step(self) -> bool:
        return self.peak_phase != ROLLOUT

    @property
    def reference_peak(self) -> int | None:
        """Return the peak of a reference model's forward, a part of the phase forward. Return None without such a forward,
        or with an engine whose blocks are played over the run."""
        rank = self.rank
        if self.setup.precompute_reference is not False or rank.holdings.over is not None:
            return None
        of = self._batch, self._seq
        most = max(
            evaluate(moment.poly, *of) + (moment.gradients if rank.holdings.keeps_gradients else 0)
            for moment in rank.profiles[0].reference
        )
        return evaluate(rank.sums.always, *of) + evaluate(rank.sums.forward, *of) + most

    def _waiting_rows(self, state: State) -> list[Row]:
        """Return the rows of what is in flight in a state, as `memcalc.estimation.peaks` counts it."""
        between = self.rank.between
        return [
            *([between._replace(copies=state.between)] if between and state.between else []),
            *self._saved_by_others(state),
        ]

    def _saved_by_others(self, state: State) -> list[Row]:
        return [
            row._replace(copies=row.copies * count)
            for count, profile in zip(state.in_flight, self.rank.profiles, strict=True)
            if count
            for row in profile.rows(profile.saved)
            if row.component != "gradients"
        ]

    def _saved_rows(self) -> list[Row]:
        """Return the rows that are saved at the end of a forward by all micro-batches in flight, where these bytes are
        highest."""
        forwards = [state for state in self.rank.states if state.kind == "forward"]
        if not forwards:
            return []

        def saved(state: State) -> int:
            own = [evaluate(profile.saved.poly, self._batch, self._seq) for profile in self.rank.profiles]
            return own[state.chunk] + sum(count * each for count, each in zip(state.in_flight, own, strict=True))

        most = max(forwards, key=saved)
        profile = self.rank.profiles[most.chunk]
        return [*profile.rows(profile.saved), *self._saved_by_others(most)]

    @property
    def in_flight(self) -> int:
        """Return the most forwards of a chunk whose saved activations exist at once, with the running one; 0 without a run."""
        if self.rank.in_flight is not None:
            return self.rank.in_flight
        return max((sum(state.in_flight) + 1 for state in self.rank.states if state.kind == "forward"), default=0)

    def each_rank(self) -> list[Report]:
        """Return a report for every pipeline rank, or for the one that `--pp-rank` asks for."""
        return [
            self if found.rank is self.rank else Report(self.model, self.setup, found) for found in self._peaks_of_ranks
        ]

    def with_setup(self, setup: Setup) -> Report:
        return Report(self.model, setup)

    # --- rows

    @cached_property
    def _left(self) -> list[Row]:
        return buffers_after_backward(self.rank)

    def rows_at(self, phase: str) -> list[Row]:
        """Return every row that is alive at the peak of a phase."""
        if phase == ROLLOUT and self.rollout is not None:
            return self.rollout.rows
        held = self.rank.holdings
        state, moment, flushed = self._at[phase]
        rows = list(held.always)
        if phase == "backward" and moment is None and self._last:
            return [*rows, *self._last, *self._left]
        rows += {"forward": held.forward, "backward": held.backward, "step": (*held.step, *self._left)}[phase]
        if flushed and held.flush is not None:
            rows += held.flush.rows
        if moment is not None and state is not None:
            profile = self.rank.profiles[state.chunk]
            rows += [r for r in profile.rows(moment) if held.keeps_gradients or r.component != "gradients"]
            rows += self._waiting_rows(state)
        return rows

    @cached_property
    @without_collections()
    def items(self) -> list[Item]:
        """Return every row, evaluated: its bytes of its component's total, and its bytes at the peak."""
        at_peak = self._by_key(self.rows_at(self.peak_phase))
        by_phase = [self._by_key(self.rows_at(phase)) for phase in PHASES]
        by_phase += [
            self._by_key([*self.rank.holdings.always, *rows, *self._left]) for rows in self.rank.holdings.after_backward
        ]
        parts: dict[Key, Sized] = {}
        for component in COMPONENTS[:-1]:
            if component == "saved_activations":
                parts.update(self._by_key(row for row in self._saved_rows() if row.component == component))
            else:
                of_one = [{k: v for k, v in rows.items() if k.component == component} for rows in by_phase]
                parts.update(max(of_one, key=lambda rows: sum(sized.nbytes for sized in rows.values())))
        items = [self._item(key, parts.get(key), at_peak.get(key)) for key in dict.fromkeys([*parts, *at_peak])]
        order = {component: i for i, component in enumerate(COMPONENTS)}
        items.sort(key=lambda item: (order[item.component], -item.nbytes, -item.at_peak))
        return with_names_of_their_own(items)

    def _by_key(self, rows: Iterable[Row]) -> dict[Key, Sized]:
        out: dict[Key, Sized] = {}
        for row in rows:
            key = Key(row.component, row.name, named_sizes(row.shape, self._batch, self._seq), row.dtype)
            before = out[key].nbytes if key in out else 0
            out[key] = Sized(row, before + row.bytes_at(self._batch, self._seq))
        return out

    def _item(self, key: Key, part: Sized | None, peak: Sized | None) -> Item:
        row = part.row if part else peak.row if peak else None
        assert row is not None
        at_peak = peak.nbytes if peak else 0
        nbytes = part.nbytes if part else at_peak if key.component == "temporaries" else 0
        each = evaluate(numel(row.shape)[1], self._batch, self._seq) * row.dtype.itemsize
        copies = max(nbytes, at_peak) // each if each else 1
        shape = copied(key.sizes, row.name, copies, self.model.layers)
        formula = dims_formula(shape, row.dtype)
        blocks = at_peak // each if each and at_peak else 1
        return Item(
            row.component,
            row.name,
            nbytes,
            at_peak,
            shape,
            row.dtype.name,
            row.life,
            formula,
            row.basis,
            row.source,
            blocks,
        )

    @property
    def traced(self) -> str:
        """Return the source of the trace, for a model without a program of its own; '' otherwise."""
        return self.model.program.source if isinstance(self.model, Model) else ""

    # --- totals

    def total(self, component: str) -> int:
        """Return the most bytes of a component at any time of a step; of saved activations, at the end of forward."""
        return sum(item.nbytes for item in self.items if item.component == component)

    @property
    def uncounted(self) -> str:
        """Return the part of a step's memory whose bytes no rule gives; "" if there is none."""
        return "" if self.states_only else self.model.program.uncounted

    @cached_property
    @without_collections()
    def verdict(self) -> Verdict | None:
        """Return the verdict of the worst of this pipeline rank, the first and the last; None without a GPU."""
        if self.gpu is None:
            return None
        from memcalc.device.verdict import verdict_of

        return verdict_of(self._fullest, self.gpu.capacity)

    @cached_property
    def is_fit(self) -> bool:
        """Return True if `fits` is, without what tells the other answers apart."""
        if self.gpu is None or "verdict" in self.__dict__:
            return self.fits is True
        from memcalc.device.verdict import is_fit

        return is_fit(self._fullest, self.gpu.capacity)

    @cached_property
    def first_look(self) -> Verdict | None:
        """Return the verdict from one play of each rank (memcalc.device.verdict.first_look_of); None without a GPU."""
        if self.gpu is None:
            return None
        from memcalc.device.verdict import first_look_of

        return first_look_of(self._fullest, self.gpu.capacity)

    @cached_property
    def _fullest(self) -> list[Report]:
        """Return the reports of this pipeline rank, the first and the last, each rank once."""
        ends = (found for found in self._peaks_of_ranks if found.rank.number in (0, self.setup.pp - 1))
        others = [Report(self.model, self.setup, found) for found in ends if found.rank is not self.rank]
        return [self, *others]

    @property
    def fits(self) -> bool | None:
        """Return True if the step runs on the GPU; None without a GPU, or if it is not known."""
        return None if self.verdict is None else self.verdict.fits

    @property
    def headroom(self) -> int | None:
        """Return the bytes of the GPU to spare, negative if the step does not fit; None if `fits` is None."""
        return None if self.verdict is None or self.fits is None else self.verdict.headroom

    @cached_property
    def host(self) -> list[HostItem]:
        """Return the rows of a node's host memory; none if nothing is offloaded."""
        if self.setup.offload_activations != "none":
            from memcalc.offload import activations
            from memcalc.offload.host import host_items

            ranks, run = min(self.setup.gpus, self.setup.gpus_per_node), self.rank.profiles[0].run
            return host_items(activations.on_host(run.copied, ranks, run.kernels.basis))
        if self.setup.offload_modules is not None:
            from memcalc.engines.megatron.offloaded import on_host as of_groups
            from memcalc.offload.host import host_items

            return host_items(of_groups(self.rank, self.setup))
        if not self.setup.offloads and not self.setup.servers:
            return []
        from memcalc.engines.host import on_host
        from memcalc.offload.host import host_items

        return host_items(on_host(self.model, self.setup))

    # --- communication

    @cached_property
    def collectives(self) -> list[Collective]:
        """Return the collectives of this rank in one optimizer step, as the engine really sends them."""
        return self.rank.collectives(self.setup)

    @cached_property
    def textbook(self) -> list[Collective]:
        """Return the collectives of one optimizer step as the papers count them; empty if the engine sends just these."""
        return self.rank.textbook()

    @cached_property
    def costs(self) -> list[Cost | Unknown]:
        """Return the time of every collective, or what is not known about it; empty without a GPU."""
        if self.gpu is None:
            return []
        from memcalc.hardware.cost import cost_of

        return [cost_of(collective, self.setup, self.gpu) for collective in self.collectives]

    # --- compute

    @cached_property
    def computed(self) -> list[Computed]:
        """Return the matrix products of one optimizer step; none for a bare number of parameters."""
        from memcalc.estimation.compute import computed

        return computed(self.rank.profiles, self.setup, self.rank.on_paper)

    @property
    def flops(self) -> dict[str, int]:
        """Return the FLOPs of forward, backward and recomputation, and their sum as "total"."""
        from memcalc.estimation.compute import per_phase

        return per_phase(self.computed)

    @property
    def seconds_at_peak(self) -> float | None:
        """Return the seconds of the step's products at the GPU's data-sheet rates; None without a GPU, a model or a known
        rate."""
        from memcalc.estimation.compute import seconds_at_peak

        return seconds_at_peak(self.computed, self.gpu) if self.computed else None

    @cached_property
    def time(self) -> StepTime | NoTime:
        """Return the time of a step on the GPU, or the reason why it is not known."""
        from memcalc.timing.step import step_time

        return step_time(self)

    def per_layer(self) -> tuple[int, int]:
        """Return the payload and wire bytes of one transformer layer: its collectives, and its share of every collective over
        parameters or gradients. Both are the mean of the rank's layers."""
        if not self.collectives or not self.rank.layers:
            return 0, 0
        own = [c for c in self.collectives if c.layer is not None and c.shares is None]
        payload, wire = (sum(sizes) // self.rank.layers for sizes in ([c.payload for c in own], [c.wire for c in own]))
        for c in self.collectives:
            if c.shares is not None:
                part = c.payload * c.shares.of_layers // (c.shares.whole * self.rank.layers)
                payload, wire = payload + part, wire + wire_bytes(c.collective, c.group_size, part)
        return payload, wire

    @without_collections()
    def to_dict(self) -> dict[str, Any]:
        """Return the report as the JSON document (memcalc/report/document.py)."""
        from memcalc.report.document import document

        return document(self)
