"""Memory needs of a model by DeepSpeed's own `estimate_zero*_model_states_mem_needs`: rules of thumb, not a step.

Source: deepspeed/runtime/zero/stage_1_and_2.py (estimate_zero2_model_states_mem_needs) and stage3.py
(estimate_zero3_model_states_mem_needs), 0.19.8.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from memcalc.inputs.model import Model

BUFFER_FACTOR: Final = 1.5
"""DeepSpeed's default of `additional_buffer_factor`, by which it multiplies the host's bytes."""


class Counted(NamedTuple):
    """The two numbers that DeepSpeed takes from a model."""

    total_params: int
    """Parameters; tied ones count once."""
    largest_layer_params: int
    """Parameters of the module that itself holds the most, those of its submodules aside."""


class Nodes(NamedTuple):
    nodes: int
    gpus_per_node: int

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node


class Needs(NamedTuple):
    """One line of DeepSpeed's table: options, and bytes of model states, without activations."""

    zero: int
    offload_optimizer: bool
    offload_param: bool
    zero_init: bool | None
    """Whether the model is built under `deepspeed.zero.Init`; None for ZeRO-2, which has no such option."""
    cpu: int
    """Bytes of each host."""
    gpu: int
    """Bytes of each GPU."""


def counted(model: Model) -> Counted:
    """Return the numbers of a model, as DeepSpeed's `model_to_params` finds them (stage3.py)."""
    from math import prod

    by_module: dict[str, int] = {}
    for name, shape, _ in model.weights():
        module = name.rpartition(".")[0]
        by_module[module] = by_module.get(module, 0) + prod(shape)
    return Counted(model.num_parameters, max(by_module.values()))


def zero2_needs(of: Counted, on: Nodes) -> Iterator[Needs]:
    """Return the lines of ZeRO-2, in DeepSpeed's order."""
    total = of.total_params
    yield Needs(2, True, False, None, int(total * max(4 * on.gpus, 16) * BUFFER_FACTOR), 2 * total)
    cpu = int(total * 4 * on.gpus_per_node * BUFFER_FACTOR)
    yield Needs(2, False, False, None, cpu, 2 * total + int(18 * total / on.gpus))


def zero3_needs(of: Counted, on: Nodes) -> Iterator[Needs]:
    """Return the lines of ZeRO-3, in DeepSpeed's order."""
    for optimizer, param in ((True, True), (True, False), (False, False)):
        for zero_init in (True, False):
            cpu = int(_zero3_cpu(of, on, optimizer, param, zero_init))
            yield Needs(3, optimizer, param, zero_init, cpu, _zero3_gpu(of, on, optimizer, param))


def _zero3_gpu(of: Counted, on: Nodes, optimizer: bool, param: bool) -> int:
    """Return the largest layer in fp32, and what of the states is not on the host: 2 bytes of weights, 16 of the rest."""
    kept = 0 if param else 2 if optimizer else 18
    return 4 * of.largest_layer_params + int(kept * of.total_params / on.gpus)


def _zero3_cpu(of: Counted, on: Nodes, optimizer: bool, param: bool, zero_init: bool) -> float:
    """Return the states on a host. Without `zero.Init` each process first builds the whole model there, in fp32."""
    share = 1 / on.nodes
    if not optimizer:
        built = of.largest_layer_params if zero_init else of.total_params
        return built * 4 * on.gpus_per_node * BUFFER_FACTOR
    states = (18 if param else 16) * share
    return of.total_params * (states if zero_init else max(4 * on.gpus_per_node, states)) * BUFFER_FACTOR
