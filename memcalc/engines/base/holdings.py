"""The rows that an engine holds on one rank, by phase, and the rows that several engines use."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from memcalc.core.dims import Dim, numel
from memcalc.core.dtypes import DType
from memcalc.core.rows import Row
from memcalc.core.tensor import Memory, StorageRow
from memcalc.families.base.module import after_forward
from memcalc.kernels import loss_in
from memcalc.optimizers import Optimizer, Parameter, load_optimizer
from memcalc.setup.optimizer_checks import head_elements

if TYPE_CHECKING:
    from memcalc.engines.base.script import Scripts
    from memcalc.families.base.module import Weight
    from memcalc.inputs.model import Model
    from memcalc.setup.setup import Setup
    from memcalc.tape.profile import HooksOf
    from memcalc.tape.rewritten import OverRun

_BATCH: Final = Dim("batch", 1, (0, 0, 0, 1, 0, 0))
_SEQ: Final = Dim("seq", 1, (0, 1, 0, 0, 0, 0))

ENOUGH_MICRO_BATCHES: Final = 3
"""The micro-batches of a step that can differ: the first, one that finds sums of gradients and leaves them, and the
last."""


DTypeOf = Callable[["Weight"], DType | None]
"""Returns the dtype in which a weight is updated, if it is not that of all others."""


def _the_same(_: Weight) -> None:
    return None


class Flush(NamedTuple):
    """Blocks of a reduction of gradients, alive at moments with at least `after` bytes of gradients."""

    after: int
    rows: tuple[Row, ...]


class Update(NamedTuple):
    """One call of the optimizer over some of the parameters."""

    parameters: tuple[Parameter, ...]
    dtype: DType
    """The dtype of the tensors that are updated, and of the gradients that the optimizer gets."""


class Order(NamedTuple):
    """The order in which an engine allocates its rows. Neighbouring rows with equal copies are one stack of layers."""

    before: tuple[Row, ...]
    """Rows allocated before the first step."""
    states: tuple[Row, ...]
    """Rows allocated in the first optimizer step."""
    casts: tuple[Row, ...]
    """Rows allocated in each step before the optimizer, and alive until its end."""
    updates: tuple[Update, ...]
    streams: Mapping[str, str] = {}
    """The stream of a block, by its name in the run, if it is not the default stream."""
    moved: tuple[Row, ...] = ()
    """Rows allocated before all others, and freed once they have been copied into `flat`."""
    flat: tuple[Row, ...] = ()
    """Rows allocated after `moved`."""
    replaced: tuple[Row, ...] = ()
    """Rows allocated after `before`, and freed when the second step begins."""
    replacing: Callable[[], tuple[Row, ...]] = tuple
    """Returns the rows allocated when `replaced` are freed. They stay."""
    first: HooksOf | None = None
    """The engine's hooks while the first micro-batch runs, if those of later ones differ."""
    clipping: tuple[Row, ...] = ()
    """Rows allocated in each step before `casts`, and freed when `casts` are allocated."""
    untraced: OverRun | None = None
    """The engine while the very first micro-batch of a process runs, if it differs for later ones."""
    scripts: Callable[[], Scripts] | None = None
    """Returns what happens around the runs, block by block, for an engine that rows do not describe well enough. Then
    only the rows of `before` are set, which come first."""


