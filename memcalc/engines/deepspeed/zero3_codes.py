"""Gathered codes that the graph keeps: a base in 4 bits under ZeRO-3.

ZeRO-3 frees a gathered parameter by giving it other data (partition_parameters.py, free_param). bitsandbytes' product keeps a
view of the codes for its backward, as an attribute of its node (`ctx.tensors` of MatMul4Bit in
bitsandbytes/autograd/_functions.py), not with `save_for_backward`. So the block stays when the parameter has released it. No
hook of saved tensors sees it: a checkpoint does not free it. It lives as long as the graph, and the graph as long as the loss.
What backward gathers again is not read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from memcalc.engines.deepspeed.zero3_step import Persistent, play

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from memcalc.core.dtypes import DType
    from memcalc.core.tensor import Sent
    from memcalc.engines.deepspeed.zero3_step import Step, ZeRO3
    from memcalc.tape.rewritten import Out

KEPT: Final = "codes of the step before, kept by its graph"


def play_with_codes(how: ZeRO3, step_over: Callable[[Out], Step], out: Out) -> None:
    """Play a step that begins with the codes that the graph of the step before keeps, and leaves its own. `step_over` returns
    the step over a run."""
    before = step_over(_Counted())
    play(before)
    step = step_over(out)
    step.left_behind = [out.block(KEPT, "elements", n, how.dtype) for n in _elements(before.held_by_graph)]
    play(step)
    for held in _each_once(step.held_by_graph):
        if isinstance(held, Persistent):  # the step makes another block of it
            held = out.block(KEPT, "elements", held.elements, how.dtype)
        out.stays(held)


def _elements(held: dict[int, object]) -> Iterator[int]:
    """Yield the sizes of what the graph refers to."""
    for one in _each_once(held):
        assert isinstance(one, (_Block, Persistent))
        yield one.elements


def _each_once(held: dict[int, object]) -> list[object]:
    """Return what the graph refers to. Several references may be to one block."""
    once = {one.parameter if isinstance(one, Persistent) else id(one): one for one in held.values()}
    return list(once.values())


class _Block:
    """A block by its size."""

    __slots__ = ("elements",)

    def __init__(self, elements: int) -> None:
        self.elements = elements


class _Counted:
    """A run in which blocks have sizes and no place."""

    takes_sent = False

    def reach(self, place: int) -> None: ...

    def block(self, name: str, dim: str, elements: int, dtype: DType) -> object:
        return _Block(elements)

    def block_of_run(self, number: int) -> object:
        return None

    def send(self, sent: Sent, after: int) -> None: ...

    def stays(self, block: object) -> None: ...
