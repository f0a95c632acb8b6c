"""The time of the optimizer's step: the bytes that its kernels move, and Muon's products of matrices.

The step on paper (memcalc/optimizers) notes its kernels. A fused kernel reads and writes each tensor once. The foreach and
for-loop implementations run one kernel for each op and pass over the tensors again and again: for AdamW 20 tensors of the
update's dtype are read or written for each parameter, fused 7. That is what is measured: eager AdamW over 8.03e9 parameters
in bf16 takes 46.6 ms on a B200 (ml-engineering, training/performance), which are 0.86 of its bandwidth for 20 tensors, and no
more than 0.3 of it for 7.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Final, NamedTuple

from memcalc.core.dims import Dim, numel
from memcalc.core.dtypes import DType, fp32
from memcalc.core.tensor import Memory
from memcalc.engines.base.holdings import parameter_classes, trained_dtype
from memcalc.estimation.compute import Computed
from memcalc.optimizers import Optimizer, Parameter, load_optimizer
from memcalc.timing.items import Timed
from memcalc.timing.kernels import ITEMSIZES, Rates, Unknown, products
from memcalc.units import MICRO

if TYPE_CHECKING:
    from collections.abc import Sequence

    from memcalc.core.rows import Item
    from memcalc.core.tensor import Work
    from memcalc.estimation.report import Report
    from memcalc.setup.setup import Setup

_SOURCE: Final = "the optimizer's step(): each op reads its operands and writes its result once"


class Kernels(NamedTuple):
    """The kernels of a step over some parameters."""

    nbytes: int
    """The bytes that those read and write that multiply no matrices."""
    calls: int
    """The number of those."""
    products: tuple[tuple[Work, int], ...]
    """The products of matrices, and how often each is made."""


def optimizer(report: Report, rates: Rates) -> list[Timed] | Unknown:
    """Return the time of the optimizer's step and of what the engine does around it; Unknown if it is not known."""
    setup, order = report.setup, report.rank.holdings.order
    if order is not None and order.updates:
        shards = [parameter for update in order.updates for parameter in update.parameters]
        return updates(setup, shards, order.updates[0].dtype, rates)
    if setup.engine == "ddp" or load_optimizer(setup.optimizer).fuses_backward:
        return updates(setup, parameter_classes(report.model), trained_dtype(report.model, setup), rates)
    return updates(setup, [flat(_updated(report))], setup.compute_dtype, rates)


def flat(elements: int) -> Parameter:
    """Return so many elements as one parameter."""
    return Parameter("parameters", (Dim("elements", elements),), 1, False)


def updates(setup: Setup, parameters: Sequence[Parameter], dtype: DType, rates: Rates) -> list[Timed] | Unknown:
    """Return the time of an update of parameters of this dtype; Unknown if it is not known."""
    bandwidth = rates.bytes_per_second
    elements = sum(one.count * numel(one.shape)[0] for one in parameters)
    updated = fp32 if setup.has_master_weights else dtype
    used = _of(setup)
    kernels = kernels_of(used, setup.optimizer_implementation, parameters, updated)
    if elements and not kernels.calls and not kernels.products:
        return Unknown(f"the time of {setup.optimizer}'s step is not modelled")
    if bandwidth is None:
        return Unknown(f"{rates.gpu.name} has no known bandwidth")
    multiplied = products([_computed(one, calls) for one, calls in kernels.products], rates)
    if isinstance(multiplied, Unknown):
        return multiplied
    name = f"{setup.optimizer}, {setup.optimizer_implementation}"
    made = [_moved(name, kernels.nbytes, kernels.calls, bandwidth, rates), *multiplied]
    if (
        setup.has_master_weights
        and setup.engine not in ("fsdp2", "fsdp1")
        and setup.offload_params == "none"
        and not (
            setup.precision_aware_optimizer  # its kernel writes them
        )
    ):
        made.append(_moved("16-bit weights from the fp32 copy", elements * (4 + 2), 1, bandwidth, rates))
    if (setup.clip_grad_norm and not used.fuses_backward) or setup.engine in ("deepspeed", "megatron"):
        made.append(_moved("norm of the gradients", elements * ITEMSIZES[setup.grad_dtype], 1, bandwidth, rates))
    return made


