"""A listener of a process. It hears what the process is about to do, so that it can name the blocks that come."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from memcalc.core.rows import Row
    from memcalc.device.process import Log
    from memcalc.engines.base.script import Event
    from memcalc.megatron.between_stages import Kind


class Observer:
    """A listener that does nothing. Others override what they want to hear. The process itself never depends on it."""

    def step_begins(self) -> None:
        """Hear that another step begins."""

    def turn_begins(self, kind: Kind, chunk: int) -> None:
        """Hear that a forward or backward of a model chunk begins. A backward belongs to the chunk's oldest forward."""

    def turns_are_over(self) -> None:
        """Hear that the step's last backward is over, and the optimizer's part begins."""

    def rows_come(self, rows: Sequence[Row]) -> None:
        """Hear that the next blocks are those of rows, in the order of `in_turn`."""

    def workspaces_come(self) -> None:
        """Hear that the next blocks are workspaces of libraries."""

    def between_come(self) -> None:
        """Hear that the next blocks are tensors between pipeline stages."""

    def log_plays(self, log: Log, start: int, end: int) -> None:
        """Hear that the next allocations and frees are the events of a log from `start` to `end`."""

    def script_plays(self, events: Sequence[Event]) -> None:
        """Hear that the next allocations and frees are the events of an engine's script."""


SILENT = Observer()
