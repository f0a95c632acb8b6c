"""A note on what a rollout does not need, so that it could be offloaded in between."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from memcalc.tasks.ppo import VALUE
from memcalc.units import show_bytes

if TYPE_CHECKING:
    from memcalc.estimation.report import Report

_KEPT: Final = ("parameters", "buffers")
_SCORING: Final = {
    "reference model": "reference model: ", "reward model": "reward model: ", "value model": VALUE,
}  # fmt: skip
"""The models that run one forward of a rollout, and the beginnings of their rows (memcalc.tasks)."""


def idle_in_rollout(report: Report) -> str:
    """Return the note: the bytes that are idle while text is generated and scored, and those of models with one forward."""
    states = show_bytes(report.total("optimizer_states"))
    masters = ", fp32 masters among them" if report.setup.has_master_weights else ""
    scoring = [
        f"the {name} {show_bytes(size)}" for name, start in _SCORING.items() if (size := _bytes_of(report, start))
    ]
    besides = f"; idle but for one forward of it: {', '.join(scoring)}" if scoring else ""
    return (
        f"{report.setup.task}: idle while text is generated and scored: optimizer states {states}{masters}"
        f"{besides}. TRL moves none of it to the host"
    )


def _bytes_of(report: Report, name: str) -> int:
    return sum(item.nbytes for item in report.items if item.component in _KEPT and item.name.startswith(name))
