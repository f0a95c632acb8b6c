"""torch.nn.functional.linear_cross_entropy with LinearCrossEntropyOptions() on an NVIDIA GPU of compute capability 8.0
or newer (torch 2.13, nn/modules/linear_cross_entropy.py). It computes the head and the loss for one chunk of tokens at
a time.

The defaults are the policy "compact" with fp32 accumulation and chunks of half the bytes of the hidden states. Both
gradients are computed in forward and scaled in place in backward.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcalc.core.autograd import Node
from memcalc.core.dims import Dim, merge
from memcalc.core.dtypes import boolean, fp16, fp32, int64
from memcalc.core.ops.elementwise import recording
from memcalc.core.ops.shape import view
from memcalc.core.ops.work import works
from memcalc.core.tensor import Memory, Tensor, new_tensor
from memcalc.families.base import blocks
from memcalc.kernels.liger import alias

if TYPE_CHECKING:
    from collections.abc import Callable

    from memcalc.core.dims import Shape
    from memcalc.core.dtypes import DType
    from memcalc.families.base.module import Module


def loss_chunks(tokens: int, vocab: int, hidden: int) -> tuple[int, ...]:
    """Return the tokens of the first two chunks. All later chunks are at most as large."""
    share = -(-tokens // -(-vocab // hidden))
    chunk = max(1, min((1 << (share - 1).bit_length()) // 2, tokens))
    return tuple(min(chunk, tokens - start) for start in range(0, tokens, chunk)[:2])


def lm_head_loss(head: Module, logits: Callable[[Tensor], Tensor], hidden_states: Tensor, labels: Tensor) -> Tensor:
    """Compute `linear_cross_entropy(hidden_states, head.weight, labels)`, with labels shifted as in ForCausalLMLoss."""
    head.memory.scope = "loss"
    _padded, target = blocks.shifted_labels(head.run, labels)
    x = view(hidden_states, merge(*hidden_states.shape[:-1]), hidden_states.shape[-1])
    return _linear_cross_entropy(x, head.weight(), target)


def _linear_cross_entropy(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    memory, (tokens, hidden), vocab, dtype = x.memory, x.shape, weight.shape[0], x.dtype
    sizes = loss_chunks(tokens.size, vocab.size, hidden.size)
    chunk = Dim("loss_chunk", sizes[0])
    logits = new_tensor(memory, (chunk, vocab), dtype if dtype is fp16 else fp32, "logits of a chunk")
    _row = new_tensor(memory, (chunk,), logits.dtype, "a number per token of a chunk")
    weight_trains = weight.node is not None
    products = 2 + weight_trains  # logits, and the gradients that are wanted
    works(memory, weight.name.removesuffix(".weight"), (tokens, hidden, vocab), dtype, products=products)
    loss = new_tensor(memory, (), fp32 if dtype is fp16 else dtype, "loss")
    grads = [new_tensor(memory, x.shape, dtype, "gradient of the hidden states")]
    if weight_trains:
        grads.append(new_tensor(memory, weight.shape, dtype, f"{weight.name} gradient"))
    _kept = _per_token(memory, tokens)
    in_fp32 = weight_trains and dtype is not fp32
    _inputs = new_tensor(memory, (chunk, hidden), fp32, "hidden states of a chunk") if in_fp32 else None
    fits = vocab.size * logits.dtype.itemsize >= hidden.size * dtype.itemsize  # where the logits are
    cast = scaled = None
    for size in (Dim("loss_chunk", n) for n in sizes):
        denominators = new_tensor(memory, (size,), fp32, "softmax denominators of a chunk")
        if logits.dtype is not dtype:  # made while the loop still holds the one of the chunk before
            cast = new_tensor(memory, (size, vocab), dtype, "logits of a chunk, cast")
        _weigh_targets(memory, (size, hidden), dtype)
        if weight_trains and not fits:
            scaled = new_tensor(memory, (size, hidden), dtype, "hidden states of a chunk, scaled")
        del denominators
    del cast, scaled
    if dtype is fp16:
        loss = new_tensor(memory, (), dtype, "loss")
    if recording(x, weight):
        loss.node = Node(memory, _linear_cross_entropy_backward, (x, weight), grads)
    return loss


def _weigh_targets(memory: Memory, shape: Shape, dtype: DType) -> None:
    """Allocate the rows of the head that the targets of a chunk choose, and the weights that they are multiplied by."""
    _rows = new_tensor(memory, shape, dtype, "weights of the targets of a chunk")
    if dtype is not fp32:
        _weights = new_tensor(memory, shape[:1], dtype, "weight of each token, cast")


def _per_token(memory: Memory, tokens: Dim) -> tuple[Tensor, ...]:
    """Allocate the tensors kept for all targets: a mask of ignored ones, the targets without these, and their weights
    in the mean."""
    ignored = new_tensor(memory, (tokens,), boolean, "ignored tokens")
    zero = new_tensor(memory, (), int64, "zero")
    targets = new_tensor(memory, (tokens,), int64, "targets")
    del zero
    counted = new_tensor(memory, (tokens,), boolean, "tokens that count")
    weights = new_tensor(memory, (tokens,), fp32, "weight of each token")
    del counted
    return ignored, targets, weights


def _linear_cross_entropy_backward(node: Node, grads: list[Tensor]) -> list[Tensor | None]:
    return [*(alias(grad) for grad in node.unpack()), None][:2]
