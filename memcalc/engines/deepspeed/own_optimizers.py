"""DeepSpeed's own optimizers in stage 0: FusedLamb, and the 1-bit optimizers of DeepSpeed 0.19.6.

1-bit Adam and 0/1 Adam update one flat fp32 copy of the weights, as FusedAdam does (fp16/fused_optimizer.py, FP16_Optimizer).
LAMB's norms are of a weight each, so its fp32 copies are too (fp16/unfused_optimizer.py, FP16_UnfusedOptimizer): the 16-bit
gradients stay until the step is over. Without 16-bit weights the optimizer updates the weights themselves. After the warm-up of
a 1-bit optimizer DeepSpeed reduces no gradients (`enable_backward_allreduce`); only a flag says whether one overflowed anywhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from memcalc.core.dims import Dim, numel
from memcalc.core.dtypes import fp32
from memcalc.core.rows import Row
from memcalc.engines.base.holdings import larger, parameter_classes, state_rows, temporaries_of, weight_rows
from memcalc.engines.deepspeed.zero_layout import STAGE_0
from memcalc.layout.collectives import Collective, Kind
from memcalc.optimizers import Parameter, load_optimizer
from memcalc.optimizers.of_deepspeed.compressed_allreduce import SOURCE, Compressed

if TYPE_CHECKING:
    from memcalc.engines.base.holdings import Holdings
    from memcalc.inputs.model import Model
    from memcalc.optimizers import Optimizer
    from memcalc.setup.setup import Setup

UNFUSED: Final = "deepspeed/runtime/fp16/unfused_optimizer.py"
_BY_WEIGHT: Final = ("lamb", "onebit-lamb")
"""The optimizers that FP16_UnfusedOptimizer is around."""


def adapted(model: Model, setup: Setup, held: Holdings) -> Holdings:
    """Return what stage 0 holds with one of these optimizers."""
    optimizer = load_optimizer(setup.optimizer)
    always, halved = held.always, setup.has_master_weights
    if setup.optimizer in _BY_WEIGHT:
        name = ": fp32 master"
        masters = weight_rows(model, fp32, "optimizer_states", "always", name, source=UNFUSED, of=lambda _: halved)
        states = state_rows(setup, parameter_classes(model), fp32)
        always = (*(row for row in always if row.component != "optimizer_states"), *masters, *states)
    step = _step(model, setup, optimizer.among(setup.averaging, setup.compression_phase), held)
    after = held.after_backward if _reduces_gradients(setup) else ()
    return held._replace(always=always, step=tuple(step), after_backward=after, order=None)


def _reduces_gradients(setup: Setup) -> bool:
    """Tell whether the engine all-reduces gradients in the phase that is reported."""
    return setup.compression_phase != "compressed"


def _step(model: Model, setup: Setup, optimizer: Optimizer, held: Holdings) -> list[Row]:
    """Return the rows of the largest moment of a step."""
    gradients = weight_rows(model, setup.compute_dtype, "gradients", "backward to step")
    weights = parameter_classes(model)
    total = sum(one.count * numel(one.shape)[0] for one in weights)
    how = setup.optimizer_implementation
    if not setup.has_master_weights:
        return [*gradients, *temporaries_of(optimizer, how, weights, fp32, fp32)]
    if setup.optimizer == "lamb":
        return [*gradients, *_norm_of_lamb(setup, total)]
    if setup.optimizer in _BY_WEIGHT:
        casts = weight_rows(model, fp32, "temporaries", "within the step", ": gradient in fp32", source=UNFUSED)
        return [*gradients, *casts, *temporaries_of(optimizer, how, weights, fp32, fp32)]
    flat = Parameter("flat fp32 weights", (Dim("parameters", total),), 1, False)
    joined = _temporary("gradients flattened in fp32", total, STAGE_0)
    return larger([*held.step], [joined, *temporaries_of(optimizer, how, [flat], fp32, fp32)])


def _norm_of_lamb(setup: Setup, total: int) -> list[Row]:
    """Return the blocks of step_fused_lamb while it computes the norm of all gradients: they are joined, twice, and cast. What
    the kernels of the update borrow later is less."""
    joined = _temporary("gradients joined", total, UNFUSED)._replace(dtype=setup.compute_dtype)
    return [
        joined,
        joined._replace(name="gradients joined for the norm"),
        _temporary("gradients in fp32 for the norm", total, UNFUSED),
        _temporary("norm", 1, UNFUSED),
    ]


def _temporary(name: str, elements: int, source: str) -> Row:
    shape = (Dim("parameters", elements),)
    return Row("temporaries", name, shape, fp32, life="within the step", basis="modelled", source=source)


# --- what is sent


def compressed_tensors(model: Model, setup: Setup) -> list[tuple[Compressed, int]]:
    """Return the tensors that a 1-bit optimizer reduces in a step, each with their number."""
    weights, ranks = parameter_classes(model), setup.averaging
    total = Compressed(sum(one.count * numel(one.shape)[0] for one in weights), ranks)
    if setup.optimizer in _BY_WEIGHT or setup.has_master_weights:
        return [(total, 1)]
    return [(Compressed(numel(one.shape)[0], ranks), one.count) for one in weights]


def compressed_collectives(model: Model, setup: Setup) -> list[Collective]:
    """Return what a 1-bit optimizer sends in a step after the warm-up: signs and scales of two phases."""
    tensors, ranks = compressed_tensors(model, setup), setup.averaging
    calls = sum(count for _, count in tensors)
    packed = sum(count * sizes.packed for sizes, count in tensors)
    scales = f"{calls}·{ranks}·4 B"

    def one(kind: Kind, name: str, dtype: str, payload: int, formula: str) -> Collective:
        return Collective(
            "dp", kind, name, "step", dtype, ranks, calls, payload, f"{formula} = {payload} B", source=SOURCE
        )

    signs = f"padded parameters/8 B = {8 * packed}/8 B"
    out = [
        one("all_to_all", "signs of the ranks' own tensors", "uint8", packed, signs),
        one("all_gather", "scales of the ranks' own tensors", "fp32", calls * ranks * 4, scales),
        one("all_gather", "signs of the averages", "uint8", packed, signs),
        one("all_gather", "scales of the averages", "fp32", calls * ranks * 4, scales),
    ]
    return [*out, *_flag(setup, "uint8", 1, "has_overflow")]


def overflow_of_lamb(setup: Setup) -> list[Collective]:
    """Return what FusedLamb's 16-bit gradients add to a step: a flag whether one overflowed on any rank."""
    return _flag(setup, "fp32", 4, "check_using_norm")


def _flag(setup: Setup, dtype: str, nbytes: int, function: str) -> list[Collective]:
    """Return the all-reduce of CheckOverflow, which is there if the weights are of 16 bits."""
    name, source = "overflow check", f"deepspeed/runtime/utils.py: CheckOverflow.{function}"
    flag = Collective(
        "dp", "all_reduce", name, "step", dtype, setup.averaging, 1, nbytes, f"1·{nbytes} B", source=source
    )
    return [flag] if setup.has_master_weights else []
