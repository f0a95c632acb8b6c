"""The layout of a chunk of GPTModel, from a setup."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcalc.megatron.fp8 import Recipe
from memcalc.megatron.layout import Layout

if TYPE_CHECKING:
    from memcalc.families.base.architecture import Architecture
    from memcalc.megatron.schedules import Span
    from memcalc.megatron.trained import Trained
    from memcalc.setup.setup import Setup


def recipe_of(setup: Setup) -> Recipe:
    """Return how linear layers cast to fp8 on the named GPU, without one as on Hopper."""
    assert setup.fp8_recipe is not None
    return Recipe(setup.fp8_recipe, any_layout=setup.gpu is not None and takes_any_layout(setup.gpu))


def takes_any_layout(gpu: str) -> bool:
    """Tell whether a GPU multiplies matrices of any layout in fp8 (nvte_is_non_tn_fp8_gemm_supported)."""
    from memcalc.inputs.gpu import load_gpu

    capability = tuple(map(int, load_gpu(gpu).compute_capability.split(".")))
    return (10, 0) <= capability < (12, 0) or capability >= (13, 0)


def layout_of(setup: Setup, a: Architecture, span: Span, trained: Trained | None) -> Layout:
    """Return the layout of the layers of `span`, of which `trained` says what trains."""
    modules = (setup.recompute_modules or "core_attn").split(",")
    return Layout(
        tensor_parallel=setup.tp,
        sequence_parallel=setup.sequence_parallel,
        context_parallel=setup.cp,
        cp_comm_type=setup.cp_comm_type,
        expert_parallel=setup.ep,
        expert_tensor_parallel=setup.etp,
        expert_imbalance=setup.expert_imbalance,
        layers=span.layers,
        recompute_layers=setup.recompute_layers,
        routed=a.routed(span.start, span.layers),
        first=span.first,
        last=span.last,
        ends=None if not a.mtp else span.layers > 0 and span.start + span.layers == a.layers,
        selective=setup.recompute == "selective" and "core_attn" in modules,
        offloaded=() if setup.offload_modules is None else tuple(setup.offload_modules.split(",")),
        recomputed=tuple(module for module in modules if module != "core_attn"),
        loss=setup.cross_entropy or "vocab-parallel",
        fuses_accumulation=setup.gradient_accumulation_fusion is not False,
        mask_in_batch=setup.attention_mask_in_dataloader is not False,
        exchanging=setup.cp_exchange_size or 1,
        fp8=None if setup.fp8_recipe is None else recipe_of(setup),
        trained=None if trained is None else trained.of_span(span.start, span.layers),
    )
