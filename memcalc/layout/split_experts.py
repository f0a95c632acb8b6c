"""Routed experts whose width is split over the tensor-parallel ranks (transformers' MoeExpertsParallel,
distributed/tensor_parallel.py). The router and all tokens are whole on every rank, so no token is sent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from memcalc.families.base.experts import RankExperts
from memcalc.families.base.module import module

if TYPE_CHECKING:
    from memcalc.core.tensor import Tensor
    from memcalc.families.base.module import Module


@dataclass(frozen=True)
class SplitExperts(RankExperts):
    """A layer's experts. The rank has `own`, a part of each expert."""

    @module
    def forward(self, m: Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Run the experts: hidden states (tokens, hidden), indices and weights (tokens, per_token). Gradients of hidden
        states and weights are summed over the ranks."""
        group, name = m.run.tensor_parallel, m.path.split("*.")[-1]
        assert group is not None
        hidden_states = group.gradient_summed(hidden_states, f"tokens of {name}")
        top_k_weights = group.gradient_summed(top_k_weights, f"weights of {name}")
        with self.with_local_parameters(m):
            output = self.local_experts.forward(m, hidden_states, top_k_index, top_k_weights)
        return group.of_experts(output, name)
