"""The actions of a pipeline's rank, of which equal ones run once: what known.py writes, and the runs that it takes.

The tensors of a micro-batch whose forward has not run are not there. If one of its later actions has to run, it takes the
tensors of another micro-batch that has been through the same.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

from memcalc.engines.fsdp2.known import LAST, Known, MicroBatch, OutOfStep, Tensors, Writing
from memcalc.engines.fsdp2.written import NEW, Name, Part
from memcalc.pipelining.actions import COMPUTES, Action, Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence

    from memcalc.core.tensor import Memory
    from memcalc.engines.fsdp2.pipeline_step import PaperStage
    from memcalc.engines.fsdp2.schedules_on_paper import Frame

_ENOUGH: Final = 3
"""The number of times that equal actions run, so that there are tensors for the actions that come later."""
_UNKNOWN: Final = (-2, 0)
"""Stands for a block of another micro-batch."""


class Repeating(Writing):
    """The actions of a rank, written one after the other. Those that are not known run."""

    def __init__(self, memory: Memory, stages: Sequence[PaperStage], frame: Frame, known: Known) -> None:
        super().__init__(memory, stages, frame, known)
        self.before: Mapping[int, Name | int] = {block: ~block for block in range(len(memory.rows))}
        """The blocks that were there before the first action."""
        self.last_tensors = Tensors()
        """The tensors of the micro-batch whose output is in a variable of the schedule."""

    def _part(self, key: Hashable, action: Action | None, own: MicroBatch) -> Part:
        """Return the part of the log of an action, which runs if that is not known or if others need its tensors."""
        if action is None or action.micro_batch is None:
            chunk, what = (0, self.frame.end) if action is None else (action.chunk, partial(self.frame.act, action))
            self._bring_in_step(chunk)
            self.parts[key] = self._run(chunk, own, what)
            return self.parts[key]
        kind, chunk, i = action
        assert i is not None
        part = self.parts.get(key)
        is_last = kind == "forward" and not self.known.has_ended and self.frame.is_last(i)
        if is_last:
            # The last backward finds its output: it needs these tensors, and others whose backward may run before.
            self._besides(chunk, ("forward",))
            self._besides(chunk, ("forward",))
        if part is None or is_last or self._wanted(chunk, i, own, part):
            self._bring_tensors(chunk, i, own)
            part = self.parts[key] = self._run(chunk, own, partial(self.frame.act, action), i, kind)
        elif own.paper is not None:
            self._leave_tensors(chunk, i, own)
        return part

    def _wanted(self, chunk: int, i: int, own: MicroBatch, part: Part) -> bool:
        """Tell whether a known action is to run all the same, so that there are tensors for those that come later."""
        if self.kinds[part.past][-1] in LAST or own.is_over:
            return False
        like = [one for one in self.in_flight[chunk].values() if one.paper is not None and one.past == part.past]
        return len(like) < _ENOUGH and self._with_tensors(chunk, i, own) is not None

    def _in_step(self, chunk: int, own: MicroBatch, paper: Tensors) -> bool:
        """Tell whether an action of a micro-batch with these tensors finds what the written one does."""
        there = self._found(self.stages[chunk]).alike(paper), self.last_tensors.past
        return there == (self.found[chunk].alike(own.blocks), self.last.past)

    def _with_tensors(self, chunk: int, i: int, own: MicroBatch) -> int | None:
        """Return a micro-batch that has been through the same and has its tensors: `i` itself, or another one."""
        if not own.past:
            return i if self._in_step(chunk, own, Tensors()) else None
        for j, other in ((i, own), *self.in_flight[chunk].items()):
            if other.paper is not None and other.past == own.past and self._in_step(chunk, own, other.paper):
                return j
        return None

    def _bring_tensors(self, chunk: int, i: int, own: MicroBatch) -> None:
        """Give a micro-batch the tensors of one that has been through the same. If there are none, they are made. Raise
        OutOfStep if that cannot be."""
        j = self._with_tensors(chunk, i, own)
        for bring in self._ways(chunk, own):
            if j is None:
                bring()
                j = self._with_tensors(chunk, i, own)
        if j is None:
            raise OutOfStep
        if j != i:
            self._exchange(chunk, i, j)
        own.paper = Tensors() if own.paper is None else own.paper

    def _bring_in_step(self, chunk: int) -> None:
        """Run actions that are not written until the units hold what they hold behind the written ones."""
        for bring in self._ways(chunk, MicroBatch()):
            if self._in_step(chunk, MicroBatch(), Tensors()):
                return
            bring()

    def _ways(self, chunk: int, own: MicroBatch) -> Iterator[Callable[[], None]]:
        """Yield actions that are not written and may bring the tensors of a micro-batch, and the units to what they hold behind
        the written actions."""
        begun = {kind for one in self.in_flight[chunk].values() for kind in self.kinds[one.past]}
        backward = partial(self._backward_of_spare, chunk)
        if own.paper is not None and own.paper is self.last_tensors:
            yield backward
        if own.past:
            yield partial(self._besides, chunk, self.kinds[own.past])
        if begun:
            yield partial(self._besides, chunk, ("forward",))
        if "backward" in begun:
            yield backward
        if len(begun) > 1:
            yield partial(self._besides, chunk, tuple(kind for kind in COMPUTES if kind in begun))
            yield partial(self._besides, chunk, ("forward",))

    def _besides(self, chunk: int, kinds: Iterable[Kind]) -> None:
        """Run actions of a micro-batch that is none of the step's, without writing them."""
        j = min([0, *self.in_flight[chunk]]) - 1
        other = self.in_flight[chunk][j] = MicroBatch()
        other.paper = Tensors()
        for kind in kinds:
            part = self._run(chunk, other, partial(self.frame.act, Action(kind, chunk, j)), j, kind)
            other.past = part.past
        other.is_over = self.kinds[other.past][-1] in LAST

    def _backward_of_spare(self, chunk: int) -> None:
        """Run the backward of tensors that are none of the step's, without writing it."""
        for j, other in self.in_flight[chunk].items():
            there = other.paper is not None and other.paper is not self.last_tensors
            if j < 0 and there and self.kinds[other.past] == ("forward",):
                act = partial(self.frame.act, Action("backward", chunk, j))
                other.past, other.is_over = self._run(chunk, other, act, j, "backward").past, True
                return

    def _leave_tensors(self, chunk: int, i: int, own: MicroBatch) -> None:
        """Give the tensors of a micro-batch whose next action does not run to another one; if there is none, let them go."""
        others = self.in_flight[chunk].items()
        free = next((j for j, one in others if one.paper is None and one.past == own.past and j != i), None)
        if free is None:
            self.stages[chunk].drop(i)
            own.paper = None
        else:
            self._exchange(chunk, i, free)

    def _exchange(self, chunk: int, i: int, j: int) -> None:
        one, other = self.in_flight[chunk][i], self.in_flight[chunk][j]
        self.stages[chunk].exchange(i, j)
        one.paper, other.paper = other.paper, one.paper

    def _run(
        self, chunk: int, own: MicroBatch, what: Callable[[], None], i: int | None = None, kind: Kind | None = None
    ) -> Part:
        """Run an action and return its part of the log. Raise OutOfStep if the units do not hold what the written ones do."""
        memory, stage = self.memory, self.stages[chunk]
        paper = Tensors() if own.paper is None else own.paper
        there = self._found(stage)
        if i is None and not self._in_step(chunk, own, paper):
            raise OutOfStep
        memory.phase, memory.layer, memory.scope = self.at
        names = dict(self.before)
        names.update({block: place for place, block in enumerate(there.held) if block is not None})
        names.update({block: name for name, block in paper.items()})
        place, first, segments, ends = len(memory.log), len(memory.rows), len(memory.segments), len(stage.forward_ends)
        sent, work, streamed = len(memory.sent), len(memory.work), len(memory.streamed)
        once = len(stage.sent_once)
        what()
        self.known.pads_queries |= memory.pads_queries
        log, rows, after = memory.log[place:], memory.rows[first:], self._found(stage)
        gone = {~event for event in log if event < 0}
        left = [block for block in range(first, first + len(rows)) if block not in gone]
        of_hooks = {storage.index for storage in stage.hooks.held()[0] if storage is not None}
        mine = [] if i is None else [block for block in left if block not in of_hooks]
        stays = [((own.past + 1, k), block - first) for k, block in enumerate(mine)]
        names.update({block: (NEW, block - first) for block in left})
        names.update({first + number: name for name, number in stays})
        past = own.past
        if kind is not None:
            kept = [rows[number][1:] for _, number in stays]
            past = self.pasts.setdefault((own.past, kind, *kept), len(self.pasts))
            self.kinds[past] = (*self.kinds[own.past], kind)
        earlier = [(where, ~event) for where, event in enumerate(log) if event < 0 and ~event < first]
        freed = [(where, names[block]) for where, block in earlier if block in names]
        held = [None if block is None else names.get(block, _UNKNOWN) for block in after.held]
        loss = names.get(stage.losses[i].storage.index) if i is not None and i in stage.losses else None
        is_known = len(freed) == len(earlier) and _UNKNOWN not in held
        for _, name in freed:
            if isinstance(name, tuple):
                paper.pop(name, None)
        paper.update({name: first + number for name, number in stays})
        paper.past = past
        if kind == "forward" and self.frame.keeps_output:
            self.last_tensors = paper
        return Part(
            [_counted(event, first) for event in log],
            freed,
            rows,
            [(where - place, phase, layer) for where, phase, layer in memory.segments[segments:]],
            [where for where in range(len(log)) if where + place in memory.renamed],
            [end - place for end in stage.forward_ends[ends:]],
            memory.sent[sent:],
            memory.work[work:],
            memory.streamed[streamed:],
            stays,
            past,
            held,
            after.rest,
            (memory.phase, memory.layer, memory.scope),
            loss if isinstance(loss, tuple) else None,
            is_known,
            stage.sent_once[once:],
        )


def _counted(event: int, first: int) -> int:
    """Return an entry of the log with its block counted from `first`; 0 if it frees an earlier block."""
    if event >= 0:
        return event - first
    return event + first if ~event >= first else 0
