"""The time of saved activations on their way to the host and back.

TRL's class and Megatron's manager copy on streams of their own: to the host while forward computes, and back while backward
computes what comes before. So each way is taken to be hidden behind its phase as far as that is as long; the speed is that of
the data sheet's link.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from memcalc.offload.activations import OF_GROUPS, SOURCE, copied_bytes
from memcalc.timing.items import Timed
from memcalc.timing.kernels import Unknown

if TYPE_CHECKING:
    from memcalc.estimation.report import Report

_LINK: Final = "pcie"


def moved_activations(report: Report, forward: float, backward: float) -> list[Timed] | Unknown:
    """Return the copies of a step, to the host and back. `forward` and `backward`: the seconds that the phases compute."""
    if report.setup.offload_activations == "none" and report.setup.offload_modules is None:
        return []
    gpu = report.gpu
    assert gpu is not None
    if _LINK not in gpu.links:
        return Unknown(f"the link of {gpu.full_name} to the host")
    rate, many = gpu.links[_LINK].nbytes / 2, report.setup.micro_batches
    copied = [one for profile in report.rank.profiles for one in profile.run.copied]
    source = SOURCE if report.setup.offload_modules is None else OF_GROUPS
    out: list[Timed] = []
    for back, room in ((False, forward), (True, backward)):
        nbytes, calls = copied_bytes(copied, back=back), sum(one.back is back for one in copied)
        seconds = many * nbytes / rate
        name = "activations to the host" if not back else "activations back from the host"
        formula = f"micro-batches·bytes/(link/2) = {many}·{nbytes}/{rate:.0f} s"
        hidden = min(seconds, room)
        out.append(Timed(name, "communication", seconds, hidden, "link", many * calls, formula, "assumed", source))
    return out
