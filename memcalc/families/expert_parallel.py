"""Expert parallelism as transformers does it (`ep_plan`; distributed/expert_parallel.py, AllToAllEP, which training takes).

Each rank has an equal part of every layer's experts. A copy of a token goes to the rank that has its expert, in an
all-to-all, and what the expert makes of it comes back in a second one. Before the first, ranks exchange how many rows they
send. The experts run on what they have received as if every row were a token with one expert and a weight of one; the
router's weights are applied to what comes back. Rows are spread evenly over the experts, or by `imbalance` one expert of the
rank has that many times its share.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil
from typing import TYPE_CHECKING, Any

from memcalc.autograd import Node
from memcalc.dims import ONE_DIM, Dim, merge
from memcalc.dtypes import int64
from memcalc.families.experts import Experts
from memcalc.families.module import module
from memcalc.ops.elementwise import cast, like, recording
from memcalc.ops.routing import index, index_put_, sort, sum_middle
from memcalc.ops.shape import reshape, unsqueeze, view
from memcalc.tensor import Sent, Tensor, new_tensor

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memcalc.dims import Shape
    from memcalc.dtypes import DType
    from memcalc.families.module import Module, Weight
    from memcalc.families.program import Program
    from memcalc.tensor import Memory


@dataclass(frozen=True)
class DispatchedExperts:
    """A layer's experts, of which a rank has its own and sends tokens to the others' (`ep_dispatch_experts`)."""

    whole: Experts
    own: Experts
    ranks: int
    imbalance: float

    @property
    def count(self) -> Dim:
        """All experts, as the router sees them."""
        return self.whole.count

    @property
    def per_token(self) -> Dim:
        """Experts that a token is sent to."""
        return self.whole.per_token

    def weights(self, path: str) -> Iterator[Weight]:
        """Those of the rank's own experts (`grouped_gemm`)."""
        return self.own.weights(path)

    def forward(self, m: Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """The module's call, with an engine's hooks around it."""
        hooks = m.run.hooks
        if hooks is None:
            return self.ep_forward(m, hidden_states, top_k_index, top_k_weights)
        return hooks.layer(self.ep_forward, m, hidden_states, top_k_index, top_k_weights)

    @module
    def ep_forward(self, m: Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """AllToAllEP.__call__: hidden states (tokens, hidden), indices and weights (tokens, per_token)."""
        tokens, expert_ids, weights, order = self.dispatch_tokens(hidden_states, top_k_index)
        expert_output = self.own.forward(m, tokens, expert_ids, weights)
        output = self.combine_tokens(expert_output, top_k_weights, order)
        return cast(output, hidden_states.dtype)

    def dispatch_tokens(self, hidden_states: Tensor, top_k_index: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """_dispatch_tokens: the rows that this rank's experts run on, each row's expert and weight, the order of those sent."""
        memory = hidden_states.memory
        expert_ids = reshape(top_k_index, merge(*top_k_index.shape))
        order = sort(expert_ids)[1]
        send_tokens = index(hidden_states, like(order, "token of a row"), "rows by expert")
        send_counts = new_tensor(memory, (self.count,), int64, "rows for each expert")
        _ones = like(expert_ids, "ones")
        del _ones
        recv_counts = new_tensor(memory, (self.count,), int64, "rows from each rank")
        _send(memory, self.ranks, "rows for each expert", send_counts.shape, int64)
        self.read_back(memory)
        recv_tokens = self.all_to_all(send_tokens, "tokens to experts", self.received(expert_ids.shape[0]))
        recv_expert_ids = self.local_ids(recv_tokens, recv_counts)
        recv_weights = new_tensor(memory, (recv_tokens.shape[0], ONE_DIM), recv_tokens.dtype, "weights of one")
        return recv_tokens, unsqueeze(recv_expert_ids, 1), recv_weights, order

    def read_back(self, memory: Memory) -> None:
        """How many rows go to and come from each rank, on their way to the host."""
        ranks = Dim("ep", self.ranks)
        _sums = [new_tensor(memory, (ranks,), int64, "rows of a rank") for _ in range(2)]
        _stacked = new_tensor(memory, (Dim("2", 2), ranks), int64, "rows of a rank")

    def local_ids(self, recv_tokens: Tensor, recv_counts: Tensor) -> Tensor:
        """torch.arange(local experts).repeat(ranks).repeat_interleave(recv_counts)"""
        memory = recv_tokens.memory
        _arange = new_tensor(memory, (self.own.count,), int64, "arange")
        _repeated = like(recv_counts, "experts of each rank")
        del _arange
        _indices = new_tensor(memory, recv_tokens.shape[:1], int64, "place of a row")
        return like(_indices, "expert of a row")

    def combine_tokens(self, expert_output: Tensor, top_k_weights: Tensor, order: Tensor) -> Tensor:
        """_combine_tokens: the rows in the order of their tokens, weighted and added up."""
        tokens, per_token = top_k_weights.shape
        recv_out = self.all_to_all(expert_output, "outputs of experts", merge(tokens, per_token))
        token_outputs = like(recv_out, "rows by token")
        token_outputs = index_put_(token_outputs, order, recv_out)
        token_outputs = view(token_outputs, tokens, per_token, expert_output.shape[1])
        return sum_middle(token_outputs * unsqueeze(top_k_weights, 2))

    def received(self, copies: Dim) -> Dim:
        """Rows that come to the rank's experts, when every rank sends `copies` rows."""
        return copies if self.imbalance == 1 else _busiest(copies, self.own.count.size, self.imbalance)

    def all_to_all(self, x: Tensor, name: str, rows: Dim) -> Tensor:
        """all_to_all_single_autograd: `rows` rows for those of `x`."""
        _send(x.memory, self.ranks, name, x.shape, x.dtype)
        out = new_tensor(x.memory, (rows, *x.shape[1:]), x.dtype, f"{name}, received")
        if recording(x):
            out.node = Node(x.memory, _all_to_all_backward, (x,), (), (self.ranks, name))
        return out


def expert_path(program: Program) -> str | None:
    """The module of the routed experts in a layer, as the names of their weights have it; None for a dense model."""
    names = [w.name for w in program.weights() if w.component == "experts"]
    return names[0].rpartition(".")[0] if names else None


def runs_dispatched(program: Program) -> bool:
    """Whether its experts are what `ep_dispatch_experts` is written for: a tensor of all of a layer's for each product."""
    return isinstance(getattr(program, "experts", None), Experts)


def share_experts(program: Program, ranks: int, imbalance: float) -> Program:
    """The program of one of `ranks` expert-parallel ranks; the experts have to divide."""
    own: Any = copy.copy(program)
    whole: Experts = own.experts
    local = replace(whole, count=_part(whole.count, ranks), per_token=ONE_DIM, is_expert_parallel=True)
    own.experts = DispatchedExperts(whole, local, ranks, imbalance)
    own.polynomial = program.polynomial and imbalance == 1
    return own


@lru_cache(maxsize=1024)
def _part(count: Dim, ranks: int) -> Dim:
    assert not count.size % ranks
    return Dim(f"{count.name}/ep", count.size // ranks)


@lru_cache(maxsize=1024)
def _busiest(copies: Dim, local: int, imbalance: float) -> Dim:
    """Of its `local` experts one has `imbalance` times its share."""
    return Dim("rows of the busiest rank", ceil(copies.size * (local - 1 + imbalance) / local))


def _send(memory: Memory, ranks: int, name: str, shape: Shape, dtype: DType) -> None:
    if ranks > 1:
        memory.sent.append(Sent("ep", "all_to_all", name, memory.phase, memory.layer, shape, dtype))


def _all_to_all_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    ranks, name = node.context
    shape, dtype = node.metadata[0]
    _send(node.memory, ranks, f"gradient of {name}", grads[0].shape, dtype)
    return [new_tensor(node.memory, shape, dtype, f"gradient of {name}, received")]
