"""ZeRO-Inference: a model whose weights are on the host or on NVMe, and on the GPU while a module needs them.

DeepSpeed's ZeRO-3 without an optimizer (`offload_param`): each module's parameters are copied from the host before it runs,
the next ones are prefetched, and all are freed after their last use; parameters of few elements stay
(deepspeed/runtime/zero/partitioned_param_coordinator.py, played by the bookkeeping that estimates of training use). Every
forward copies all others: a decode step takes at least their bytes over the link to the host.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from memcalc.core.collector import without_collections
from memcalc.core.dims import Dim, numel
from memcalc.core.dtypes import fp32
from memcalc.core.tensor import Memory
from memcalc.engines.deepspeed.visits import Visits
from memcalc.engines.deepspeed.zero3_coordinator import Coordinator, Gathered, Thresholds
from memcalc.engines.deepspeed.zero3_leaves import leaf_modules
from memcalc.errors import InputError
from memcalc.families.base.module import Run, after_forward
from memcalc.hardware.cost import INSIDE
from memcalc.offload.host import HostRow
from memcalc.timing.kernels import Unknown

if TYPE_CHECKING:
    from memcalc.core.dtypes import DType
    from memcalc.core.noted import Visited
    from memcalc.engines.deepspeed.visits import Visit
    from memcalc.inputs.gpu import GPU
    from memcalc.inputs.model import Model

DEFAULTS: Final = Thresholds(max_live=10**9, max_reuse=10**9, persistence=10**5, prefetch=5 * 10**7)
"""zero/config.py: the options of stage 3, in elements."""
SOURCE: Final = "deepspeed 0.19 runtime/zero/partition_parameters.py: _partition_param"
PLACES: Final = ("none", "cpu", "nvme")
BUFFERS: Final = "deepspeed/runtime/zero/offload_config.py"
NVME_BUFFERS: Final = 5
NVME_BUFFER: Final = 10**8
"""The buffers of `offload_param` for NVMe, and the elements of each (deepspeed/runtime/zero/offload_config.py)."""
Place = Literal["cpu", "nvme"]


class Played(NamedTuple):
    """A forward of one rank, in elements."""

    gathers: tuple[tuple[int, ...], ...]
    """The parameters that are copied together, in turn, by their place in definition order."""
    most: int
    """The most elements on the GPU at once, those that stay included."""
    copied: int
    """The elements that come from the host."""
    persistent: int
    """The elements that stay."""


class Needs(NamedTuple):
    """The bytes that ZeRO-Inference takes of a GPU and of the host."""

    gpu: int
    """The most bytes of weights on the GPU at once."""
    per_forward: int
    """The bytes that one GPU copies from the host in a forward: of each token, in decoding."""
    host: tuple[HostRow, ...]


def needs(
    model: Model,
    dtype: DType,
    place: str,
    ranks: int = 1,
    thresholds: Thresholds = DEFAULTS,
    ranks_per_node: int | None = None,
) -> Needs:
    """Return the weights' bytes on the GPU and on the host. Each of `ranks` ranks copies its part of a parameter from the host
    and gathers the others' parts, into a buffer of all that are gathered together. Raises InputError for an unknown place."""
    if place not in PLACES[1:]:
        raise InputError(f"--zero-inference {place}: expected one of {', '.join(PLACES)}")
    played = play(model, thresholds)
    sizes = [numel(weight.shape)[0] for weight in model.program.weights()]
    parts = tuple(-(-size // ranks) for size in sizes)
    together = max((sum(sizes[i] for i in gather) for gather in played.gathers), default=0)
    buffer = together if ranks > 1 else 0
    copied = sum(-(-sizes[i] // ranks) for gather in played.gathers for i in gather)
    here = min(ranks, ranks_per_node or ranks)
    each = parts * here
    kind: Literal["pinned", "nvme"] = "pinned" if place == "cpu" else "nvme"
    rows = [HostRow(kind, "weights", "parameters/dp", each, dtype, "always", SOURCE)]
    if place == "nvme":
        many = (NVME_BUFFERS * NVME_BUFFER,) * here
        rows.append(HostRow("pinned", "buffers for weights from NVMe", "buffers", many, dtype, "always", BUFFERS))
    return Needs((played.most + buffer) * dtype.itemsize, copied * dtype.itemsize, tuple(rows))


def play(model: Model, thresholds: Thresholds = DEFAULTS) -> Played:
    """Play a forward whose order of modules is known from earlier ones."""
    begun, ended = _calls(model)
    sizes = [numel(weight.shape)[0] for weight in model.program.weights()]
    made: list[Gathered] = []

    def launch(gathered: Gathered) -> dict[int, None]:
        made.append(gathered)
        return dict.fromkeys(gathered.parameters)

    coordinator = Coordinator(sizes, begun, thresholds, launch, lambda _: None, lambda _: None)
    persistent = sum(sizes[i] for i in coordinator.persistent)
    most = 0
    for event, visited in ended:
        if event == "begins":
            coordinator.fetch(visited.where, visited.parameters, True)
            most = max(most, coordinator.live)
        else:
            coordinator.release(visited.where, visited.parameters, True, is_leaf=visited.is_leaf)
    gathers = tuple(one.parameters for one in made)
    copied = sum(sizes[i] for gather in gathers for i in gather)
    return Played(gathers, most + persistent, copied, persistent)


@without_collections()
def _calls(model: Model) -> tuple[list[Visited], list[tuple[str, Visited]]]:
    """Return the modules of a forward in the order in which they begin, and their beginnings and ends in turn."""
    program = model.program
    if program.source:
        raise InputError(
            f"--zero-inference: a {model.model_type} has no program here, so this is not modelled; allowed: none"
        )
    run = Run(Memory(), fp32, program.attention_kinds[0], False, Dim("batch", 1), Dim("seq", 2))
    run.memory.grad_enabled = False
    for weight in program.weights():
        run.add_weight(weight, wants_gradient=False)
    for buffer in after_forward(program.buffers(), 2):
        run.add_buffer(buffer)
    begun: list[Visited] = []
    events: list[tuple[str, Visited]] = []

    def begins(visit: Visit, forward: bool) -> None:
        begun.append(visit.visited)
        events.append(("begins", visit.visited))

    def ends(visit: Visit, forward: bool) -> None:
        events.append(("ends", visit.visited))

    visits = Visits(run, leaf_modules(model), begins, ends, lambda _: None)
    run.memory.visitor = visits
    run.memory.enter("forward", None)
    visits.enter("", None)
    program.forward(run, *program.give(run))
    visits.leave(done=True)
    return begun, events


def seconds_of_copies(nbytes: int, gpu: GPU) -> float | Unknown:
    """Return the seconds that a GPU takes to copy bytes from its host; Unknown if the link is not known."""
    pcie = gpu.links.get("pcie")
    if pcie is None:
        return Unknown(f"the link of {gpu.full_name} to its host is not known")
    return nbytes / (INSIDE * pcie.nbytes / 2)
