"""Megatron's precision-aware optimizer (`--use-precision-aware-optimizer`): Transformer Engine's FusedAdam with states in 16 or
8 bits.

FusedAdam holds the main weights too. Of fp32 ones beside bf16 weights it keeps the lower 16 bits alone
(`store_param_remainders`): the upper ones are the weights. A state in fp8 is a Float8Tensor, which has its transpose beside it.
Each state that is not fp32 has a scale for every weight. The step casts all such states of a group to fp32 before its one
kernel, and back after it, so it needs more than it saves for a moment. Gradients are read where they are, in their own dtype
(`decoupled_grad`).

Sources: transformer_engine/pytorch/optimizers/fused_adam.py, pytorch/tensor/float8_tensor.py (Float8Quantizer.make_empty);
megatron/core/optimizer/__init__.py, optimizer_config.py, distrib_optimizer.py (_copy_model_grads_to_main_grads).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final

from memcalc.core.dims import Dim
from memcalc.core.dtypes import DType, bf16, boolean, fp8, fp16, fp32
from memcalc.core.tensor import Memory, Tensor
from memcalc.optimizers.base import Optimizer, Parameter, State, like_parameter, one_by_one, streams, temporary
from memcalc.optimizers.base import within as named

if TYPE_CHECKING:
    from memcalc.setup.setup import Setup

INT16: Final = DType("int16", 2, is_floating_point=False)
DTYPES: Final = {"fp32": fp32, "bf16": bf16, "fp16": fp16, "fp8": fp8}
SOURCE: Final = "transformer_engine/pytorch/optimizers/fused_adam.py"
_SCALE: Final = (Dim("1", 1),)
_SCALES: Final = {bf16: 1, fp16: 1, fp8: 4}
"""The fp32 numbers of a state: its scale, and a Float8Tensor's own scale, its inverse and the largest value."""


@dataclass(frozen=True, slots=True)
class PrecisionAware(Optimizer):
    """FusedAdam with states of these dtypes, over 16-bit weights."""

    elementwise: ClassVar[bool] = True

    weights: DType = bf16
    main: DType = fp32
    exp_avg: DType = fp32
    exp_avg_sq: DType = fp32

    @property
    def remains(self) -> bool:
        """Tell whether the main weights are the lower bits of fp32 alone."""
        return self.weights is bf16 and self.main is fp32

    @property
    def state_dtypes(self) -> dict[str, DType]:
        """Return the dtype of each state."""
        return {
            "exp_avg": self.exp_avg,
            "exp_avg_sq": self.exp_avg_sq,
            "master_param": INT16 if self.remains else self.main,
        }

    @property
    def cast(self) -> dict[str, DType]:
        """Return the states that the step casts to fp32."""
        return {name: dtype for name, dtype in self.state_dtypes.items() if dtype not in (fp32, INT16)}

    def states(self, parameters: Sequence[Parameter], dtype: DType, implementation: str) -> list[State]:
        self.check(implementation)
        out: list[State] = []
        for parameter in parameters:
            out += [like_parameter(name, parameter, own, SOURCE) for name, own in self.state_dtypes.items()]
            for name, own in self.cast.items():
                if own is fp8:
                    out.append(like_parameter(f"{name}, transposed", parameter, own, SOURCE))
                out += [State(f"{name}: scale", parameter, _SCALE, fp32, parameter.count, SOURCE)] * _SCALES[own]
        return out

    def step(
        self, memory: Memory, parameters: Sequence[Parameter], dtype: DType, grad_dtype: DType, implementation: str
    ) -> None:
        """Play a step. `dtype` is that of the weights."""
        self.check(implementation)
        unscaled: list[Tensor] = []
        for parameter in (one for p in parameters for one in [p] * p.count):
            with named(memory, parameter):
                unscaled += [temporary(memory, parameter.shape, fp32, f"{name} in fp32") for name in self.cast]
        for parameter in parameters:
            with named(memory, parameter):
                self._kernels(memory, parameter, grad_dtype)
        for own in self.cast.values():
            for parameter in one_by_one(memory, parameters):
                _scales(memory, parameter, own)
        del unscaled

    def _kernels(self, memory: Memory, parameter: Parameter, grad_dtype: DType) -> None:
        shape = parameter.shape
        of = [(shape, own if name not in self.cast else fp32) for name, own in self.state_dtypes.items()]
        streams(memory, "multi_tensor_adam", (shape, grad_dtype), *[(shape, self.weights)] * 2, *of, *of)
        for name, own in self.cast.items():
            streams(memory, f"{name}.float", (shape, own), (shape, fp32))
            if own is bf16:
                streams(memory, f"{name}.bfloat16", (shape, fp32), (shape, bf16))
                streams(memory, f"{name}.copy_", (shape, bf16), (shape, bf16))
                continue
            streams(memory, f"aminmax of {name}", (shape, fp32))
            if own is fp16:
                streams(memory, f"{name}.mul_", (shape, fp32), (shape, fp32))
            streams(memory, f"{name}.copy_", (shape, fp32), *[(shape, own)] * (2 if own is fp8 else 1))


def _scales(memory: Memory, parameter: Parameter, own: DType) -> None:
    """Cast a state back: bf16 by a copy of its own, the others in place, with a few numbers."""
    if own is bf16:
        temporary(memory, parameter.shape, bf16, "unscaled_state.bfloat16()")
        return
    least, most = (temporary(memory, (), fp32, name) for name in ("min_val", "max_val"))
    largest = temporary(memory, (), fp32, "absmax")
    if own is fp16:
        scaled = temporary(memory, _SCALE, boolean, "scale > 0")
        others = [temporary(memory, _SCALE, fp32, name) for name in ("reciprocal", "0.0", "rscale")]
        del scaled, others
    else:
        others = [temporary(memory, _SCALE, fp32, name) for name in ("1 / scale", "reciprocal")]
        del others
    del least, most, largest


def precision_aware(setup: Setup) -> PrecisionAware:
    """Return the optimizer of a setup that has it."""
    main, exp_avg, exp_avg_sq = setup.main_params_dtype, setup.exp_avg_dtype, setup.exp_avg_sq_dtype
    assert main is not None and exp_avg is not None and exp_avg_sq is not None
    return PrecisionAware(
        "precision-aware adam", ("fused",), setup.compute_dtype, DTYPES[main], DTYPES[exp_avg], DTYPES[exp_avg_sq]
    )


def pieces(elements: int, largest: int) -> list[Parameter]:
    """Return a rank's shard as the largest piece of a weight that it can have, and the rest: FusedAdam takes each weight's piece
    by itself."""
    first = min(elements, largest)
    sizes = {"largest weight": first, "rest": elements - first}
    return [Parameter(f"{name} of the shard", (Dim("elements", n),), 1, False) for name, n in sizes.items() if n]
