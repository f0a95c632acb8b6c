"""Context parallelism of transformers' models as the Trainer runs it: a step inside torch's `context_parallel`
(trainer.py, _prepare_context_parallel_inputs; accelerate 1.15, maybe_context_parallel).

The batch is input_ids, labels, shift_labels and position_ids, each of whole sequences. They are cut in place: a rank
continues with its two chunks of every sequence, and the storages stay as large as they were. Everything outside
attention runs over those tokens only, attention over all (memcalc/core/ops/ring_attention.py).

In a pipeline the whole step of its schedule is in the context, as in torchtitan's trainer. The ids of the first stage
and the shifted labels of the last one are cut, and then split into micro-batches. Every stage gets the same positions,
with a batch dim of 1. They are restored after the step, as torchtitan restores its rotary frequencies.

Positions that jump from the early chunk to the late one look like packed sequences to transformers. So all ranks but
the last one build a mask of their own tokens. accelerate removes the mask from the modules that run, those called
`self_attn`; the model's forward holds it, and so does every checkpoint.
"""

from __future__ import annotations

import copy
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from memcalc.core.dims import ONE_DIM, Dim
from memcalc.core.dtypes import int64
from memcalc.core.ops.ring_attention import Ring, ring_attention
from memcalc.core.ops.shape import contiguous, transpose
from memcalc.core.tensor import Tensor, contiguous_strides, new_tensor
from memcalc.families.base.blocks import Attended, causal_lm_loss, masked_lm_loss, repeat_kv, sdpa_attention
from memcalc.families.base.masks import causal_mask, causal_mask_of_one_sequence, packed_causal_mask
from memcalc.families.base.module import Input

if TYPE_CHECKING:
    from collections.abc import Callable

    from memcalc.core.dims import Shape
    from memcalc.core.tensor import Memory
    from memcalc.families.base.module import Run
    from memcalc.families.base.program import Program

SOURCE: Final = (
    "torch 2.13 torch/distributed/tensor/experimental/_context_parallel/_attention.py; transformers' forward; torch "
    "tools/autograd/derivatives.yaml"
)
_CHUNKS: Final = 2
"""The number of chunks of a sequence on a rank."""
GIVEN: Final = ("input_ids", "labels", "shift_labels", "position_ids")
"""The tensors of the batch."""


class ContextParallel(NamedTuple):
    """The sharing of a program's sequences. The program's sizes are polynomials in the tokens of a chunk."""

    ring: Ring

    @property
    def ranks(self) -> int:
        return self.ring.ranks

    def length_on_rank(self, chunk: Dim) -> Dim:
        """Return a rank's tokens of a sequence."""
        return _tokens(chunk, _CHUNKS, "seq/cp")

    def inputs(self, batch: Dim, own: Dim) -> tuple[Input, ...]:
        """Return the whole batch, if a rank has `own` tokens of each sequence."""
        return tuple(Input(name, (batch, self.whole(own)), int64) for name in GIVEN)

    def whole(self, own: Dim) -> Dim:
        """Return the whole sequence length, if a rank has `own` tokens of it."""
        return _tokens(own, self.ring.ranks, "seq")

    def positions(self, own: Dim) -> Input:
        """Return the positions of the whole sequence, which a pipeline's stages are given. The context leaves a rank
        `own` of them."""
        return Input("position_ids", (ONE_DIM, self.whole(own)), int64)

    def cut_positions(self, positions: Tensor, own: Dim) -> Tensor:
        return _resized(positions, (ONE_DIM, own))

    def held_around_a_schedule(self, memory: Memory, batch: Shape | None, own: Dim) -> list[Tensor]:
        """Allocate the variables of context_parallel's frame around a schedule.

        They are the shard of the `batch` (ids or labels, on a rank that has them), the shard of the positions, a copy
        of that shard, and the whole positions.
        """
        cut = (ONE_DIM, own)
        shapes = [*([] if batch is None else [batch]), cut, cut, (ONE_DIM, self.whole(own))]
        return [new_tensor(memory, shape, int64, "shard of the batch", component="gathered") for shape in shapes]

    def give(self, run: Run) -> Tensor:
        """Return the rank's ids, which also stand for its labels. The run gets its positions."""
        cut = {one.name: _resized(run.add_input(one), (run.batch, run.seq)) for one in self.inputs(run.batch, run.seq)}
        run.positions = cut["position_ids"]
        run.frame_tensors += [_shard(run) for _ in (*cut, "copy of the last")]  # variables of context_parallel's frame
        return cut["input_ids"]

    def loss(self, run: Run, loss: Tensor) -> Tensor:
        """Return the loss unchanged: each rank has a loss of its own."""
        return loss


def _shard(run: Run) -> Tensor:
    return new_tensor(run.memory, (run.batch, run.seq), int64, "shard of the batch", component="gathered")


def _resized(a: Tensor, shape: Shape) -> Tensor:
    """Compute `a.resize_(shape)` to a smaller shape: the storage stays."""
    return Tensor(a.storage, shape, contiguous_strides(shape), a.dtype)


@lru_cache(maxsize=1024)
def _tokens(of: Dim, times: int, name: str) -> Dim:
    return Dim(name, times * of.size, tuple(times * c for c in of.poly))  # type: ignore[arg-type]


def share(program: Program, ring: Ring) -> Program:
    """Return the program of one of the ranks that share its sequences."""
    own: Any = copy.copy(program)
    own.context_parallel = ContextParallel(ring)
    return own


@lru_cache(maxsize=64)
def replaced(ring: Ring) -> tuple[tuple[Callable[..., Any], Callable[..., Any]], ...]:
    """Return the functions that a run calls in place of transformers' attention, mask and loss."""

    def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Attended:
        """Run sdpa_attention_forward without a mask, over the patched scaled_dot_product_attention."""
        grouped = q.shape[1].size != k.shape[1].size
        if grouped and not k.shape[3].size == v.shape[3].size <= _WIDEST_GROUPED:
            k = repeat_kv(k, q.shape[1])
            v = repeat_kv(v, q.shape[1])
        attn_output = ring_attention(ring, q, k, v)
        return contiguous(transpose(attn_output, 1, 2)), None

    jumps = ring.rank < ring.ranks - 1  # on the last rank the late chunk follows the early one
    return (
        (sdpa_attention, attention),
        (causal_mask, packed_causal_mask if jumps else causal_mask_of_one_sequence),
        (causal_lm_loss, masked_lm_loss),  # labels are already shifted
    )


_WIDEST_GROUPED: Final = 256
