"""`memcalc.estimate`: one setup, its rows, and every total as a sum of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from memcalc.collectives import Collective, wire_bytes
from memcalc.dims import ZERO, Poly, evaluate, numel
from memcalc.dtypes import DType
from memcalc.engines import load_engine
from memcalc.engines.holdings import ATTENTION_MASK, Holdings
from memcalc.errors import InputError
from memcalc.inputs.model import Model, load_model
from memcalc.inputs.options import check_options
from memcalc.kernels import Kernels, choose, held
from memcalc.megatron.schedules import State
from memcalc.profile import Choices, Moment, Profile, profile
from memcalc.rows import COMPONENTS, Component, Item, Row, copied, dims_formula, named_sizes
from memcalc.setup import Setup, resolve

if TYPE_CHECKING:
    import os

    from memcalc.inputs.gpu import GPU

PHASES: Final = ("forward", "backward", "step")


def estimate(
    model: str | os.PathLike[str] | Mapping[str, Any] | Model | None = None,
    *,
    params: int | str | None = None,
    **options: Any,
) -> Report:
    """What one training step needs, per GPU.

    `model` as for `load_model`; or `params`, a bare number of parameters ("7.5B"), for model states alone. `options` are
    the command line's, with underscores. InputError (a ValueError) says in one line what is wrong.
    """
    checked = check_options(options)
    if (model is None) == (params is None):
        raise InputError("--model or --params: exactly one of them is needed")
    if model is None:
        from memcalc.sizing import SizeOnly, parse_params

        size = SizeOnly(parse_params(params))
        return Report(size, resolve(checked, None))
    loaded = load_model(model)
    loaded.check_step()
    return Report(loaded, resolve(checked, loaded))


class _Sums(NamedTuple):
    """What an engine holds, added up: polynomials in batch and seq."""

    always: Poly
    forward: Poly
    backward: Poly
    step: Poly
    flush: Poly
    after_backward: tuple[Poly, ...]


def _sum(rows: Iterable[Row]) -> Poly:
    total = [0] * 6
    for row in rows:
        for i, c in enumerate(numel(row.shape)[1]):
            if c:
                total[i] += c * row.copies * row.dtype.itemsize
    return tuple(total)  # type: ignore[return-value]


class _Key(NamedTuple):
    """What makes two rows the same item."""

    component: Component
    name: str
    sizes: tuple[tuple[str, int], ...]
    dtype: DType


class _Sized(NamedTuple):
    """A row and the bytes of all rows that are the same item."""

    row: Row
    nbytes: int


class _At(NamedTuple):
    """Where a phase has its peak."""

    state: State | None
    moment: Moment | None
    flushed: bool


NOWHERE: Final = _At(None, None, False)


class _Rank(NamedTuple):
    """What one pipeline rank holds and runs; without pipelining the only one."""

    rank: int
    held: Holdings
    sums: _Sums
    profiles: tuple[Profile, ...]
    states: tuple[State, ...]


class Report:
    """The estimate of one setup. Numbers are bytes of the worst rank; rows are made when they are asked for."""

    def __init__(self, model: Any, setup: Setup) -> None:
        self.model = model
        self.setup = setup
        self.gpu: GPU | None = None
        if setup.gpu is not None:
            from memcalc.inputs.gpu import load_gpu

            self.gpu = load_gpu(setup.gpu)
        self._batch, self._seq = setup.micro_batch_size, setup.rows
        self._use(_ranks(model, setup))
        self.peak_phase = max(PHASES, key=lambda phase: self.phases[phase])
        self.peak = self.phases[self.peak_phase]

    def _use(self, ranks: list[_Rank]) -> None:
        """Report the rank that was asked for, or the one with the highest peak."""
        highest = -1
        self.rank_peaks: dict[int, int] = {}
        for rank in ranks:
            self._rank = rank
            phases, at, last = self._find_peaks()
            self.rank_peaks[rank.rank] = max(phases.values())
            if max(phases.values()) > highest:
                highest = max(phases.values())
                worst, self.phases, self._at, self._last = rank, phases, at, last
        self._rank = worst  # pyright: ignore[reportPossiblyUnboundVariable]
        self.pp_rank = self._rank.rank

    @property
    def _held(self) -> Holdings:
        return self._rank.held

    @property
    def _profile(self) -> Profile | None:
        return self._rank.profiles[0] if self._rank.profiles else None

    def _find_peaks(self) -> tuple[dict[str, int], dict[str, _At], tuple[Row, ...]]:
        batch, seq, sums, held = self._batch, self._seq, self._rank.sums, self._held
        always = evaluate(sums.always, batch, seq)
        left = sum(row.bytes_at(batch, seq) for row in self._left)
        flush = evaluate(sums.flush, batch, seq)
        most = {"forward": 0, "backward": 0}
        at = {"forward": NOWHERE, "backward": NOWHERE, "step": NOWHERE}
        for state in self._rank.states:
            waiting = self._in_flight(state)
            profile = self._rank.profiles[state.chunk]
            for moment in profile.forward if state.kind == "forward" else profile.backward:
                size = evaluate(moment.poly, batch, seq) + waiting
                flushes = False
                if state.kind == "backward":
                    size += moment.gradients if held.keeps_gradients else 0
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

    def _in_flight(self, state: State) -> int:
        """Bytes that other micro-batches have saved."""
        return sum(
            count * evaluate(profile.saved.poly, self._batch, self._seq)
            for count, profile in zip(state.in_flight, self._rank.profiles, strict=True)
            if count
        )

    def _waiting_rows(self, state: State) -> list[Row]:
        return [
            row._replace(copies=row.copies * count)
            for count, profile in zip(state.in_flight, self._rank.profiles, strict=True)
            if count
            for row in profile.rows(profile.saved)
            if row.component != "gradients"
        ]

    def _saved_rows(self) -> list[Row]:
        """What is saved at the end of a forward, with all micro-batches in flight."""
        forwards = [state for state in self._rank.states if state.kind == "forward"]
        if not forwards:
            return []

        def saved(state: State) -> int:
            own = self._rank.profiles[state.chunk].saved.poly
            return self._in_flight(state) + evaluate(own, self._batch, self._seq)

        most = max(forwards, key=saved)
        profile = self._rank.profiles[most.chunk]
        return [*profile.rows(profile.saved), *self._waiting_rows(most)]

    # --- rows

    @cached_property
    def _left(self) -> list[Row]:
        """What is there after backward that no engine knows of."""
        if self._profile is None or self._profile.left.poly == ZERO:
            return []
        return [row for row in self._profile.rows(self._profile.left) if row.component == "buffers"]

    def rows_at(self, phase: str) -> list[Row]:
        """Every row that is alive at the peak of a phase."""
        held = self._held
        state, moment, flushed = self._at[phase]
        rows = list(held.always)
        if phase == "backward" and moment is None and self._last:
            return [*rows, *self._last, *self._left]
        rows += {"forward": held.forward, "backward": held.backward, "step": (*held.step, *self._left)}[phase]
        if flushed and held.flush is not None:
            rows += held.flush.rows
        if moment is not None and state is not None:
            keep = phase == "backward" and held.keeps_gradients
            profile = self._rank.profiles[state.chunk]
            rows += [r for r in profile.rows(moment) if keep or r.component != "gradients"]
            rows += self._waiting_rows(state)
        return rows

    @cached_property
    def items(self) -> list[Item]:
        """Every row, evaluated: with its part of its component's total and of the peak."""
        at_peak = self._by_key(self.rows_at(self.peak_phase))
        by_phase = [self._by_key(self.rows_at(phase)) for phase in PHASES]
        by_phase += [self._by_key([*self._held.always, *rows, *self._left]) for rows in self._held.after_backward]
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
        return items

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
    def overheads(self) -> list[Item]:
        """Rows of `allocated`, `reserved` and `device` that are not tensors."""
        from memcalc.device import allocator_items, device_items, reserved_items

        allocator = allocator_items(self.items, self.gpu)
        allocated = self.peak + sum(item.nbytes for item in allocator)
        return [*allocator, *reserved_items(allocated), *device_items(self.setup.gpus)]

    def _with(self, *components: str) -> int:
        return self.peak + sum(item.nbytes for item in self.overheads if item.component in components)

    @property
    def allocated(self) -> int:
        """What torch.cuda.max_memory_allocated would show."""
        return self._with("allocator")

    @property
    def reserved(self) -> int:
        """What torch.cuda.max_memory_reserved would show without fragmentation."""
        return self._with("allocator", "reserved")

    @property
    def device(self) -> int:
        """What nvidia-smi would show without fragmentation."""
        return self._with("allocator", "reserved", "device")

    @property
    def fits(self) -> bool | None:
        """Whether `device` is within the GPU's memory; None without a GPU."""
        return None if self.gpu is None else self.device <= self.gpu.capacity

    # --- communication

    @cached_property
    def collectives(self) -> list[Collective]:
        """What this rank sends in one optimizer step, as the engine really does it."""
        if self.setup.engine == "megatron" and self._profile:
            from memcalc.engines import megatron

            stage = megatron.stages(self.model, self.setup)[self.pp_rank]
            return megatron.collectives_of(self.model, self.setup, stage, list(self._rank.profiles))
        return load_engine(self.setup.engine).collectives(self.model, self.setup) if self._profile else []

    @cached_property
    def textbook(self) -> list[Collective]:
        """The same step as the papers count it; empty where the engine does just that."""
        return load_engine(self.setup.engine).textbook(self.model, self.setup) if self._profile else []

    @property
    def layers_of_rank(self) -> int:
        """Transformer layers that the reported rank runs."""
        if self.setup.engine == "megatron":
            return self.model.layers // self.setup.pp
        return self.model.layers

    @property
    def layer_share(self) -> tuple[int, int]:
        """Parameters of one transformer layer (the mean of all) and of everything, on the reported rank."""
        if self.setup.engine == "megatron":
            from memcalc.engines import megatron

            classes = megatron.weights_of(megatron.stages(self.model, self.setup)[self.pp_rank])
            sizes = {w: numel(w.shape)[0] * n for w, n in classes.items()}
            layers = sum(size for w, size in sizes.items() if "*" in w.name)
            return layers // self.layers_of_rank, sum(sizes.values())
        weights = [w for w in self.model.weight_classes if w.layer is not None]
        layers = sum(numel(w.shape)[0] * self.model.copies(w) for w in weights)
        return layers // self.model.layers, self.model.num_parameters

    def per_layer(self) -> tuple[int, int]:
        """Payload and wire of one transformer layer (the mean of all): its share of every collective over parameters."""
        if not self.collectives:
            return 0, 0
        layers = self.layers_of_rank
        own = [c for c in self.collectives if c.layer is not None]
        payload, wire = sum(c.payload for c in own) // layers, sum(c.wire for c in own) // layers
        for c in self.collectives:
            if c.by_layer:
                layer, whole = self.layer_share
                part = c.payload * layer // whole
                payload, wire = payload + part, wire + wire_bytes(c.collective, c.group_size, part)
        return payload, wire

    def to_dict(self) -> dict[str, Any]:
        """The JSON document of the contract."""
        from memcalc.report.document import document

        return document(self)