class Holdings(NamedTuple):
    """Rows by the time they are alive: always, or in one phase only (`step`: at the peak of the optimizer step)."""

    always: tuple[Row, ...]
    forward: tuple[Row, ...] = ()
    backward: tuple[Row, ...] = ()
    step: tuple[Row, ...] = ()
    flush: Flush | None = None
    after_backward: tuple[tuple[Row, ...], ...] = ()
    """The rows alive after backward, one moment after the other, when no activations are left: the last reduction."""
    keeps_gradients: bool = True
    """True if the gradients that autograd produces stay as they are until the step."""
    accumulates: bool = False
    """True if autograd adds to gradients that an earlier micro-batch left on the parameters."""
    hooks: HooksOf | None = None
    """The engine's actions around the layers while they run."""
    over: OverRun | None = None
    """The engine's actions between the events of the run, once that is recorded."""
    over_first: OverRun | None = None
    """The engine's actions in a step's first micro-batch, if these differ there."""
    order: Order | None = None
    """The order in which the engine allocates its rows; None if the order is not known, or if it differs in a part that
    the run leaves out."""
    buffer_dtype: DType | None = None
    """The dtype of the modules' floating-point buffers, if it is not the weights'."""
    micro_batches: int = 1
    """The micro-batches of a step in one run. More than one are run if `hooks` keep something from one to the next."""
    others: tuple[Holdings, ...] = ()
    """The holdings of other ranks. They may have more in backward, and have the same in all other phases."""


def parameter_classes(model: Model, dtype_of: DTypeOf = _the_same) -> list[Parameter]:
    """Return the model's weights as an optimizer sees them: equal tensors of all layers together."""
    head = head_elements(model)
    return [_parameter(w, model.trained(w), dtype_of, head) for w in model.weight_classes if model.trained(w)]


def met_in_step(model: Model, setup: Setup, dtype_of: DTypeOf = _the_same) -> list[Parameter]:
    """Return the model's weights in the order in which a step updates them."""
    head = head_elements(model)
    return [_parameter(w, copies, dtype_of, head) for w, copies in weights_in_turn(model, setup)]


def _parameter(weight: Weight, copies: int, dtype_of: DTypeOf, head: int) -> Parameter:
    is_matrix = weight.layer is not None and len(weight.shape) == 2
    return Parameter(weight.name, weight.shape, copies, is_matrix, dtype=dtype_of(weight), head=head)


def weights_in_turn(model: Model, setup: Setup) -> Iterator[tuple[Weight, int]]:
    """Yield the weights that get a gradient in the order in which a step updates them, with the number of weights that
    each stands for.

    A for-loop's variables hold the tensors of the last turn. So if layers differ, every weight stands for itself, in
    the model's order.
    """
    of_layers = {model.trained(w) for w in model.weight_classes if w.layer is not None}
    if setup.optimizer_implementation != "for-loop" or len(of_layers) < 2:
        yield from ((w, copies) for w in model.weight_classes if (copies := model.trained(w)))
        return
    yield from ((w, 1) for w in model.program.weights() if model.program.gets_gradient(w))


def weight_rows(
    model: Model,
    dtype: DType,
    component: str,
    life: str,
    suffix: str = "",
    source: str | None = None,
    own_dtypes: bool = False,
    of: Callable[[Weight], bool] | None = None,
) -> list[Row]:
    """Return one row per weight class: parameters, copies of them for an optimizer, or rows of the weights that get a
    gradient. With `own_dtypes`, weights that have a dtype of their own keep it. `of` chooses weights."""
    program = model.program

    def dtype_of(weight: Weight) -> DType:
        return weight.dtype if own_dtypes and weight.dtype is not None else dtype

    read = program.source or source or program.weights_source
    copies = {"parameters": model.copies, "optimizer_states": model.trainable}.get(component, model.trained)
    rows: list[Row] = []
    for w in model.weight_classes:
        if not copies(w) or (of is not None and not of(w)):
            continue
        if w.packing is None:
            rows.append(Row(component, w.name + suffix, w.shape, dtype_of(w), copies(w), life, program.basis, read))  # type: ignore[arg-type]
            continue
        for stored in w.packing.stored(w.shape):
            name = f"{w.name}.{stored.name}" if stored.name else w.name
            rows.append(Row("parameters", name, stored.shape, stored.dtype, copies(w), life, "exact", w.packing.source))
    return rows


def trained_dtype(model: Model, setup: Setup) -> DType:
    """Return the dtype of the weights that train, or of the most that do: that of the adapters if they have one."""
    own = (w.dtype for w in model.weight_classes if w.dtype is not None and model.trained(w))
    return next(own, setup.compute_dtype) if setup.keeps_adapter_dtype else setup.compute_dtype


