"""A step recorded while the allocator replay plays it. The recorder only listens: the process tells it what comes next, and
the allocator where the blocks are."""

from __future__ import annotations

from collections import Counter, deque
from typing import TYPE_CHECKING, Final

from memcalc.device.allocator import Block as Taken
from memcalc.device.allocator import CachingAllocator, Pool
from memcalc.device.observer import Observer
from memcalc.pictures.labels import BETWEEN, WORKSPACE, Label, of_log, of_rows, of_script
from memcalc.pictures.notes import notes_of
from memcalc.pictures.spans import spans_of
from memcalc.pictures.timeline import Block, Segment, Span, Timeline

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from memcalc.core.rows import Row
    from memcalc.device.process import Log
    from memcalc.engines.base.script import Event
    from memcalc.estimation.report import Report
    from memcalc.megatron.between_stages import Kind

_BEFORE: Final = Span("", None, 0, None, 0, 0)


class _Recorder(Observer):
    """The blocks of the step that runs, and those from before it that are still there."""

    def __init__(self, layers: int, on_paper: int) -> None:
        self.layers_of_rank = layers
        self.on_paper = on_paper
        """How many micro-batches a forward and backward of the run cover."""
        self.next: Iterator[Label] = iter(())
        """The labels of the blocks that come."""
        self.blocks: list[Block] = []
        self.alive: dict[Taken, int] = {}
        """The number in `blocks` of each block that is alive, by the allocator's object, which this keeps."""
        self.segments: dict[int, Segment] = {}
        self.given_back: list[Segment] = []
        self.events = 0
        self.spans: list[Span] = []
        self.parts: list[Span] = []
        """The parts of the step with one layer, or with none."""
        self.now = _BEFORE
        self.waiting: dict[int, deque[int]] = {}
        self.begun: Counter[int] = Counter()
        self.labels: dict[int, list[Label]] = {}

    # --- from the process

    def step_begins(self) -> None:
        self._end()
        places = {number: i for i, number in enumerate(sorted(self.alive.values()))}
        self.blocks = [self.blocks[number]._replace(begin=0) for number in places]
        self.alive = {block: places[number] for block, number in self.alive.items()}
        self.segments = {address: segment._replace(begin=0) for address, segment in self.segments.items()}
        self.given_back, self.spans, self.parts, self.events = [], [], [], 0
        self.begun.clear()

    def turn_begins(self, kind: Kind, chunk: int) -> None:
        waiting = self.waiting.setdefault(chunk, deque())
        if kind == "forward":
            waiting.append(self.begun[chunk])
            self.begun[chunk] += 1
        self._begin(Span(kind, waiting[-1] if kind == "forward" else waiting.popleft(), chunk, None, self.events, 0))

    def turns_are_over(self) -> None:
        self._end()
        if self.on_paper > 1:
            self.spans = spans_of(self.parts, self.on_paper)
        self._begin(Span("step", None, 0, None, self.events, 0))

    def rows_come(self, rows: Sequence[Row]) -> None:
        self.next = of_rows(rows, self.layers_of_rank)

    def workspaces_come(self) -> None:
        self.next = _forever(WORKSPACE)

    def between_come(self) -> None:
        self.next = _forever(BETWEEN)

    def log_plays(self, log: Log, start: int, end: int) -> None:
        if id(log) not in self.labels:
            self.labels[id(log)] = of_log(log, self.layers_of_rank)
        labels = self.labels[id(log)]
        self.next = (labels[event] for event in log.events[start:end] if event >= 0)
        self._note_parts(log, start, end)

    def script_plays(self, events: Sequence[Event]) -> None:
        self.next = (of_script(event.block) for event in events if event.nbytes is not None)

    # --- from the allocator

    def allocated(self, block: Taken, nbytes: int, stream: str) -> None:
        self.events += 1
        self.alive[block] = len(self.blocks)
        component, name = next(self.next)
        self.blocks.append(
            Block(name, component, nbytes, block.size, self.events, None, stream, block.address, None, "")
        )

    def released(self, block: Taken) -> None:
        self.events += 1
        number = self.alive.pop(block)
        self.blocks[number] = self.blocks[number]._replace(end=self.events)

    def reserved(self, block: Taken, stream: str) -> None:
        self.segments[block.address] = Segment(block.address, block.size, stream, self.events + 1, None)

    def gives_back(self, address: int) -> None:
        self.given_back.append(self.segments.pop(address)._replace(end=self.events))

    # --- spans

    def _begin(self, span: Span) -> None:
        self._end()
        self.now = span

    def _end(self) -> None:
        if self.now.phase:
            self.spans.append(self.now._replace(last=self.events))
        self.now = _BEFORE

    def _note_parts(self, log: Log, start: int, end: int) -> None:
        """Note the phases and layers that a part of a log goes through. It begins at the present moment."""
        now = self.now
        for part in log.names.parts(len(log.events)):
            first, last = max(part.start, start), min(part.end, end)
            if first < last:
                begin = self.events + first - start
                self.parts.append(Span(part.phase, now.micro_batch, now.chunk, part.layer, begin, begin + last - first))

    def finished(self) -> tuple[tuple[Block, ...], tuple[Span, ...], tuple[Span, ...], tuple[Segment, ...]]:
        """Return the blocks, spans, parts and segments of the last step."""
        self._end()
        segments = sorted((*self.given_back, *self.segments.values()), key=lambda one: (one.begin, one.address))
        return tuple(_in_spans(self.blocks, self.spans)), tuple(self.spans), tuple(self.parts), tuple(segments)


def _in_spans(blocks: Iterable[Block], spans: Sequence[Span]) -> Iterator[Block]:
    """Yield blocks, sorted by `begin`, with the phase and micro-batch of the span that allocates them."""
    rest = iter(spans)
    now = _BEFORE
    for block in blocks:
        while block.begin > now.last:
            now = next(rest)
        yield block._replace(micro_batch=now.micro_batch, phase=now.phase)


def _forever(label: Label) -> Iterator[Label]:
    while True:
        yield label


class _Allocator(CachingAllocator):
    """An allocator that tells a recorder what it does."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def allocate(self, nbytes: int, stream: str) -> Taken:
        block = super().allocate(nbytes, stream)
        self.recorder.allocated(block, nbytes, stream)
        return block

    def release(self, block: Taken) -> None:
        self.recorder.released(block)
        super().release(block)

    def _new_block(self, pool: Pool, size: int) -> Taken:
        block = super()._new_block(pool, size)
        self.recorder.reserved(block, pool.stream)
        return block

    def _give_back(self) -> int:
        for pools in self._pools.values():
            for pool in pools:
                for _size, address, block in pool.free:
                    if block.before is None and block.after is None:
                        self.recorder.gives_back(address)
        return super()._give_back()


def recorded(report: Report) -> Timeline:
    """Return the timeline of the last step of a report's rank. The order of its allocations has to be known."""
    recorder = _Recorder(report.rank.layers, report.rank.on_paper)
    played = report.record(_Allocator(recorder), recorder)
    blocks, spans, parts, segments = recorder.finished()
    capacity = None if report.gpu is None else report.gpu.capacity
    made = Timeline(blocks, spans, parts, segments, recorder.events, 0, 0, capacity, report.rank.number)
    allocated = made.allocated()
    made = made._replace(peak=max(allocated), peak_event=allocated.index(max(allocated)))
    return made._replace(notes=tuple(notes_of(made, report, played)))
