"""The report of one setup: its rows, and every total as a sum of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from memcalc.core.collector import without_collections
from memcalc.core.dims import ZERO, evaluate, numel
from memcalc.core.dtypes import DType
from memcalc.core.rows import COMPONENTS, Component, Item, Row, copied, dims_formula, named_sizes
from memcalc.device.on_device import OnDevice
from memcalc.engines.ranks import Rank, ranks
from memcalc.estimation.compute import Computed, computed, per_phase, seconds_at_peak
from memcalc.estimation.names import with_names_of_their_own
from memcalc.inputs.model import Model
from memcalc.layout.collectives import Collective, wire_bytes
from memcalc.megatron.schedules import State
from memcalc.setup.setup import Setup
from memcalc.tape.profile import Moment

if TYPE_CHECKING:
    from memcalc.device.verdict import Verdict
    from memcalc.hardware.cost import Cost, Unknown
    from memcalc.inputs.gpu import GPU


PHASES: Final = ("forward", "backward", "step")


class _Key(NamedTuple):
    """This is what makes two rows the same item."""

    component: Component
    name: str
    sizes: tuple[tuple[str, int], ...]
    dtype: DType


class _Sized(NamedTuple):
    """A row and the bytes of all rows that are the same item."""

    row: Row
    nbytes: int


class _At(NamedTuple):
    """This is where a phase has its peak."""

    state: State | None
    moment: Moment | None
    flushed: bool


NOWHERE: Final = _At(None, None, False)


class _Found(NamedTuple):
    """A rank, its peaks, where they are, and what is alive in backward's after its last moment."""

    rank: Rank
    phases: dict[str, int]
    at: dict[str, _At]
    last: tuple[Row, ...]

    def highest(self) -> tuple[int, int]:
        """The peak, and backward's."""
        return max(self.phases.values()), self.phases["backward"]


def left_by(rank: Rank) -> list[Row]:
    """Return what is there after backward that no engine knows of."""
    return [
        row
        for profile in rank.profiles
        if profile.left.poly != ZERO
        for row in profile.rows(profile.left)
        if row.component == "buffers"
    ]


