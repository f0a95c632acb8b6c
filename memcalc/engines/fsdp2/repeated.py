"""The actions of a pipeline's rank, of which equal ones run once.

What an action allocates and frees follows from what it finds: the blocks that the stage's units hold, and what the
micro-batch has been through. An action that finds the same as an earlier one is not run. Its part of the log is that of the
earlier one, with the blocks of its own micro-batch. So a step of many micro-batches costs the runs of those that differ.

The tensors of a micro-batch whose forward has not run are not there. If one of its later actions has to run, it takes the
tensors of another micro-batch that has been through the same.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

from memcalc.core.tensor import StorageRow
from memcalc.engines.fsdp2.written import Name, Part, Written
from memcalc.pipelining.actions import COMPUTES, Action, Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence

    from memcalc.core.dims import Dim, Size
    from memcalc.core.tensor import Memory
    from memcalc.engines.fsdp2.pipeline_step import Frame, PaperStage

_ENOUGH: Final = 3
"""The number of times that equal actions run, so that there are tensors for the actions that come later."""

_LAST: Final = ("backward", "backward of weights", "send backward")
"""The actions behind which a micro-batch's tensors are gone."""
UNKNOWN: Final = (-2, 0)
"""Stands for a block of another micro-batch."""
NEW: Final = -1
"""Stands in a name for the action itself, if the micro-batch does not have the block."""


class OutOfStep(Exception):
    """Raised if an action has to run and its tensors are not there."""


class Found(NamedTuple):
    """The blocks and the state that an action finds besides the tensors of its micro-batch."""

    held: list[int | None]
    """The block in each place of the stage's units and of the schedule's variables."""
    rest: Hashable
    """The rest of what is known of the units."""

    def alike(self, own: dict[Name, int]) -> Hashable:
        """Return the same for all actions that find equal blocks: blocks by their names if the micro-batch has them, else by
        their first places."""
        names: dict[int | None, Hashable] = {None: None}
        names.update({block: name for name, block in own.items()})
        return tuple([names.setdefault(block, place) for place, block in enumerate(self.held)]), self.rest


class Tensors(dict[Name, int]):
    """The numbers in the run of a micro-batch's blocks, by name, and what these tensors have been through."""

    past = 0


class MicroBatch:
    """A micro-batch in flight in a chunk."""

    __slots__ = ("blocks", "is_over", "paper", "past")

    def __init__(self) -> None:
        self.past = 0
        """The number of what it has been through: equal for two with equal blocks."""
        self.blocks: dict[Name, int] = {}
        """The blocks that it has, by name."""
        self.paper: Tensors | None = None
        """The numbers of its blocks in the run; None if its tensors are not there."""
        self.is_over = False


class Known:
    """The known actions of all ranks that have the same stages."""

    def __init__(self, size: Size, whole: Dim) -> None:
        self.size, self.whole = size, whole
        """The dims of the runs, which are the same for all of them."""
        self.parts: dict[Hashable, Part] = {}
        self.pasts: dict[Hashable, int] = {(): 0}
        self.kinds: dict[int, tuple[Kind, ...]] = {0: ()}
        """The actions that a micro-batch has been through, by the number of its past."""
        self.has_ended = False
        """True if a step has been written to its end."""
        self.pads_queries = False


