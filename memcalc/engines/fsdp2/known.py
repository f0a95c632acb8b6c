"""The actions of a pipeline's rank, written from those that are known.

What an action allocates and frees follows from what it finds: the blocks that the stage's units hold, and what the
micro-batch has been through. An action that finds the same as an earlier one, of this rank or of another one with the same
stages, need not run. Its part of the log is that of the earlier one, with the blocks of its own micro-batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from memcalc.core.tensor import StorageRow
from memcalc.engines.fsdp2.written import NEW, Name, Part, Written

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Sequence

    from memcalc.core.dims import Dim, Size
    from memcalc.core.tensor import Memory, Sent
    from memcalc.engines.fsdp2.pipeline_step import PaperStage
    from memcalc.engines.fsdp2.schedules_on_paper import Frame
    from memcalc.pipelining.actions import Action, Kind

LAST: Final = ("backward", "backward of weights", "send backward")
"""The actions behind which a micro-batch's tensors are gone."""


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


class Writing:
    """The actions of a rank, written one after the other. All of them have to be known."""

    def __init__(self, memory: Memory, stages: Sequence[PaperStage], frame: Frame, known: Known) -> None:
        self.memory, self.stages, self.frame, self.known = memory, stages, frame, known
        self.parts, self.pasts, self.kinds = known.parts, known.pasts, known.kinds
        self.written = Written(memory)
        self.at = memory.phase, memory.layer, memory.scope
        self.found = [self._found(stage) for stage in stages]
        """The blocks and the state that the next action of each chunk finds, as it is written."""
        self.in_flight: list[dict[int, MicroBatch]] = [{} for _ in stages]
        """The micro-batches of each chunk. A negative number is none of the step's: it has tensors only."""
        self.last = MicroBatch()
        """The micro-batch whose output is in a variable of the schedule."""
        self.losses: list[list[int]] = [[] for _ in stages]
        """The block of each micro-batch's loss, in the order of their forwards."""
        self.sent_once: list[list[Sent]] = [[] for _ in stages]
        """The collectives of each chunk's one reduction."""

    def step(self, actions: Iterable[Action]) -> Written:
        """Return a whole step. Raise OutOfStep if one of its actions cannot be written."""
        for action in actions:
            if action.kind != "send forward":  # which frees nothing
                self._act(action)
        for chunk, stage in enumerate(self.stages):
            self._update_losses(chunk)
            if stage.losses_left_out is not None:
                self.written.log.append(~stage.losses_left_out.storage.index)
        nobody = MicroBatch()
        self._write(self._part(self._key("end", 0, nobody), None, nobody), 0, nobody)
        self.known.has_ended = True
        self.memory.pads_queries = self.known.pads_queries
        self.written.sent_once = [sent for of_chunk in self.sent_once for sent in of_chunk]
        return self.written

    def _act(self, action: Action) -> None:
        kind, chunk, i = action
        own = MicroBatch() if i is None else self.in_flight[chunk].setdefault(i, MicroBatch())
        part = self._part(self._key(kind, chunk, own), action, own)
        self._write(part, chunk, own)
        if kind == "forward" and self.frame.keeps_output:
            self.last = own
        if part.loss is not None and kind == "forward":
            self.losses[chunk].append(own.blocks[part.loss])
        if kind in LAST:
            own.is_over = True

    def _key(self, kind: Kind | Literal["end"], chunk: int, own: MicroBatch) -> Hashable:
        """Return what an action's part of the log follows from."""
        return kind, chunk, self.at, own.past, self.found[chunk].alike(own.blocks), self.last.past

    def _part(self, key: Hashable, action: Action | None, own: MicroBatch) -> Part:
        """Return the part of the log of an action; None is the end of the schedule, behind its last action."""
        part = self.parts.get(key)
        if part is None:
            raise OutOfStep
        return part

    def _found(self, stage: PaperStage) -> Found:
        held, rest = stage.hooks.held()
        blocks = [None if storage is None else storage.index for storage in held]
        return Found([*blocks, *self.frame.variables()], rest)

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
        self.sent_once[chunk] += part.sent_once

    def _update_losses(self, chunk: int) -> None:
        """Replace the losses of the previous step, which the caller has held (PaperStage.update_losses)."""
        written = self.written
        for block in self.losses[chunk]:
            written.renamed.add(len(written.log))
            written.log += [~block, len(written.rows)]
            written.rows.append(StorageRow((), written.rows[block].dtype, "buffers", "", "loss", None))


def _block(one: Name | int | None, own: MicroBatch, held: Sequence[int | None], first: int) -> int | None:
    """Return the block of a name or a place; `first` is the number of the first new block."""
    if one is None:
        return None
    if isinstance(one, tuple):
        return first + one[1] if one[0] == NEW else own.blocks[one]
    return ~one if one < 0 else held[one]
