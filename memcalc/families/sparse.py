"""Stacks in which some layers' MLP is dense and the others' routes tokens to experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcalc.families.llama import Llama, linear_weights
from memcalc.families.module import Module, Weight, module

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator

    from memcalc.dims import Dim
    from memcalc.tensor import Tensor


class SparseLayers(Llama):
    """Llama's stack with a routed block in place of some layers' MLP."""

    def sparse(self, i: int) -> bool:
        """Whether layer `i` has experts."""
        raise NotImplementedError

    def sparse_weights(self) -> Iterator[Weight]:
        """Weights of a routed block, in the place of `mlp_weights`."""
        raise NotImplementedError

    def sparse_mlp(self, m: Module, x: Tensor) -> Tensor:
        """The forward of a routed block, a module."""
        raise NotImplementedError

    def variant(self, i: int) -> Hashable:
        return super().variant(i), self.sparse(i)

    def layer_weights(self, i: int) -> Iterator[Weight]:
        yield from self.attention_weights()
        yield from self.sparse_weights() if self.sparse(i) else self.mlp_weights()
        yield Weight("input_layernorm.weight", (self.hidden,), "norm")
        yield Weight("post_attention_layernorm.weight", (self.hidden,), "norm")

    @module
    def mlp(self, m: Module, x: Tensor) -> Tensor:
        assert m.layer is not None
        return self.sparse_mlp(m, x) if self.sparse(m.layer) else self.dense_mlp(m, x)

    def dense_mlp(self, m: Module, x: Tensor) -> Tensor:
        """The MLP of a layer without experts, and of what all tokens are sent to beside the experts."""
        return super().mlp(m, x)


def gated_mlp_weights(path: str, hidden: Dim, ffn: Dim, *, bias: bool = False) -> Iterator[Weight]:
    """The parameters of Llama's MLP, of any width."""
    yield from linear_weights(f"{path}.gate_proj", hidden, ffn, "mlp", bias=bias)
    yield from linear_weights(f"{path}.up_proj", hidden, ffn, "mlp", bias=bias)
    yield from linear_weights(f"{path}.down_proj", ffn, hidden, "mlp", bias=bias)