class Report(OnDevice):
    """The estimate of one setup. Numbers are bytes of the worst rank; rows are made when they are asked for."""

    def __init__(
        self, model: Any, setup: Setup, found: _Found | None = None, given: Mapping[str, Any] | None = None
    ) -> None:
        """Of the worst rank, or of one that was `found`. `given` are the options that `setup` was resolved from, None where it
        was not resolved from any: they tell what was asked for from what is a default."""
        self.model = model
        self.setup = setup
        self.given = given
        self.gpu: GPU | None = None
        if setup.gpu is not None:
            from memcalc.inputs.gpu import load_gpu

            self.gpu = load_gpu(setup.gpu)
        self._batch, self._seq = setup.micro_batch_size, setup.tokens_per_part
        self._found = [found] if found else self._worst_of_stages(ranks(model, setup))
        self.rank_peaks = {one.rank.number: max(one.phases.values()) for one in self._found}
        self._take(max(self._found, key=lambda one: self.rank_peaks[one.rank.number]))

    def _worst_of_stages(self, found: Iterable[Rank]) -> list[_Found]:
        """Of the ranks that have the same stage the one with the highest peak; where that is the same, with most in backward."""
        worst: dict[int, _Found] = {}
        for one in map(self.find, found):
            before = worst.get(one.rank.number)
            if before is None or one.highest() > before.highest():
                worst[one.rank.number] = one
        return list(worst.values())

    def find(self, rank: Rank) -> _Found:
        """A rank with its peaks, of which there can be a report."""
        return _Found(rank, *self._find_peaks(rank))

    def _take(self, found: _Found) -> None:
        """Report this rank."""
        self.rank, self.phases, self._at, self._last = found
        self.peak_phase = max(PHASES, key=lambda phase: self.phases[phase])
        self.peak = self.phases[self.peak_phase]

    def _find_peaks(self, rank: Rank) -> tuple[dict[str, int], dict[str, _At], tuple[Row, ...]]:
        """The peak of each phase and where it is; what is alive in backward's after its last moment."""
        batch, seq, sums, held = self._batch, self._seq, rank.sums, rank.holdings
        always = evaluate(sums.always, batch, seq)
        left = sum(row.bytes_at(batch, seq) for row in left_by(rank))
        flush = evaluate(sums.flush, batch, seq)
        most = {"forward": 0, "backward": 0}
        at = {"forward": NOWHERE, "backward": NOWHERE, "step": NOWHERE}
        for state, waiting in self._worst_states(rank):
            profile = rank.profiles[state.chunk]
            for moment in profile.forward if state.kind == "forward" else profile.backward:
                size = evaluate(moment.poly, batch, seq) + waiting
                flushes = False
                size += moment.gradients if held.keeps_gradients else 0  # an earlier micro-batch's, in forward
                if state.kind == "backward":
                    flushes = held.flush is not None and moment.gradients >= held.flush.after
                    size += flush if flushes else 0
                if size > most[state.kind]:
                    most[state.kind], at[state.kind] = size, _At(state, moment, flushes)
        forward = always + evaluate(sums.forward, batch, seq) + most["forward"]
        backward = always + evaluate(sums.backward, batch, seq) + most["backward"]
        last: tuple[Row, ...] = ()
        for i, rows in enumerate(sums.after_backward):
            after = always + left + evaluate(rows, batch, seq)
            if after > backward:
                backward, at["backward"] = after, NOWHERE
                last = held.after_backward[i]
        step = always + left + evaluate(sums.step, batch, seq)
        return {"forward": forward, "backward": backward, "step": step}, at, last

    def _worst_states(self, rank: Rank) -> Iterable[tuple[State, int]]:
        """Of the states that run the same part of the same chunk the one with most besides, and how much that is."""
        worst: dict[tuple[str, int], tuple[State, int]] = {}
        for state in rank.states:
            own, waiting = (state.kind, state.chunk), self._in_flight(rank, state)
            if own not in worst or waiting > worst[own][1]:
                worst[own] = state, waiting
        return worst.values()

    def _in_flight(self, rank: Rank, state: State) -> int:
        """Bytes that other micro-batches have saved, and of what is between stages."""
        saved = [evaluate(profile.saved.poly, self._batch, self._seq) for profile in rank.profiles]
        own = sum(count * each for count, each in zip(state.in_flight, saved, strict=True))
        return own + (rank.between.bytes_at(self._batch, self._seq) * state.between if rank.between else 0)

    def _waiting_rows(self, state: State) -> list[Row]:
        """Return the same, row by row."""
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
        """Return what is saved at the end of a forward, with all micro-batches in flight."""
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
        """Forwards of a chunk whose saved activations are there at once, the running one's included."""
        if self.rank.in_flight is not None:
            return self.rank.in_flight
        return max((sum(state.in_flight) + 1 for state in self.rank.states if state.kind == "forward"), default=0)

    def each_rank(self) -> list[Report]:
        """A report of every pipeline rank, or of the one that was asked for."""
        return [self if found.rank is self.rank else Report(self.model, self.setup, found) for found in self._found]

    def with_setup(self, setup: Setup) -> Report:
        return Report(self.model, setup)

    # --- rows

    @cached_property
    def _left(self) -> list[Row]:
        return left_by(self.rank)

    def rows_at(self, phase: str) -> list[Row]:
        """Every row that is alive at the peak of a phase."""
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
        """Every row, evaluated: with its part of its component's total and of the peak."""
        at_peak = self._by_key(self.rows_at(self.peak_phase))
        by_phase = [self._by_key(self.rows_at(phase)) for phase in PHASES]
        by_phase += [
            self._by_key([*self.rank.holdings.always, *rows, *self._left]) for rows in self.rank.holdings.after_backward
        ]
        parts: dict[_Key, _Sized] = {}
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

    def _by_key(self, rows: Iterable[Row]) -> dict[_Key, _Sized]:
        out: dict[_Key, _Sized] = {}
        for row in rows:
            key = _Key(row.component, row.name, named_sizes(row.shape, self._batch, self._seq), row.dtype)
            before = out[key].nbytes if key in out else 0
            out[key] = _Sized(row, before + row.bytes_at(self._batch, self._seq))
        return out

    def _item(self, key: _Key, part: _Sized | None, peak: _Sized | None) -> Item:
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
        """Whose trace this is, for a model without a program of its own; '' otherwise."""
        return self.model.program.source if isinstance(self.model, Model) else ""

    # --- totals

    def total(self, component: str) -> int:
        """The most of a component that exists in a step (saved activations: at the end of forward)."""
        return sum(item.nbytes for item in self.items if item.component == component)

    @cached_property
    @without_collections()
    def verdict(self) -> Verdict | None:
        """Tell whether it runs on the GPU, for the worst of this pipeline rank, the first and the last; None without a GPU."""
        if self.gpu is None:
            return None
        from memcalc.device.verdict import verdict_of

        return verdict_of(self._fullest, self.gpu.capacity)

    @cached_property
    def first_look(self) -> Verdict | None:
        """The verdict as far as one play of each rank tells it; None without a GPU."""
        if self.gpu is None:
            return None
        from memcalc.device.verdict import first_look_of

        return first_look_of(self._fullest, self.gpu.capacity)

    @cached_property
    def _fullest(self) -> list[Report]:
        """This pipeline rank, the first and the last."""
        ends = (found for found in self._found if found.rank.number in (0, self.setup.pp - 1))
        others = [Report(self.model, self.setup, found) for found in ends if found.rank is not self.rank]
        return [self, *others]

    @property
    def fits(self) -> bool | None:
        """Tell whether it runs on the GPU; None without one, or where that is not known."""
        return None if self.verdict is None else self.verdict.fits

    @property
    def headroom(self) -> int | None:
        """Bytes of the GPU to spare, negative where it does not fit; None where `fits` is."""
        return None if self.verdict is None or self.fits is None else self.verdict.headroom

    # --- communication

    @cached_property
    def collectives(self) -> list[Collective]:
        """Return what this rank sends in one optimizer step, as the engine really does it."""
        return self.rank.collectives(self.setup)

    @cached_property
    def textbook(self) -> list[Collective]:
        """Return the same step as the papers count it; empty where the engine does just that."""
        return self.rank.textbook()

    @cached_property
    def costs(self) -> list[Cost | Unknown]:
        """The time of every collective, or what is not known of it; empty without a GPU."""
        if self.gpu is None:
            return []
        from memcalc.hardware.cost import cost_of

        return [cost_of(collective, self.setup, self.gpu) for collective in self.collectives]

    # --- compute

    @cached_property
    def computed(self) -> list[Computed]:
        """The products of matrices of one optimizer step; none for a bare number of parameters."""
        return computed(self.rank.profiles, self.setup, self.rank.on_paper)

    @property
    def flops(self) -> dict[str, int]:
        """Of forward, backward and recomputation, and in total."""
        return per_phase(self.computed)

    @property
    def seconds_at_peak(self) -> float | None:
        """The step's products at the GPU's data-sheet rate; None without a GPU, or where that is not known."""
        return seconds_at_peak(self.computed, self.gpu) if self.computed else None

    def per_layer(self) -> tuple[int, int]:
        """Payload and wire of one transformer layer (the mean of all): its share of every collective over parameters."""
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
        """The JSON document of the contract."""
        from memcalc.report.document import document

        return document(self)