_ONE: Final = (State("forward", 0, (0,)), State("backward", 0, (0,)))


def _ranks(model: Any, setup: Setup) -> list[_Rank]:
    if setup.engine == "megatron" and isinstance(model, Model):
        return _pipeline_ranks(model, setup)
    held, sums = _held(model, setup)
    made = _profile(model, setup, held)
    if isinstance(model, Model) and model.program.source:  # which weights get a gradient the trace has shown
        held, sums = _held(model, setup)
    return [_Rank(0, held, sums, (made,) if made else (), _ONE if made else ())]


def _pipeline_ranks(model: Model, setup: Setup) -> list[_Rank]:
    from memcalc.engines import megatron
    from memcalc.megatron.schedules import states

    out: list[_Rank] = []
    assert setup.attention is not None
    kernels = Kernels((), megatron.SOURCE, "modelled")
    choices = Choices(setup.compute_dtype, setup.attention, setup.recompute == "full", True, kernels=kernels)
    chosen = range(setup.pp) if setup.pp_rank is None else (setup.pp_rank,)
    for stage in megatron.stages(model, setup):
        if stage.rank not in chosen:
            continue
        profiles: list[Profile] = []
        for chunk in stage.chunks:
            key = ("profile", *choices, chunk.layout, chunk.branch(setup.micro_batch_size, setup.rows))
            if key not in model.profiles:
                model.profiles[key] = profile(chunk, choices, setup.micro_batch_size, setup.rows)
            profiles.append(model.profiles[key])
        held = megatron.holdings_of(setup, stage)
        run = states(setup.schedule, stage.rank, setup.pp, setup.micro_batches, len(stage.chunks))
        out.append(_Rank(stage.rank, held, _sums(held), tuple(profiles), tuple(run)))
    return out


