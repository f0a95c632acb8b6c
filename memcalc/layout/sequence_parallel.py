"""Tensor parallelism with sequence parallelism by torch's own plan (`parallelize_module` with RowwiseParallel,
ColwiseParallel, SequenceParallel and PrepareModuleInput; torch/distributed/tensor/parallel/style.py).

Between attention and MLP a rank has its part of each sequence. Embeddings and the outputs of row-parallel layers are
reduced and scattered; the inputs of attention, MLP and head are gathered. q, k and v share one gathered input, so its
gradients are added up before they are reduced. Weights of norms are whole on every rank. Each rank has a part of the
sum that is their gradient; the sum is made when FSDP2 takes the gradient.

transformers derives positions from the length of the embeddings, which are a shard here. So the caller gives
`position_ids`.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from memcalc.core.autograd import Node
from memcalc.core.dims import ONE_DIM, Dim, whole_of
from memcalc.core.dtypes import fp32, int64
from memcalc.core.ops.elementwise import like, recording
from memcalc.core.ops.matmul import linear
from memcalc.core.selective import REDUCE_SCATTER, selected
from memcalc.core.tensor import Memory, Tensor, contiguous_strides, new_tensor
from memcalc.families.base.module import Input, Run
from memcalc.layout.tensor_parallel import TensorParallel, group_dim, part_of_sum

if TYPE_CHECKING:
    from collections.abc import Callable

    from memcalc.core.autograd import Leaf
    from memcalc.families.base.module import Weight
    from memcalc.families.base.plans import Plan

ENTERED: Final = (".self_attn", ".mlp")
"""The ends of the names of modules whose input is gathered (PrepareModuleInput)."""

LOSS_PARALLEL: Final[Plan] = {"lm_head": "colwise_gather_input"}
"""The entry of a plan that `loss_parallel` changes: the logits stay split over the vocabulary."""


class SequenceParallel(TensorParallel):
    """The tensor-parallel group of a run with sequence parallelism. Every parameter is a DTensor over the group."""

    __slots__ = ()

    def whole(self, shard: Dim) -> Dim:
        """Return the sequence length, given the length `shard` of a tensor between two layers."""
        return whole_of(shard, self.ranks, "/tp")

    def between_layers(self, whole: Dim) -> Dim:
        """Return this rank's part of a sequence: the length of a tensor between two layers."""
        return _part(whole, self.ranks)

    def given_positions(self, whole: Dim) -> Input | None:
        return Input("position_ids", (ONE_DIM, whole), int64)

    def entered(self, path: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the arguments of the module at `path`. The first is gathered if the plan says so."""
        if not path.endswith(ENTERED):
            return args
        first, *rest = args
        return (self._sequence_gathered(first, path.split("*.")[-1]), *rest)

    def linear(self, path: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        style = self.plan.get(path)
        name = path.split("*.")[-1]
        if style == "rowwise":
            return self._scattered(part_of_sum(x, weight, bias), name)
        if style not in ("colwise_gather_output", "colwise_gather_input"):
            return linear(x, weight, bias)
        out = linear(self._sequence_gathered(x, name), weight, bias)
        return out if style == "colwise_gather_input" else self._gathered(out, name, self.vocab)

    def embedding(self, table: Tensor, ids: Tensor) -> Tensor:
        name = table.name.removesuffix(".weight")
        partial = self._looked_up(table, ids)
        partial.node = self._lookup_node(table, ids)
        return self._scattered(partial, name)

    def gradient_hook(self, weight: Weight) -> Callable[[Tensor], None] | None:
        return None

    def is_split(self, name: str) -> bool:
        return True

    def own_part(self, leaf: Leaf, grad: Tensor) -> Tensor:
        """Return the gradient that FSDP2 takes: for a norm's weight the sum over the group
        (FSDPParam._get_grad_inner_tensor)."""
        if self.style(leaf.scope) not in (None, "replicated_with_grad_allreduce"):
            return super().own_part(leaf, grad)
        name = f"gradient of {leaf.scope.split('*.')[-1]}"
        self.send(grad.memory, "all_reduce", name, leaf.shape, grad.dtype, leaf.weight_layer)
        return new_tensor(grad.memory, leaf.shape, grad.dtype, leaf.scope, component="gradients")

    def _sequence_gathered(self, shard: Tensor, name: str) -> Tensor:
        """Redistribute from Shard(1) to Replicate. Backward redistributes from Partial to Shard(1)."""
        out = self._all_gathered(shard, f"input of {name}")
        if recording(shard):
            out.node = Node(shard.memory, _scatter_gradient, (shard,), (), (self, name))
        return out

    def _scattered(self, partial: Tensor, name: str) -> Tensor:
        """Redistribute from Partial to Shard(1). Backward redistributes from Shard(1) to Replicate."""
        out = self._reduce_scattered(partial, f"output of {name}")
        if recording(partial):
            out.node = Node(partial.memory, _gather_gradient, (partial,), (), (self, name))
        return out

    def _all_gathered(self, shard: Tensor, name: str) -> Tensor:
        """Gather the ranks' parts along the first dim, then copy them into the order of the sequence. A batch of one
        needs no copy."""
        batch, part, *rest = shard.shape
        full = (batch, self.whole(part), *rest)
        gathered = new_tensor(shard.memory, (group_dim(self.ranks), *shard.shape), shard.dtype, f"{name}, gathered")
        self.send(shard.memory, "all_gather", name, full, shard.dtype)
        if batch.size == 1:
            return Tensor(gathered.storage, full, contiguous_strides(full), shard.dtype)
        return new_tensor(shard.memory, full, shard.dtype, f"{name}, gathered and put in order")

    def _reduce_scattered(self, partial: Tensor, name: str) -> Tensor:
        """Copy the parts one behind the other, then reduce and scatter the copy."""
        batch, whole, *rest = partial.shape
        _ordered = like(partial, f"{name}, put in order")
        shape = batch, _part(whole, self.ranks), *rest

        def reduce_scatter() -> tuple[Tensor]:
            self.send(partial.memory, "reduce_scatter", name, partial.shape, partial.dtype)
            return (new_tensor(partial.memory, shape, partial.dtype, f"{name}, scattered"),)

        (out,) = selected(partial.memory, REDUCE_SCATTER, reduce_scatter)
        return out


def masks(program: Any, attention: str, seq_len: int) -> bool:
    """Tell whether a program's attention has a mask. transformers makes it as long as the embeddings, which are a
    shard."""
    return bool(_kinds_with_mask(program, attention, seq_len))


def layers_mask(program: Any, attention: str, seq_len: int) -> bool:
    """Tell whether a layer takes a mask: qwen2_moe makes one for windows that no layer may have."""
    masked = _kinds_with_mask(program, attention, seq_len)
    return any(program.layer_kind(i) in masked for i in range(program.layers))


def _kinds_with_mask(program: Any, attention: str, seq_len: int) -> list[str]:
    run = Run(Memory(), fp32, attention, False, Dim("batch", 1), Dim("seq", seq_len))
    return [kind for kind, mask in program.masks(run).items() if mask is not None]


@lru_cache(maxsize=1024)
def _part(whole: Dim, ranks: int) -> Dim:
    assert not whole.size % ranks
    return Dim(f"{whole.name}/tp", whole.size // ranks, tuple(c // ranks for c in whole.poly))  # type: ignore[arg-type]


def _scatter_gradient(node: Node, grads: list[Tensor]) -> list[Tensor]:
    parallel, name = node.context
    return [parallel._reduce_scattered(grads[0], f"input gradient of {name}")]


def _gather_gradient(node: Node, grads: list[Tensor]) -> list[Tensor]:
    parallel, name = node.context
    return [parallel._all_gathered(grads[0], f"output gradient of {name}")]
