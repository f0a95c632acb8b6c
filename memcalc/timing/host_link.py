"""The time of copies between GPU and host: their bytes over one direction of the link, with nothing hidden.

The rate is the data sheet's, so the time is the least that the copies take. GPUs that share a switch, and processes whose
memory is another socket's, have less.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from memcalc.engines.transfers import transfers
from memcalc.timing.items import Timed
from memcalc.timing.kernels import Unknown

if TYPE_CHECKING:
    from memcalc.estimation.report import Report
    from memcalc.inputs.gpu import GPU

_LINK: Final = "pcie"
_DIRECTIONS: Final = 2


def link_rate(gpu: GPU) -> float | Unknown:
    """Return the bytes a second of one direction of a GPU's link to its host; Unknown if it is not known."""
    link = gpu.links.get(_LINK)
    if link is None:
        return Unknown(f"the link of {gpu.full_name} to its host is not known")
    return link.nbytes / _DIRECTIONS


def copies(report: Report) -> list[Timed] | Unknown:
    """Return the time of a rank's copies; none if its weights are on the GPU."""
    assert report.gpu is not None
    found = transfers(report.model, report.setup, report.rank)
    if not found:
        return []
    rate = link_rate(report.gpu)
    if isinstance(rate, Unknown):
        return rate
    source = report.gpu.links[_LINK].source
    return [
        Timed(
            f"host link: {one.name} {one.way}, {one.phase}", "communication", one.nbytes / rate, 0.0, "link", one.times,
            f"{one.formula} / {rate / 1e9:g} GB/s", "assumed", source,
        )
        for one in found
    ]  # fmt: skip