class Repeating:
    """The actions of a rank, written one after the other."""

    def __init__(self, memory: Memory, stages: Sequence[PaperStage], frame: Frame, known: Known) -> None:
        self.memory, self.stages, self.frame, self.known = memory, stages, frame, known
        self.parts, self.pasts, self.kinds = known.parts, known.pasts, known.kinds
        self.written = Written(memory)
        self.before: Mapping[int, Name | int] = {block: ~block for block in range(len(memory.rows))}
        """The blocks that were there before the first action."""
        self.at = memory.phase, memory.layer, memory.scope
        self.found = [self._found(stage) for stage in stages]
        """The blocks and the state that the next action of each chunk finds, as it is written."""
        self.in_flight: list[dict[int, MicroBatch]] = [{} for _ in stages]
        """The micro-batches of each chunk. A negative number is none of the step's: it has tensors only."""
        self.last, self.last_tensors = MicroBatch(), Tensors()
        """The micro-batch whose output is in a variable of the schedule, and that whose tensors are."""
        self.losses: list[list[int]] = [[] for _ in stages]
        """The block of each micro-batch's loss, in the order of their forwards."""

    def act(self, action: Action) -> None:
        """Write an action: run it, or write again what an equal one has written."""
        kind, chunk, i = action
        if kind == "send forward":  # frees nothing
            return
        if i is None:
            self._bring_in_step(chunk)
            self._write(self._run(chunk, MicroBatch(), lambda: self.frame.act(action)), chunk, MicroBatch())
            return
        own = self.in_flight[chunk].setdefault(i, MicroBatch())
        found = self.found[chunk]
        key = kind, chunk, self.at, own.past, found.alike(own.blocks), self.last.past
        part = self.parts.get(key)
        is_last = kind == "forward" and not self.known.has_ended and self.frame.is_last(i)
        if (
            is_last
        ):  # the last backward finds its output: it needs these tensors, and others whose backward may run before
            self._besides(chunk, ("forward",))
            self._besides(chunk, ("forward",))
        if part is None or is_last or self._wanted(chunk, i, own, part):
            self._bring_tensors(chunk, i, own)
            part = self.parts[key] = self._run(chunk, own, lambda: self.frame.act(action), i, kind)
        elif own.paper is not None:
            self._leave_tensors(chunk, i, own)
        self._write(part, chunk, own)
        if kind == "forward" and self.frame.keeps_output:
            self.last = own
        if part.loss is not None and kind == "forward":
            self.losses[chunk].append(own.blocks[part.loss])
        if kind in _LAST:
            own.is_over = True

    def end(self) -> Written:
        """Write what follows the last action."""
        for chunk, stage in enumerate(self.stages):
            self._update_losses(chunk)
            self._bring_in_step(chunk)
            self._write(self._run(chunk, MicroBatch(), stage.forget_losses), chunk, MicroBatch())
        self._write(self._run(0, MicroBatch(), self.frame.end), 0, MicroBatch())
        self.known.has_ended = True
        self.known.pads_queries = self.memory.pads_queries = self.memory.pads_queries or self.known.pads_queries
        return self.written

    def _found(self, stage: PaperStage) -> Found:
        held, rest = stage.hooks.held()
        blocks = [None if storage is None else storage.index for storage in held]
        return Found([*blocks, *self.frame.variables()], rest)

    # --- the tensors of an action that runs

    def _wanted(self, chunk: int, i: int, own: MicroBatch, part: Part) -> bool:
        """Tell whether a known action is to run all the same, so that there are tensors for those that come later."""
        if self.kinds[part.past][-1] in _LAST or own.is_over:
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

    def _besides(self, chunk: int, kinds: Iterable[Kind]) -> None:
        """Run actions of a micro-batch that is none of the step's, without writing them."""
        j = min([0, *self.in_flight[chunk]]) - 1
        other = self.in_flight[chunk][j] = MicroBatch()
        other.paper = Tensors()
        for kind in kinds:
            part = self._run(chunk, other, partial(self.frame.act, Action(kind, chunk, j)), j, kind)
            other.past = part.past
        other.is_over = self.kinds[other.past][-1] in _LAST

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
        what()
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
        held = [None if block is None else names.get(block, UNKNOWN) for block in after.held]
        loss = names.get(stage.losses[i].storage.index) if i is not None and i in stage.losses else None
        is_known = len(freed) == len(earlier) and UNKNOWN not in held
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
        )

    # --- what is written

    def _write(self, part: Part, chunk: int, own: MicroBatch) -> None:
        if not part.is_known:
            raise OutOfStep
        before = self.found[chunk].held
        freed: list[tuple[int, int]] = []
        for where, name in part.freed:
            block = own.blocks.pop(name) if isinstance(name, tuple) else ~name if name < 0 else before[name]
            assert block is not None
            freed.append((where, block))
        first = self.written.write(part, freed)
        own.blocks.update({name: first + number for name, number in part.stays})
        own.past = part.past
        self.found[chunk] = Found([_block(one, own, before, first) for one in part.held], part.rest)
        self.at = part.at

    def _update_losses(self, chunk: int) -> None:
        """Replace the losses of the previous step, which the caller has held (PaperStage.update_losses)."""
        written = self.written
        for block in self.losses[chunk]:
            written.renamed.add(len(written.log))
            written.log += [~block, len(written.rows)]
            written.rows.append(StorageRow((), written.rows[block].dtype, "buffers", "", "loss", None))


def _counted(event: int, first: int) -> int:
    """Return an entry of the log with its block counted from `first`; 0 if it frees an earlier block."""
    if event >= 0:
        return event - first
    return event + first if ~event >= first else 0


def _block(one: Name | int | None, own: MicroBatch, held: Sequence[int | None], first: int) -> int | None:
    """Return the block of a name or a place; `first` is the number of the first new block."""
    if one is None:
        return None
    if isinstance(one, tuple):
        return first + one[1] if one[0] == NEW else own.blocks[one]
    return ~one if one < 0 else held[one]
