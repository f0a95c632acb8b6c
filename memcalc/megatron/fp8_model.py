"""GPTModel whose linear layers multiply in fp8 (`--fp8-format`): attention, norms, routers, embeddings and the head stay in 16
bits.

The norm before a column-parallel layer is a part of it, as in Transformer Engine's fused layer, so the norm's output exists in
fp8 alone. Three layers save their input in 16 bits, because it is saved anyway: the projection of attention's output, the first
layer of shared experts, and a layer whose input is recomputed (`set_save_original_input`). The delayed recipe has none of these.

Experts' rows are padded to a multiple of 16 or 32 for each expert in a copy (Fp8Padding), and taken out of it after the experts.
They are counted without the rows that are added, a few of each expert's.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from memcalc.core.autograd import Node
from memcalc.core.ops.elementwise import recording
from memcalc.core.recomputed_outputs import kept_or_recomputed
from memcalc.core.tensor import Tensor, new_tensor
from memcalc.families.base.module import Module, module
from memcalc.inputs.options import refuse
from memcalc.megatron import fp8_layers
from memcalc.megatron.fp8 import Recipe
from memcalc.megatron.fused_norms import FusedNormsModel
from memcalc.megatron.latent import LatentAttention
from memcalc.megatron.moe import MoELayer

if TYPE_CHECKING:
    from memcalc.families.base.architecture import Architecture
    from memcalc.families.base.module import Weight
    from memcalc.megatron.layers import TensorParallel
    from memcalc.megatron.layout import Layout

_OF_LATENTS: Final = {"linear_q_up_proj": "q_layernorm", "linear_kv_up_proj": "kv_layernorm"}
"""The norm that a layer has taken in."""


def in_fp8(weight: Weight) -> bool:
    """Tell whether a weight is multiplied in fp8."""
    return (
        weight.name.endswith(".weight")
        and len(weight.shape) > 1
        and ("linear_" in weight.name or "eh_proj" in weight.name)
    )


def check_dims(weight: Weight, recipe: Recipe) -> None:
    """Raise InputError for a weight that products in fp8 do not take (assert_dim_for_fp8_exec of
    transformer_engine/pytorch/utils.py, MXFP8Quantizer.make_empty)."""
    if not in_fp8(weight):
        return
    out, given = (dim.size for dim in weight.shape[-2:])
    units = (32, 32) if recipe.name == "mxfp8" else (8, 16)
    if out % units[0] or given % units[1]:
        why = (
            f"products in fp8 need multiples of {units[0]} and {units[1]}, and a rank's {weight.name} is {out}·{given}"
        )
        refuse("fp8_recipe", recipe.name, f"{why}; allowed: leave it out, or another --tp")


class Fp8GPTModel(FusedNormsModel):
    """The modules of one rank, with products in fp8."""

    def __init__(self, a: Architecture, layout: Layout) -> None:
        super().__init__(a, layout)
        assert layout.fp8 is not None
        self.recipe: Recipe = layout.fp8
        self.latent = self._latent_in_fp8()
        if a.experts is not None:
            m = self.moe
            how = m.imbalance, m.fuses_accumulation, m.gated, m.recomputed
            self.moe = Fp8MoELayer(m.experts, m.hidden, m.expert_parallel, m.tensor_parallel, *how, recipe=self.recipe)
        for weight in self.weights():
            check_dims(weight, self.recipe)

    def _latent_in_fp8(self) -> LatentAttention | None:
        of = self.latent
        if of is None:
            return None
        recomputes_input = "layernorm" in self.layout.recomputed
        return Fp8LatentAttention(
            of.latent, of.hidden, of.heads, of.rms_norm, of.biased, self.recipe, recomputes_input
        )  # fmt: skip

    def column(self, m: Module, tp: TensorParallel, x: Tensor, bias: Tensor | None = None) -> Tensor:
        norm = self.fused_norm(m)
        weights = () if norm is None else weights_of(norm, rms=self.a.rms_norm)
        is_shared = m.path.rpartition(".")[0].endswith(".shared_experts")
        keeps = is_shared and self.keeps_inputs and "shared_experts" not in self.layout.recomputed
        return fp8_layers.column_parallel(m, tp, self.recipe, x, bias, weights, keeps_input=keeps)

    def row(self, m: Module, tp: TensorParallel, x: Tensor) -> Tensor:
        keeps = self.keeps_inputs and m.path.endswith(".linear_proj")
        return fp8_layers.row_parallel(m, tp, self.recipe, x, keeps_input=keeps)

    @property
    def keeps_inputs(self) -> bool:
        return self.recipe.name != "delayed"


def weights_of(norm: Module, *, rms: bool) -> tuple[Tensor, ...]:
    """Return the weights of a norm."""
    return (norm.weight(),) if rms else (norm.weight(), norm.weight("bias"))


@dataclass(frozen=True)
class Fp8LatentAttention(LatentAttention):
    """Latent attention whose projections multiply in fp8."""

    recipe: Recipe = field(default=Recipe("delayed", False))
    recomputes_input: bool = False
    """True if the norm before the projections to the latents is recomputed."""

    def norm(self, m: Module, x: Tensor) -> Tensor:
        return x  # a part of the projection from the latent

    def projected(self, m: Module, tp: TensorParallel, x: Tensor) -> Tensor:
        path, _, name = m.path.rpartition(".")
        of_norm = _OF_LATENTS.get(name)
        norm = Module(m.run, f"{path}.{of_norm}", m.layer) if of_norm is not None and self.latent.normed else None
        weights = () if norm is None else weights_of(norm, rms=self.rms_norm)
        keeps = self.recomputes_input and name in ("linear_q_down_proj", "linear_kv_down_proj")
        return fp8_layers.column_parallel(m, tp, self.recipe, x, None, weights, keeps_input=keeps)

    def row(self, m: Module, tp: TensorParallel, x: Tensor) -> Tensor:
        return fp8_layers.row_parallel(m, tp, self.recipe, x, keeps_input=self.recipe.name != "delayed")


@dataclass(frozen=True)
class Fp8MoELayer(MoELayer):
    """A layer of experts that multiply in fp8."""

    recipe: Recipe = field(default=Recipe("delayed", False))

    @module
    def grouped_mlp(self, m: Module, x: Tensor, probs: Tensor) -> Tensor:
        fused = self.fuses_accumulation
        recomputes = "moe_act" in self.recomputed
        given, weights = _copied(x, "padded rows of the experts"), _copied(probs, "padded weights of the rows")
        fc1_output = fp8_layers.grouped_linear(m / "linear_fc1", self.recipe, given, fused=fused, keeps_input=False)
        bias_act = kept_or_recomputed(self.weighted, recomputes=recomputes)
        bias_act_output = bias_act.checkpoint(fc1_output, weights)
        output = fp8_layers.grouped_linear(
            m / "linear_fc2", self.recipe, bias_act_output, fused=fused, keeps_input=recomputes
        )
        bias_act.discard_output_and_register_recompute(output)
        return _copied(output, "rows without padding")


def _copied(x: Tensor, name: str) -> Tensor:
    """Run Fp8Padding or Fp8Unpadding. Nothing is saved."""
    out = new_tensor(x.memory, x.shape, x.dtype, name)
    if recording(x):
        out.node = Node(x.memory, _copied_backward, (x,))
    return out


def _copied_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    shape, dtype = node.metadata[0]
    return [new_tensor(node.memory, shape, dtype, "gradient without padding")]
