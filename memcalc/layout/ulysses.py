"""A rank's program where ranks share sequences: the rank has its tokens of each sequence, between the layers and in
them.

The data loader cuts the caller's ids, positions and labels (DeepSpeed 0.19.8
deepspeed/runtime/sequence_parallel/ulysses_sp.py, UlyssesSPDataLoaderAdapter). The labels are shifted before the cut,
so the model's loss takes them as they are. The loss is the mean over all ranks' tokens
(transformers/integrations/deepspeed.py, deepspeed_sp_compute_loss), as in HF Trainer and in DeepSpeed's own recipe.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from memcalc.core.autograd import Node
from memcalc.core.dims import Dim
from memcalc.core.dtypes import boolean, int64
from memcalc.core.ops.elementwise import like, recording
from memcalc.core.tensor import Memory, Sent, Tensor, new_tensor
from memcalc.families.base.module import Input

if TYPE_CHECKING:
    from memcalc.core.dtypes import DType
    from memcalc.families.base.module import Run
    from memcalc.layout.collectives import Kind


@lru_cache
def group_dim(ranks: int) -> Dim:
    """Return the dim that counts the ranks of a sequence."""
    return Dim("cp", ranks)


@lru_cache(maxsize=1024)
def _part(seq: Dim) -> Dim:
    return Dim("seq/cp", seq.size, seq.poly)


class Ulysses(NamedTuple):
    """The ranks that share a sequence."""

    ranks: int

    def length_on_rank(self, shard: Dim) -> Dim:
        """Return the dim of this rank's tokens of a sequence; `shard` is their number."""
        return _part(shard)

    def inputs(self, batch: Dim, own: Dim) -> tuple[Input, ...]:
        """Return the batch as the data loader cuts it."""
        return tuple(Input(name, (batch, own), int64) for name in ("input_ids", "position_ids", "shift_labels"))

    def give(self, run: Run) -> Tensor:
        """Return the rank's ids. The run gets its positions and labels."""
        ids, run.positions, run.shift_labels = (run.add_input(one) for one in self.inputs(run.batch, run.seq))
        return ids

    def loss(self, run: Run, loss: Tensor) -> Tensor:
        """Return the mean loss over the tokens of all ranks. Each rank has its own mean and count."""
        assert run.shift_labels is not None
        memory = run.memory
        memory.scope = "loss of all ranks"
        by_rank = group_dim(self.ranks)
        _losses = self._gathered(memory, loss.dtype, "losses")
        counted = like(run.shift_labels, "tokens that count", boolean)
        _count = new_tensor(memory, (), int64, "how many count")
        del counted
        _counts = self._gathered(memory, int64, "how many tokens count")
        stacked = new_tensor(memory, (by_rank,), loss.dtype, "losses")
        stacked_counts = new_tensor(memory, (by_rank,), int64, "counts")
        some = like(stacked_counts, "ranks with tokens", boolean)
        zeros = like(stacked, "zeros")
        safe = like(stacked, "losses of ranks with tokens")
        del zeros
        product = like(safe, "losses times counts")
        _total = new_tensor(memory, (), loss.dtype, "sum of losses")
        del product
        _total_count = new_tensor(memory, (), int64, "tokens that count")
        divisor = new_tensor(memory, (), int64, "tokens that count, at least 1")
        out = new_tensor(memory, (), loss.dtype, "loss")
        if recording(loss):
            out.node = Node(memory, _scattered, (loss,), (some, stacked_counts, divisor), self.ranks)
        run.logits = None
        return out

    def _gathered(self, memory: Memory, dtype: DType, name: str) -> list[Tensor]:
        _note(memory, "all_gather", name, self.ranks, dtype)
        return [new_tensor(memory, (), dtype, f"{name} of a rank") for _ in range(self.ranks)]


def _scattered(node: Node, grads: list[Tensor]) -> list[Tensor]:
    """Reduce and scatter the gradients of the losses: each rank's loss is in every rank's mean."""
    _saved = node.unpack()
    _note(node.memory, "reduce_scatter", "gradient of the losses", node.context, grads[0].dtype)
    return [like(grads[0], "gradient of this rank's loss")]


def _note(memory: Memory, kind: Kind, name: str, ranks: int, dtype: DType) -> None:
    memory.sent.append(Sent("cp", kind, name, memory.phase, None, (group_dim(ranks),), dtype))