def padding_row(model: Model) -> Row:
    """Return the row of a padded batch's mask, which every engine has."""
    name, shape, dtype = model.program.padding(model.program.sequences(_BATCH), _SEQ)
    assert dtype is not None
    return Row("buffers", name, shape, dtype, life="the step's batch", source="the caller")


OF_CALLER: Final = ("the step's batch", "until the next loss")
"""The lives of the rows that the caller holds."""


def input_rows(model: Model, setup: Setup, dtype: DType, computes_in: DType | None = None) -> list[Row]:
    """Return the rows of the caller and the modules: the batch, the loss, the model's buffers. `dtype` is the
    modules'."""
    program = model.program
    rows = [
        Row(
            "buffers",
            given.name,
            given.shape,
            given.dtype or computes_in or dtype,
            life=OF_CALLER[0],
            source="the caller",
        )
        for given in program.given(_BATCH, program.whole(_SEQ))
    ]
    if not program.source:  # a trace has its own loss, of any dtype
        loss_dtype = loss_in(setup.cross_entropy, program, computes_in or dtype, dtype)
        rows.append(Row("buffers", "loss", (), loss_dtype, life=OF_CALLER[1], source="the caller"))
    kept = after_forward(model.program.buffers(), setup.seq_len or 0)
    kinds = Counter(buffer._replace(layer=None) for buffer in kept)
    for buffer, copies in kinds.items():
        rows.append(
            Row(
                "buffers",
                buffer.name,
                buffer.shape,
                buffer.dtype or (computes_in if buffer.cast else None) or dtype,
                copies,
                basis=model.program.basis,
                source=model.program.source or "transformers' modelling code",
            )
        )
    return rows


def state_rows(setup: Setup, parameters: Sequence[Parameter], dtype: DType) -> list[Row]:
    """Return the optimizer's state tensors on the GPU."""
    optimizer = load_optimizer(setup.optimizer).among(setup.averaging, setup.compression_phase)
    return [
        Row("optimizer_states", f"{s.parameter.name}: {s.name}", s.shape, s.dtype, s.count, s.life, source=s.source)
        for s in optimizer.states(parameters, dtype, setup.optimizer_implementation)
    ]


def step_temporaries(
    optimizer: str, implementation: str, parameters: Sequence[Parameter], dtype: DType, grad_dtype: DType
) -> list[Row]:
    """Return the rows alive at the peak of the optimizer's own step, from running it on paper."""
    return temporaries_of(load_optimizer(optimizer), implementation, parameters, dtype, grad_dtype)


def temporaries_of(
    optimizer: Optimizer, implementation: str, parameters: Sequence[Parameter], dtype: DType, grad_dtype: DType
) -> list[Row]:
    """Return the rows alive at the peak of a step of this optimizer."""
    memory = Memory()
    optimizer.step(memory, parameters, dtype, grad_dtype, implementation)
    live = best = 0
    peak: list[int] = []
    alive: set[int] = set()
    for event in memory.log:
        i = event if event >= 0 else ~event
        size = numel(memory.rows[i].shape)[0] * memory.rows[i].dtype.itemsize
        if event >= 0:
            alive.add(i)
            live += size
            if live > best:
                best, peak = live, list(alive)
        else:
            alive.discard(i)
            live -= size
    return [_temporary(memory.rows[i]) for i in sorted(peak)]


def larger(*moments: list[Row]) -> list[Row]:
    """Return the moment of a step with most bytes."""
    return max(moments, key=lambda rows: sum(row.bytes_at(1, 1) for row in rows))


def _temporary(row: StorageRow) -> Row:
    name = f"{row.scope}: {row.name}" if row.scope else row.name
    return Row(
        "temporaries",
        f"optimizer step: {name}",
        row.shape,
        row.dtype,
        life="within the step",
        source="the optimizer's step()",
    )
