"""GPTModel of which a part trains: with frozen weights, and with Megatron-Bridge's adapters.

The norm before a column-parallel layer is a part of it, as in Transformer Engine's fused layer. So the norm's output dies with
the product, unless a trained weight or an adapter keeps it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memcalc.core.autograd import Constant, Node
from memcalc.core.dtypes import fp32
from memcalc.core.ops.elementwise import like
from memcalc.core.tensor import new_tensor
from memcalc.families.base.module import Module
from memcalc.megatron.adapters import adapter_weights, beside_column, beside_row, normed_column_parallel
from memcalc.megatron.fused_norms import FusedNormsModel
from memcalc.megatron.gpt_model import GPTModel
from memcalc.megatron.layers import column_parallel, is_frozen, row_parallel

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memcalc.core.tensor import Tensor
    from memcalc.families.base.architecture import Architecture
    from memcalc.families.base.module import Weight
    from memcalc.megatron.layers import TensorParallel
    from memcalc.megatron.layout import Layout
    from memcalc.megatron.trained import Adapters, Trained


class TrainedGPTModel(FusedNormsModel):
    """The modules of one rank, of which a part trains."""

    def __init__(self, a: Architecture, layout: Layout) -> None:
        super().__init__(a, layout)
        assert layout.trained is not None
        self.trained: Trained = layout.trained
        self.held = self.trained.frozen_by_layer

    @property
    def lora(self) -> Adapters | None:
        return self.trained.adapters

    def layer_weights(self, i: int) -> Iterator[Weight]:
        for weight in super().layer_weights(i):
            yield weight
            if self.lora is not None and weight.name.endswith(".weight") and self.is_adapted(weight.name[:-7]):
                yield from adapter_weights(weight, self.lora.rank, self.layout.tensor_parallel)

    def is_adapted(self, path: str) -> bool:
        """Tell whether the layer at a path has an adapter."""
        return self.lora is not None and path.rpartition(".")[2] in self.lora.targets

    def embed(self, m: Module, tp: TensorParallel, ids: Tensor, positions: Tensor) -> Tensor:
        """Return the embeddings. Megatron-Bridge makes them want a gradient for layers that are recomputed, whose adapters would
        get none without it (megatron/bridge/peft/recompute.py)."""
        out = super().embed(m, tp, ids, positions)
        if self.lora is not None and m.run.recompute and out.node is None:
            out.node = Constant(out.memory, out)
        return out

    def column(self, m: Module, tp: TensorParallel, x: Tensor, bias: Tensor | None = None) -> Tensor:
        norm = self.fused_norm(m)
        if self.is_adapted(m.path):
            assert norm is not None
            return self.adapted_column(norm, m, tp, x)
        if norm is not None:
            x = self.normed(norm, m, x)
        return column_parallel(m, tp, x, m.weight(), bias)

    def normed(self, norm: Module, m: Module, x: Tensor) -> Tensor:
        """Run the norm inside a fused layer. It saves its input even if neither that nor the norm wants a gradient, as long as
        the layer's weight does: there is one backward for both."""
        out, memory = GPTModel.norm(self, norm, x), x.memory
        if memory.grad_enabled and out.node is None and not is_frozen(m.weight()):
            kinds = ("rstd",) if self.a.rms_norm else ("mean", "rstd")
            kept = [new_tensor(memory, x.shape[:-1], fp32, f"norm {kind}") for kind in kinds]
            out.node = Node(memory, _unneeded_norm_backward, (), (x, *kept))
        return out

    def adapted_column(self, norm: Module, m: Module, tp: TensorParallel, x: Tensor) -> Tensor:
        """Run LoRALinear.forward around a column-parallel layer."""
        assert self.lora is not None
        linear_output, layernorm_output = normed_column_parallel(norm, m, tp, x, rms=self.a.rms_norm)
        adapter_output = beside_column(m / "adapter", tp, layernorm_output, self.lora.dropout)
        with m:
            return linear_output + adapter_output

    def row(self, m: Module, tp: TensorParallel, x: Tensor) -> Tensor:
        """Run a row-parallel layer, in LoRALinear.forward if it has an adapter."""
        linear_output = row_parallel(m, tp, x, m.weight())
        if self.lora is None or not self.is_adapted(m.path):
            return linear_output
        adapter_output: Any = beside_row(m / "adapter", tp, x, self.lora.dropout, self.hidden)
        with m:
            return linear_output + adapter_output


def _unneeded_norm_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    x, *kept = node.unpack()
    _grad_x = like(x, "norm gradient")
    _of_weights = [new_tensor(node.memory, x.shape[-1:], x.dtype, "norm weight gradient") for _ in kept]
    return []
