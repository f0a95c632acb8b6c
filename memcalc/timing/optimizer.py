"""The time of the optimizer's step: it multiplies no matrices, so its time is the bytes that its kernels move.

A fused kernel reads and writes each tensor once. The foreach and for-loop implementations run one kernel for each op and
pass over the tensors again and again: for AdamW 20 tensors of the update's dtype are read or written for each parameter
(torch/optim/adamw.py, _multi_tensor_adamw: mul, lerp, mul, addcmul, sqrt, div, add, addcdiv), fused 7. That is what is
measured: eager AdamW over 8.03e9 parameters in bf16 takes 46.6 ms on a B200 (ml-engineering, training/performance), which
are 0.86 of its bandwidth for 20 tensors, and no more than 0.3 of it for 7.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, NamedTuple

from memcalc.timing.items import Timed
from memcalc.timing.kernels import ITEMSIZES, Rates, Unknown

if TYPE_CHECKING:
    from memcalc.core.rows import Item
    from memcalc.estimation.report import Report
    from memcalc.setup.setup import Setup


class Passes(NamedTuple):
    """The tensors of the update's dtype that a step reads or writes for each parameter."""

    fused: int
    op_by_op: int
    ops: int
    """The kernels of one parameter's update, op by op."""
    in_8_bits: int = 0
    """The tensors of 8 bits that it reads or writes besides."""


_PASSES: Final[Mapping[str, Passes]] = {
    "adam": Passes(7, 18, 7),  # AdamW without weight decay, torch's default
    "adamw": Passes(7, 20, 8),
    "adamw-8bit": Passes(3, 3, 1, in_8_bits=4),  # one kernel: the weight twice, its gradient, two states twice
    "sgd": Passes(3, 3, 1),
    "sgd-momentum": Passes(5, 8, 3),
    "lion": Passes(5, 19, 8),  # lion_pytorch: mul_, clone, mul_, add, sign_, add_, mul_, add_
}
_SOURCE: Final = "torch/optim: the ops of one step, each reads its operands and writes its result once"
_MICRO: Final = 1e-6


def optimizer(report: Report, rates: Rates) -> list[Timed] | Unknown:
    """Return the time of the optimizer's step and of what the engine does around it; Unknown if it is not known."""
    return updates(report.setup, _updated(report), len(report.model.weight_classes), rates)


def updates(setup: Setup, elements: int, classes: int, rates: Rates) -> list[Timed] | Unknown:
    """Return the time of an update of so many parameters, which are `classes` tensors; Unknown if it is not known."""
    bandwidth = rates.bytes_per_second
    passes = _PASSES.get(setup.optimizer)
    if passes is None:
        return Unknown(f"the time of {setup.optimizer}'s step is not modelled")
    if bandwidth is None:
        return Unknown(f"{rates.gpu.name} has no known bandwidth")
    fused = setup.optimizer_implementation == "fused"
    tensors = passes.fused if fused else passes.op_by_op
    itemsize = 4 if setup.precision.endswith(("-mixed", "-autocast")) else ITEMSIZES[setup.precision]
    nbytes = elements * (tensors * itemsize + passes.in_8_bits)
    kernels = 1 if fused else passes.ops
    kernels *= classes if setup.optimizer_implementation == "for-loop" else 1
    made = [_moved(f"{setup.optimizer}, {setup.optimizer_implementation}", nbytes, kernels, bandwidth, rates)]
    if setup.has_master_weights and setup.engine != "fsdp2":
        made.append(_moved("16-bit weights from the fp32 copy", elements * (4 + 2), 1, bandwidth, rates))
    if setup.clip_grad_norm or setup.engine in ("deepspeed", "megatron"):
        made.append(_moved("norm of the gradients", elements * ITEMSIZES[setup.grad_dtype], 1, bandwidth, rates))
    return made


def _moved(name: str, nbytes: int, kernels: int, bandwidth: float, rates: Rates) -> Timed:
    wait = rates.speed.kernel_latency.value
    formula = f"{kernels}·{wait:g} µs + {nbytes} B / {bandwidth / 1e9:.0f} GB/s"
    seconds = kernels * wait * _MICRO + nbytes / bandwidth
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
    return {"uint8": 1, "int8": 1, "bool": 1, "int64": 8, "int32": 4, "fp64": 8}.get(dtype) or ITEMSIZES[dtype]