def _sums(holdings: Holdings) -> _Sums:
    return _Sums(
        _sum(holdings.always),
        _sum(holdings.forward),
        _sum(holdings.backward),
        _sum(holdings.step),
        _sum(holdings.flush.rows if holdings.flush else ()),
        tuple(_sum(rows) for rows in holdings.after_backward),
    )


def _held(model: Any, setup: Setup) -> tuple[Holdings, _Sums]:
    key = (
        "held", setup.engine, setup.zero, setup.shards, setup.precision, setup.grad_dtype, setup.optimizer,
        setup.optimizer_implementation, setup.micro_batches > 1, setup.padded, setup.kernels, setup.attention,
        isinstance(model, Model) and bool(model.program.idle),
    )  # fmt: skip
    if key not in model.profiles:
        if isinstance(model, Model):
            holdings = load_engine(setup.engine).holdings(model, setup)
            kept = held(setup.kernels, setup.attention, model.program, setup.compute_dtype)
            masks = (ATTENTION_MASK,) if setup.padded else ()
            holdings = holdings._replace(always=(*holdings.always, *kept, *masks))
        else:
            holdings = model.holdings(setup)
        model.profiles[key] = (holdings, _sums(holdings))
    return model.profiles[key]


def _profile(model: Any, setup: Setup, holdings: Holdings) -> Profile | None:
    if not isinstance(model, Model):
        return None
    assert setup.attention is not None and setup.seq_len is not None
    program: Any = model.program
    assert setup.cross_entropy is not None
    kernels = choose(model.model_type, setup.kernels, setup.cross_entropy, selective=setup.recompute == "selective")
    recompute = setup.recompute == "full"
    choices = Choices(
        setup.compute_dtype, setup.attention, recompute, holdings.accumulates, setup.padded, setup.autocast_dtype, kernels,
        holdings.hooks,
    )  # fmt: skip
    tokens = setup.micro_batch_size * setup.seq_len
    chunks = kernels.chunks(tokens, program.vocab.size, program.hidden.size) if kernels.chunks else None
    key = ("profile", *choices, program.branch(setup.micro_batch_size, setup.seq_len), chunks)
    if key not in model.profiles:
        model.profiles[key] = profile(program, choices, setup.micro_batch_size, setup.seq_len)
    return model.profiles[key]
