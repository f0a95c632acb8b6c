"""A training step on paper, measured as `oracle.py` measures the real one."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields as fields_of
from typing import TYPE_CHECKING, Any, NamedTuple

from cases import DROPOUTS
from timeline import Made

from memcalc.core.autograd import backward
from memcalc.core.dims import fixed_size, numel, workload_size
from memcalc.core.dtypes import DType
from memcalc.core.selective import per_op
from memcalc.core.tensor import Autocast, Memory, StorageRow
from memcalc.families import FAMILIES
from memcalc.families.base.module import Run, after_forward

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    Replacements = Mapping[Callable[..., Any], Callable[..., Any]]


class PaperStep(NamedTuple):
    """Bytes of one forward and backward: what is there before, what forward leaves for backward alone, and the two peaks."""

    start: int
    saved: int
    forward: int
    backward: int
    flops: dict[str, int]
    """By phase, where there are any."""
    made: dict[str, list[Made]]
    """Every allocation, by phase."""
    rows: dict[str, list[StorageRow]]
    """What these were made for."""


def _field_names(config: type[Any]) -> set[str]:
    return {field.name for field in fields_of(config)}


def program_of(fields: Mapping[str, Any], *, dropout: bool = False) -> Any:
    """The program of a config.json's fields; without dropout, as the oracle runs."""
    family = FAMILIES[fields["model_type"]].program
    kept = {name: value for name, value in fields.items() if name != "model_type"}
    if not dropout:
        kept |= {name: 0.0 for name in DROPOUTS if name in _field_names(family.Config)}
    config = family.Config.read(kept)
    program = family(config)
    program.check_step()
    return program


class PaperRun:
    """One program with its weights, buffers and token ids in memory."""

    def __init__(
        self,
        program: Any,
        batch: int,
        seq: int,
        dtype: DType,
        attention: str = "sdpa",
        *,
        recompute: bool | str = False,
        padded: bool = False,
        autocast: DType | None = None,
        kernels: Replacements | None = None,
    ) -> None:
        self.autocast = autocast
        self.program = program
        self.memory = Memory(kernels)
        size = workload_size(batch, seq) if program.polynomial else fixed_size(batch, seq)
        self.run = Run(self.memory, dtype, attention, bool(recompute), size.batch, size.seq)
        self.run.policy = per_op if recompute == "op" else None
        for weight in program.weights():
            self.run.add_weight(weight, wants_gradient=program.wants_gradient(weight))
        for buffer in after_forward(program.buffers(), seq):
            self.run.add_buffer(buffer)
        self.batch = [self.run.add_input(given) for given in program.inputs(size.batch, size.seq)]
        if padded:
            self.run.attention_mask = self.run.add_input(program.padding(size.batch, size.seq))
        with Autocast(self.memory, autocast):
            self.left_behind = program.left_behind(self.run)
        self.memory.work.clear()

    def step(self) -> PaperStep:
        """Run forward and backward and read the bytes off the log."""
        log = self.memory.log
        marks = [len(log)]
        self.memory.enter("forward", None)
        with Autocast(self.memory, self.autocast):
            loss = self.program.forward(self.run, *self.batch)
        self.left_behind.clear()
        marks.append(len(log))
        self.memory.enter("backward", None)
        backward(loss)
        marks.append(len(log))
        start, _ = self._replay(0, marks[0], 0)
        end_of_forward, forward = self._replay(marks[0], marks[1], start)
        _, backward_peak = self._replay(marks[1], marks[2], end_of_forward)
        loss_bytes = loss.dtype.itemsize  # the step before has left one, which is gone in backward
        flops: Counter[str] = Counter()
        for work in self.memory.work:
            flops[work.phase] += 2 * work.products * numel(work.factors)[0]
        left, stays = self._made_before(marks[0], marks[1]), self._made_before(marks[0], marks[1], marks[2])
        stays = {i for i in stays if self.memory.rows[i].component != "gradients"}  # made in forward, the weights' now
        saved = sum(map(self.bytes_of, left - stays))
        phases = {
            "forward": self._made(marks[0], marks[1], start),
            "backward": self._made(marks[1], marks[2], end_of_forward),
        }
        made = {phase: [one for one, _ in found] for phase, found in phases.items()}
        rows = {phase: [row for _, row in found] for phase, found in phases.items()}
        return PaperStep(start, saved, forward, backward_peak - loss_bytes, dict(flops), made, rows)

    def _made(self, first: int, last: int, now: int) -> list[tuple[Made, StorageRow]]:
        """What is allocated between two places of the log; a storage that goes on under another name is not."""
        found: list[tuple[Made, StorageRow]] = []
        for place in range(first, last):
            event = self.memory.log[place]
            if event < 0:
                now -= self.bytes_of(~event)
                continue
            now += self.bytes_of(event)
            if place - 1 not in self.memory.renamed:
                found.append((Made(self.bytes_of(event), now), self.memory.rows[event]))
        return found

    def _made_before(self, first: int, end: int, until: int | None = None) -> set[int]:
        """The blocks that are made between two places of the log and alive at the second, or still at a later one."""
        alive: set[int] = set()
        for event in self.memory.log[first:end]:
            (alive.add if event >= 0 else alive.discard)(event if event >= 0 else ~event)
        return alive - {~event for event in self.memory.log[end:until] if event < 0} if until else alive

    def _replay(self, first: int, last: int, now: int) -> tuple[int, int]:
        highest = now
        for event in self.memory.log[first:last]:
            now += self.bytes_of(event) if event >= 0 else -self.bytes_of(~event)
            highest = max(highest, now)
        return now, highest

    def bytes_of(self, index: int) -> int:
        row = self.memory.rows[index]
        return numel(row.shape)[0] * row.dtype.itemsize

    def alive_at_peak(self, phase: str) -> list[StorageRow]:
        """What is alive where the bytes of a phase are highest; for a failing test to print."""
        alive: set[int] = set()
        best: tuple[int, set[int]] = (0, set())
        now, current = 0, ""
        segments = {position: name for position, name, _ in self.memory.segments}
        for position, event in enumerate(self.memory.log):
            current = segments.get(position, current)
            index = event if event >= 0 else ~event
            (alive.add if event >= 0 else alive.discard)(index)
            now += self.bytes_of(index) if event >= 0 else -self.bytes_of(index)
            if current == phase and now > best[0]:
                best = (now, set(alive))
        return [self.memory.rows[index] for index in sorted(best[1])]


def paper_step(
    fields: Mapping[str, Any],
    *,
    micro_batch_size: int,
    seq_len: int,
    dtype: DType,
    attention: str = "sdpa",
    recompute: bool | str = False,
    padded: bool = False,
    autocast: DType | None = None,
    kernels: Replacements | None = None,
) -> PaperStep:
    """The paper's counterpart of `oracle.training_step`."""
    run = PaperRun(
        program_of(fields),
        micro_batch_size,
        seq_len,
        dtype,
        attention,
        recompute=recompute,
        padded=padded,
        autocast=autocast,
        kernels=kernels,
    )
    return run.step()
