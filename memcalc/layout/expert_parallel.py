"""Expert parallelism as transformers does it (`ep_plan`; distributed/expert_parallel.py, AllToAllEP, which training
takes).

Each rank has an equal part of every layer's experts. A copy of a token goes to the rank that has its expert in one
all-to-all, and the expert's output comes back in a second one. Before the first, ranks exchange the numbers of rows
that they send. The experts run on the received rows as if every row were a token with one expert and a weight of one;
the router's weights are applied to the outputs that come back. Rows are spread evenly over the experts, or one expert
of the rank has `imbalance` times its share.

Ranks of a tensor-parallel group have the same tokens. Each sends an equal slice of them, and the outputs are gathered.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil
from typing import TYPE_CHECKING, Any

from memcalc.core.autograd import Node, no_kernel
from memcalc.core.dims import ONE_DIM, Dim, merge
from memcalc.core.dtypes import int64
from memcalc.core.ops.elementwise import cast, like, recording
from memcalc.core.ops.routing import index, index_put_, sort, sum_middle
from memcalc.core.ops.shape import reshape, unsqueeze, view
from memcalc.core.tensor import Sent, Tensor, new_tensor
from memcalc.families.base.experts import Experts, RankExperts
from memcalc.families.base.module import module

if TYPE_CHECKING:
    from memcalc.core.dims import Shape
    from memcalc.core.dtypes import DType
    from memcalc.core.tensor import Memory
    from memcalc.families.base.module import Module
    from memcalc.families.base.program import Program
    from memcalc.layout.tensor_parallel import TensorParallel


@dataclass(frozen=True)
class DispatchedExperts(RankExperts):
    """A layer's experts. The rank has `own` and sends tokens to the others' (`ep_dispatch_experts`)."""

    ranks: int
    imbalance: float

    def forward(self, m: Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Call the module with an engine's hooks around it."""
        hooks = m.run.hooks
        if hooks is None:
            return self.ep_forward(m, hidden_states, top_k_index, top_k_weights)
        return hooks.layer(self.ep_forward, m, hidden_states, top_k_index, top_k_weights)

    @module
    def ep_forward(self, m: Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Run AllToAllEP.__call__: hidden states (tokens, hidden), indices and weights (tokens, per_token)."""
        with self.with_local_parameters(m):
            tokens, expert_ids, weights, order, own_weights = self.dispatch_tokens(
                hidden_states, top_k_index, top_k_weights, m.run.tensor_parallel
            )
            expert_output = self.local_experts.forward(m, tokens, expert_ids, weights)
            output = self.combine_tokens(expert_output, own_weights, order)
            if m.run.tensor_parallel is not None:
                output = slices_gathered(m.run.tensor_parallel, output, hidden_states.shape[0])
        return cast(output, hidden_states.dtype)

    def dispatch_tokens(
        self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, group: TensorParallel | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Send tokens to the experts (_dispatch_tokens).

        Returns the rows that this rank's experts run on, each row's expert and weight, and for the rows that this rank
        sends their order and the router's weights.
        """
        memory = hidden_states.memory
        if group is not None:
            hidden_states, top_k_index, top_k_weights = (
                own_slice(group, hidden_states, "tokens"),
                own_slice(group, top_k_index, "experts of tokens"),
                own_slice(group, top_k_weights, "weights of tokens"),
            )
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
        return recv_tokens, unsqueeze(recv_expert_ids, 1), recv_weights, order, top_k_weights

    def read_back(self, memory: Memory) -> None:
        """Copy the numbers of rows that go to and come from each rank to the host."""
        ranks = Dim("ep", self.ranks)
        _sums = [new_tensor(memory, (ranks,), int64, "rows of a rank") for _ in range(2)]
        _stacked = new_tensor(memory, (Dim("2", 2), ranks), int64, "rows of a rank")

    def local_ids(self, recv_tokens: Tensor, recv_counts: Tensor) -> Tensor:
        """Compute `torch.arange(local experts).repeat(ranks).repeat_interleave(recv_counts)`."""
        memory = recv_tokens.memory
        _arange = new_tensor(memory, (self.local_experts.count,), int64, "arange")
        _repeated = like(recv_counts, "experts of each rank")
        del _arange
        _indices = new_tensor(memory, recv_tokens.shape[:1], int64, "place of a row")
        return like(_indices, "expert of a row")

    def combine_tokens(self, expert_output: Tensor, top_k_weights: Tensor, order: Tensor) -> Tensor:
        """Return the outputs in the order of their tokens, weighted and summed (_combine_tokens)."""
        tokens, per_token = top_k_weights.shape
        recv_out = self.all_to_all(expert_output, "outputs of experts", merge(tokens, per_token))
        token_outputs = like(recv_out, "rows by token")
        token_outputs = index_put_(token_outputs, order, recv_out)
        token_outputs = view(token_outputs, tokens, per_token, expert_output.shape[1])
        return sum_middle(token_outputs * unsqueeze(top_k_weights, 2))

    def received(self, copies: Dim) -> Dim:
        """Return the number of rows that come to the rank's experts, when every rank sends `copies` rows."""
        return copies if self.imbalance == 1 else _busiest(copies, self.local_experts.count.size, self.imbalance)

    def all_to_all(self, x: Tensor, name: str, rows: Dim) -> Tensor:
        """Run all_to_all_single_autograd: send the rows of `x`, receive `rows` rows."""
        _send(x.memory, self.ranks, name, x.shape, x.dtype)
        out = new_tensor(x.memory, (rows, *x.shape[1:]), x.dtype, f"{name}, received")
        if recording(x):
            out.node = Node(x.memory, _all_to_all_backward, (x,), (), (self.ranks, name))
        return out


def own_slice(group: TensorParallel, x: Tensor, name: str) -> Tensor:
    """Redistribute from Replicate to Shard(0): a copy of this rank's rows. Backward gathers the rows' gradients."""
    tokens, *rest = x.shape
    out = new_tensor(x.memory, (_slice(tokens, group.ranks), *rest), x.dtype, f"{name}, own slice")
    if recording(x):
        out.node = Node(x.memory, _slices_of_gradient, (x,), (), (group, name))
    return out


def slices_gathered(group: TensorParallel, own: Tensor, tokens: Dim) -> Tensor:
    """Compute `full_tensor()` of Shard(0): every rank's rows. Backward copies this rank's rows of the gradient."""
    whole = (tokens, *own.shape[1:])
    out = new_tensor(own.memory, whole, own.dtype, "outputs of experts, gathered")
    group.send(own.memory, "all_gather", "outputs of experts", whole, own.dtype)
    if recording(own):
        out.node = Node(own.memory, _own_slice_of_gradient, (own,))
    return out


def expert_path(program: Program) -> str | None:
    """Return the path of a layer's routed experts as in the names of their weights; None for a dense model."""
    name = next((w.name for w in program.weights() if w.component == "experts"), None)
    return None if name is None else name.rpartition(".")[0]


def runs_dispatched(program: Program) -> bool:
    """Tell whether `ep_dispatch_experts` supports the program's experts: each product has one tensor for all experts of
    a layer."""
    return isinstance(getattr(program, "experts", None), Experts)


def share_experts(program: Program, ranks: int, imbalance: float) -> Program:
    """Return the program of one of `ranks` expert-parallel ranks. The number of experts must be divisible by
    `ranks`."""
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
def _slice(tokens: Dim, ranks: int) -> Dim:
    assert not tokens.size % ranks
    return Dim(f"{tokens.name}/tp", tokens.size // ranks)


@lru_cache(maxsize=1024)
def _busiest(copies: Dim, local: int, imbalance: float) -> Dim:
    """Return the rows of the rank with the busiest expert: one of its `local` experts gets `imbalance` times its
    share."""
    return Dim("rows of the busiest rank", ceil(copies.size * (local - 1 + imbalance) / local))


def _send(memory: Memory, ranks: int, name: str, shape: Shape, dtype: DType) -> None:
    if ranks > 1:
        memory.sent.append(Sent("ep", "all_to_all", name, memory.phase, memory.layer, shape, dtype))


def _slices_of_gradient(node: Node, grads: list[Tensor]) -> list[Tensor]:
    group, name = node.context
    shape, _ = node.metadata[0]
    group.send(node.memory, "all_gather", f"gradient of {name}", shape, grads[0].dtype)
    return [new_tensor(node.memory, shape, grads[0].dtype, f"gradient of {name}, gathered")]


@no_kernel
def _own_slice_of_gradient(node: Node, grads: list[Tensor]) -> list[Tensor]:
    shape, _ = node.metadata[0]
    return [new_tensor(node.memory, shape, grads[0].dtype, "gradient of the experts' outputs, own slice")]


def _all_to_all_backward(node: Node, grads: list[Tensor]) -> list[Tensor]:
    ranks, name = node.context
    shape, dtype = node.metadata[0]
    _send(node.memory, ranks, f"gradient of {name}", grads[0].shape, dtype)
    return [new_tensor(node.memory, shape, dtype, f"gradient of {name}, received")]