def _of(setup: Setup) -> Optimizer:
    if setup.precision_aware_optimizer:
        from memcalc.megatron.precision_aware import precision_aware

        return precision_aware(setup)
    return load_optimizer(setup.optimizer).among(setup.averaging, setup.compression_phase)


def kernels_of(
    optimizer: str | Optimizer, implementation: str, parameters: Sequence[Parameter], dtype: DType
) -> Kernels:
    """Return the kernels of a step with gradients of the parameters' dtype.

    The step is run over one parameter of each class. What it notes within that parameter is a kernel for each of the class;
    the rest are kernels over all parameters.
    """
    used = load_optimizer(optimizer) if isinstance(optimizer, str) else optimizer
    nbytes = calls = 0
    together: set[str] = set()
    multiplied: Counter[Work] = Counter()
    for parameter in parameters:
        one = _of_one(used, implementation, replace(parameter, count=1, stack=0), dtype)
        nbytes += parameter.count * one.nbytes
        calls += parameter.count * one.calls
        together.update(one.together)
        for work, times in one.products:
            multiplied[work] += parameter.count * times
    return Kernels(nbytes, calls + len(together), tuple(multiplied.items()))


class _Step(NamedTuple):
    """The kernels of a step over one parameter."""

    nbytes: int
    calls: int
    together: frozenset[str]
    """The kernels that take all parameters together."""
    products: tuple[tuple[Work, int], ...]


@lru_cache(maxsize=4096)
def _of_one(optimizer: Optimizer, implementation: str, parameter: Parameter, dtype: DType) -> _Step:
    memory = Memory()
    optimizer.step(memory, [parameter], dtype, dtype, implementation)
    operands = [operand for one in memory.streamed for operand in one.operands]
    return _Step(
        sum(numel(shape)[0] * of.itemsize for shape, of in operands),
        sum(1 for one in memory.streamed if one.scope),
        frozenset(one.name for one in memory.streamed if not one.scope),
        tuple(Counter(memory.work).items()),
    )


def _computed(work: Work, calls: int) -> Computed:
    sizes = tuple(dim.size for dim in work.factors)
    each = 2 * numel(work.factors)[0]
    words = "·".join(dim.name for dim in work.factors)
    formula = f"{calls}·2·{words} = {calls}·{each} FLOP"
    return Computed(
        work.label, "optimizer", None, work.kind, work.dtype.name, calls, calls * each, formula, "exact", _SOURCE, sizes
    )


def _moved(name: str, nbytes: int, kernels: int, bandwidth: float, rates: Rates) -> Timed:
    wait = rates.speed.kernel_latency.value
    formula = f"{kernels}·{wait:g} µs + {nbytes} B / {bandwidth / 1e9:.0f} GB/s"
    seconds = kernels * wait * MICRO + nbytes / bandwidth
    basis = rates.speed.basis_of(rates.speed.memory_efficiency)
    return Timed(name, "optimizer", seconds, 0.0, "bandwidth", kernels, formula, basis, _SOURCE)


def _updated(report: Report) -> int:
    """Return the number of parameters that the rank updates: the elements of one of the optimizer's states, or of the
    gradients for an optimizer that keeps none."""
    states: dict[str, int] = {}
    for item in report.items:
        if item.component == "optimizer_states":
            state = item.name.rsplit(": ", 1)[-1]
            states[state] = states.get(state, 0) + _elements(item)
    if states:
        return max(states.values())
    return sum(_elements(item) for item in report.items if item.component == "gradients")


def _elements(item: Item) -> int:
    return item.nbytes // _itemsize(item.dtype)


def _itemsize(dtype: str) -> int:
    sizes = {"uint8": 1, "int8": 1, "int16": 2, "fp8": 1, "bool": 1, "int64": 8, "int32": 4, "fp64": 8}
    return sizes.get(dtype) or ITEMSIZES[dtype]
