"""The time of the step's update, wherever the optimizer runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcalc.timing.kernels import Unknown
from memcalc.timing.optimizer import optimizer

if TYPE_CHECKING:
    from memcalc.estimation.report import Report
    from memcalc.timing.items import Timed
    from memcalc.timing.kernels import Rates


def update(report: Report, rates: Rates) -> list[Timed] | Unknown:
    """Return the time of the update; Unknown if it runs on the host, whose speed is not known."""
    if report.setup.offload_optimizer == "nvme":
        return Unknown("the optimizer is in files, and the speeds of NVMe and of the host are not known")
    if report.setup.offload_optimizer != "none":
        return Unknown("the optimizer runs on the host, whose speed is not known")
    return optimizer(report, rates)
