"""Hidden states and their gradients that a pipeline rank has between its forwards and backwards.

The inputs of the micro-batches in flight are saved by their forwards and not counted here. The others are: tensors
received for later, tensors computed and not yet sent, and tensors that variables and autograd's graph still refer to,
as in megatron/core/pipeline_parallel/schedules.py with deallocate_pipeline_outputs on, and overlap_p2p_comm with
virtual stages.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal

Kind = Literal["forward", "backward"]
Action = tuple[Kind, int]
"""Forward or backward, and the model chunk."""


def between(
    order: Iterable[Action], warmup: int, rank: int, ranks: int, chunks: int, group: int | None = None
) -> Iterator[int]:
    """Yield the number of such tensors alive while each action of a rank's order runs."""
    actions = list(order)
    if ranks == 1:
        return iter([0] * len(actions))
    if chunks == 1:
        return _one_chunk(actions, rank, ranks)
    return iter(_Interleaved(actions, warmup, rank, ranks, chunks, group or ranks))


def left(rank: int, chunks: int) -> int:
    """Return the number of such tensors after a step: the last input of every chunk and its gradient. TransformerBlock
    refers to these until the next step."""
    return 2 * (chunks - (rank == 0))


def _one_chunk(order: list[Action], rank: int, ranks: int) -> Iterator[int]:
    """Yield the number of tensors that variables keep of the previous backward
    (forward_backward_pipelining_without_interleaving)."""
    has_input, has_next, done = rank > 0, rank < ranks - 1, False
    for kind, _ in order:
        if not done:
            yield 0
        elif kind == "forward":
            # the gradient received, the input that its output's graph refers to, and the gradient sent
            yield has_next + 2 * has_input
        else:
            yield int(has_input)  # the gradient sent
        done = done or kind == "backward"


class _Tensor:
    """A received hidden state, or the gradient of one."""

    __slots__ = ("grad", "in_flight")

    def __init__(self) -> None:
        self.grad: _Tensor | None = None
        self.in_flight = False
        """True while a forward has saved the tensor and its backward is not over."""


class _Interleaved:
    """The variables of forward_backward_pipelining_with_interleaving on one rank."""

    def __init__(self, order: list[Action], warmup: int, rank: int, ranks: int, chunks: int, group: int) -> None:
        self.order, self.warmup = order, warmup
        self.rank, self.ranks, self.chunks = rank, ranks, chunks
        self.of = {kind: [chunk for k, chunk in order if k == kind] for kind in ("forward", "backward")}
        self.inputs: list[list[_Tensor | None]] = [[] for _ in range(chunks)]
        """Inputs received whose backward is not over, oldest first; None where a chunk embeds tokens."""
        self.gradients: list[list[_Tensor | None]] = [[] for _ in range(chunks)]
        self.forwards = [0] * chunks
        """The number of forwards of each chunk that are done and whose backward is not."""
        self.last_input: list[_Tensor | None] = [self._left_by_the_step_before(chunk) for chunk in range(chunks)]
        self.rings: dict[Kind, list[_Tensor | None]] = {
            "forward": [None] * (group - ranks + 1 if rank == 0 else 1),
            "backward": [None] * (group - ranks + 1 if rank == ranks - 1 else 1),
        }
        """The variables fwd_recv_buffer and bwd_recv_buffer. A ring of one place refers to nothing between two actions."""
        self.output: _Tensor | None = None
        self.sent_gradient: _Tensor | None = None
        self.received_in_warmup: _Tensor | None = None

    def _left_by_the_step_before(self, chunk: int) -> _Tensor | None:
        if self._embeds(chunk):
            return None
        out = _Tensor()
        out.grad = _Tensor()
        return out

    def _embeds(self, chunk: int) -> bool:
        return self.rank == 0 and chunk == 0

    def _has_loss(self, chunk: int) -> bool:
        return self.rank == self.ranks - 1 and chunk == self.chunks - 1

    def __iter__(self) -> Iterator[int]:
        self.inputs[0].append(None if self._embeds(0) else _Tensor())
        done = {"forward": 0, "backward": 0}
        for kind, chunk in self.order:
            k = done[kind]
            done[kind] += 1
            if kind == "forward":
                yield self._forward(k, chunk)
            else:
                yield self._backward(k, chunk)

    def _forward(self, k: int, chunk: int) -> int:
        self.output = None
        if self._embeds(chunk) and len(self.inputs[0]) == self.forwards[0]:
            self.inputs[0].append(None)
        self.last_input[chunk] = x = self.inputs[chunk][self.forwards[chunk]]
        self.forwards[chunk] += 1
        if x is not None:
            x.in_flight = True
        alive = self._alive()
        steady = k >= self.warmup
        if steady and not self._has_loss(chunk):
            self.output = _Tensor()
        following = self._receives("forward", k)
        received = None if following is None else _Tensor()
        self._put("forward", k, received)
        if following is not None:
            self.inputs[following].append(received)
            if not steady:
                self.received_in_warmup = received
        elif not steady:
            self.received_in_warmup = None
        if k == self.warmup - 1:
            self._receive_first_gradient()
        return alive

    def _receive_first_gradient(self) -> None:
        if self.rank < self.ranks - 1:
            self.gradients[-1].append(_Tensor())

    def _backward(self, k: int, chunk: int) -> int:
        if k >= len(self.of["backward"]) - self.warmup:
            self.output = None  # all forwards are done and sent
        x = self.inputs[chunk].pop(0)
        incoming = None if self._has_loss(chunk) else self.gradients[chunk].pop(0)
        self.forwards[chunk] -= 1
        alive = self._alive(running=incoming)
        self.sent_gradient = None
        if x is not None:
            x.in_flight = False
            x.grad = self.sent_gradient = _Tensor()
        following = self._receives("backward", k)
        received = None if following is None else _Tensor()
        if k < len(self.of["backward"]) - self.warmup:  # later ones are received into another variable
            self._put("backward", k, received)
        if following is not None:
            self.gradients[following].append(received)
        return alive

    def _put(self, kind: Kind, k: int, received: _Tensor | None) -> None:
        ring = self.rings[kind]
        ring[k % len(ring)] = received
        if received is not None:
            ring[(k + 1) % len(ring)] = None

    def _receives(self, kind: Kind, k: int) -> int | None:
        """Return the chunk that a tensor received after the k-th action is for; None if no tensor is received.

        The rank where a direction starts gets the output of the rank where it ends, `ranks - 1` turns later
        (recv_tensor_from_previous_stage).
        """
        chunks, step = self.of[kind], 1 if kind == "forward" else -1
        last = self.chunks - 1 if kind == "forward" else 0
        if k == len(chunks) - 1:
            return None
        if self.rank != (0 if kind == "forward" else self.ranks - 1):
            return chunks[k + 1]
        made = k - (self.ranks - 1)
        return None if made < 0 or chunks[made] == last else chunks[made] + step

    def _alive(self, *, running: _Tensor | None = None) -> int:
        """Return the number of tensors alive, without the inputs in flight and those of what runs."""
        named = [self.output, self.sent_gradient, self.received_in_warmup, *self.last_input]
        named += [*self.rings["forward"], *self.rings["backward"]]
        for queue, forwards, gradients in zip(self.inputs, self.forwards, self.gradients, strict=True):
            named += queue[forwards:]
            named += gradients
        found = [x for x in named if x is not None and not x.in_flight and x is not running]
        return len({*found, *(x.grad for x in found if x.grad is not None)})
