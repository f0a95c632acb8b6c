"""DeepSpeed over Megatron-DeepSpeed's GPTModel: the slice of the model on one tensor-parallel rank, and its layers'
collectives.

DeepSpeed's engine sees a rank's slice as the model. ZeRO partitions it over the ranks of the data-parallel group, which
have the same slice. With `--pp` the slices are those of a pipeline's stages (pipeline.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from memcalc.core.dtypes import fp16, fp32, fp64
from memcalc.engines.base.sent import Group, collectives_of_run
from memcalc.engines.deepspeed.collectives import norms_of_stage_3
from memcalc.engines.deepspeed.zero_layout import STAGE_0, STAGE_3, STAGE_12
from memcalc.families.base.architecture import architecture_of
from memcalc.inputs.model import Model
from memcalc.kernels import Kernels
from memcalc.layout.collectives import Collective
from memcalc.megatron.layout import Layout
from memcalc.megatron.legacy import SOURCE, LegacyGPTModel

if TYPE_CHECKING:
    from memcalc.megatron.schedules import Span
    from memcalc.setup.setup import Setup
    from memcalc.tape.profile import Profile

KERNELS: Final = Kernels((), SOURCE, "modelled")
"""The kernels of Megatron-DeepSpeed: the program is written with them, nothing is replaced."""
LAYERS: Final = "decoder.layers.*"
LAYERS_SOURCE: Final = "Megatron-DeepSpeed megatron/core/tensor_parallel/layers.py"


def slice_of(model: Model, setup: Setup, span: Span | None = None) -> Model:
    """Return one rank's slice of the model: of every layer, or of a stage's layers."""
    a = architecture_of(model.model_type, model.program.config)
    layout = Layout(
        tensor_parallel=setup.tp,
        layers=a.layers if span is None else span.layers,
        first=span is None or span.first,
        last=span is None or span.last,
        selective=setup.recompute == "selective",
        fuses_accumulation=False,
        mask_in_batch=False,
    )
    key = "slice", layout
    if key not in model.profiles:
        model.profiles[key] = Model(model.name, model.model_type, LegacyGPTModel(a, layout))
    return model.profiles[key]


def collectives_of(model: Model, setup: Setup, profile: Profile) -> list[Collective]:
    """Return what a slice sends besides ZeRO's collectives: those of its layers in a run, and single numbers in the
    step."""
    norms = norms_of_stage_3(model, setup) if setup.zero == 3 else 1
    return [*tensor_parallel(profile, setup), *over_model_parallel_ranks(setup, norms)]


def tensor_parallel(profile: Profile, setup: Setup) -> list[Collective]:
    """Return what the layers have sent in a run."""
    return collectives_of_run(profile, setup, LAYERS, {"tp": Group("tp", setup.tp, LAYERS_SOURCE)})


def over_model_parallel_ranks(setup: Setup, norms: int = 1) -> list[Collective]:
    """Return the single numbers that all slices of a model agree on in the step: an overflow, and the norm.

    `norms` is the number of norms: stage 3 has one of each sub-group.
    """
    axis, ranks = ("tp", setup.tp) if setup.pp == 1 else ("pp", setup.tp * setup.pp)
    source = STAGE_3 if setup.zero == 3 else STAGE_12 if setup.zero else STAGE_0
    dtype = fp64 if setup.zero == 3 else fp32
    out: list[Collective] = []
    if setup.zero < 3 or setup.compute_dtype is fp16:
        name = "overflow check of all slices"
        out.append(Collective(axis, "all_reduce", name, "step", "uint8", ranks, 1, 1, "1·1 B", source=source))
    name, payload = "gradient norm of all slices", norms * dtype.itemsize
    formula = f"{norms}·{dtype.itemsize} B"
    out.append(Collective(axis, "all_reduce", name, "step", dtype.name, ranks, norms, payload, formula, source=source))
    return out
