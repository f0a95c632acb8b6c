"""The time that one rank computes and sends in a step, without waiting for other stages."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from memcalc.estimation.compute import computed, moved
from memcalc.hardware.cost import Unknown as NoCost
from memcalc.pipelining.schedules import of_each_chunk
from memcalc.timing.items import Timed
from memcalc.timing.kernels import Unknown, products, streams
from memcalc.timing.moved_activations import moved_activations
from memcalc.timing.schedule import Turn
from memcalc.units import MICRO

if TYPE_CHECKING:
    from memcalc.estimation.report import Report
    from memcalc.layout.collectives import Collective
    from memcalc.setup.setup import Setup
    from memcalc.tape.profile import Profile
    from memcalc.timing.kernels import Rates

_PHASES: Final = ("forward", "backward", "recomputation")


class Sums(NamedTuple):
    """The seconds of a step's kernels by phase, and those that the CPU takes to start them."""

    forward: float
    backward: float
    recomputation: float
    starting_forward: float
    starting_backward: float

    @property
    def waits(self) -> tuple[float, float]:
        """Return the seconds that the GPU waits for the CPU in forward and in backward."""
        again = self.backward + self.recomputation
        return max(0.0, self.starting_forward - self.forward), max(0.0, self.starting_backward - again)


class RankTime(NamedTuple):
    """The rows of a rank's time, and their sums."""

    items: list[Timed]
    sent: list[Timed]
    """The rows of `items` that are collectives, in the order of the rank's collectives."""
    sums: Sums
    turns: list[Turn]
    """One micro-batch's forward and backward in each chunk, with what it waits for in between."""
    exposed: float
    """The seconds of communication that nothing hides, in all micro-batches and after them."""
    once: float
    """The part of `exposed` that comes once in a step."""


def rank_time(report: Report, rates: Rates) -> RankTime | Unknown:
    """Return the time of a rank's step without its optimizer; Unknown if a part of it is not known."""
    kernels: list[list[Timed]] = []
    for profile in report.rank.profiles:
        own = _of_profile(report, profile, rates)
        if isinstance(own, Unknown):
            return own
        kernels.append(own)
    each = [_sums(own, rates) for own in kernels]
    sums = Sums(*(sum(parts) for parts in zip(*each, strict=True)))
    sent = _communication(report, sums)
    if isinstance(sent, Unknown):
        return sent
    moved = moved_activations(report, sums.forward, sums.backward + sums.recomputation)
    if isinstance(moved, Unknown):
        return moved
    setup = report.setup
    many, chunks = of_each_chunk(setup.schedule, setup.micro_batches), setup.virtual_stages
    waits = _exposed(report, sent)
    if moved:
        to_host, back = (item.seconds - item.hidden for item in moved)
        waits = waits[0] + to_host, waits[1] + back, waits[2]
    inside = [each_phase / (many * chunks) for each_phase in waits[:2]]
    whole = each if len(each) == chunks else [Sums(*(part / chunks for part in sums))] * chunks
    turns = [_turn(one, many, *inside) for one in whole]
    items = [*(item for own in kernels for item in own), *sent, *moved, *_starting(sums, rates)]
    return RankTime(items, sent, sums, turns, sum(waits), waits[2])


def _of_profile(report: Report, profile: Profile, rates: Rates) -> list[Timed] | Unknown:
    """Return the kernels of one chunk's run."""
    of = report.setup, report.rank.on_paper
    multiplied, other = products(computed([profile], *of), rates), streams(moved([profile], *of), rates)
    if isinstance(multiplied, Unknown):
        return multiplied
    return other if isinstance(other, Unknown) else [*multiplied, *other]


def _sums(items: list[Timed], rates: Rates) -> Sums:
    seconds = {part: sum(item.seconds for item in items if item.part == part) for part in _PHASES}
    calls = {part: sum(item.calls for item in items if item.part == part) for part in _PHASES}
    start = rates.speed.launch.value * MICRO
    return Sums(
        seconds["forward"],
        seconds["backward"],
        seconds["recomputation"],
        start * calls["forward"],
        start * (calls["backward"] + calls["recomputation"]),
    )


def _turn(sums: Sums, many: int, forward: float, backward: float) -> Turn:
    """Return a chunk's turn. `forward` and `backward`: the seconds that it waits for communication."""
    waits = sums.waits
    computing = (sums.forward + waits[0]) / many, (sums.backward + sums.recomputation + waits[1]) / many
    return Turn(computing[0] + forward, computing[1] + backward)


def _starting(sums: Sums, rates: Rates) -> list[Timed]:
    """Return the row of the time that the GPU waits for the CPU, if it does."""
    seconds = sum(sums.waits)
    if not seconds:
        return []
    launch = rates.speed.launch
    formula = f"kernels·{launch.value:g} µs less the time that they run"
    return [Timed("the CPU starts kernels", "launch", seconds, 0.0, "latency", 0, formula, "assumed", launch.source)]


def _communication(report: Report, sums: Sums) -> list[Timed] | Unknown:
    """Return the collectives, each with the seconds that compute hides: those of a window share the time that it computes."""
    made: list[Timed] = []
    wanted: defaultdict[_Window, float] = defaultdict(float)
    for collective, cost in zip(report.collectives, report.costs, strict=True):
        if isinstance(cost, NoCost):
            return Unknown(cost.missing)
        wanted[_window(collective, report.setup)] += cost.seconds * _covered(collective)
    room = _rooms(sums, report.setup.micro_batches)
    room["backward"] -= min(room["last backward"], wanted["last backward"])  # what the last one hides, it hides alone
    share = {window: min(1.0, room[window] / seconds) if seconds else 0.0 for window, seconds in wanted.items()}
    for collective, cost in zip(report.collectives, report.costs, strict=True):
        assert not isinstance(cost, NoCost)
        name = f"{collective.axis} {collective.collective}: {collective.name}"
        hidden = cost.seconds * _covered(collective) * share[_window(collective, report.setup)]
        of = cost.formula, cost.basis, cost.source
        made.append(Timed(name, "communication", cost.seconds, hidden, "link", collective.calls, *of))
    return made


_Window = Literal["exposed", "forward", "backward", "last backward"]
"""The kernels that can hide a collective: those of a phase in all micro-batches, or in the last one."""


def _window(collective: Collective, setup: Setup) -> _Window:
    """Return the kernels that can hide a collective. Gradients that no micro-batch but the last one reduces have the last
    backward alone."""
    of_gradients = collective.axis == "dp" and collective.collective in ("all_reduce", "reduce_scatter")
    if of_gradients and collective.overlap == "backward" and setup.keeps_whole_gradients:
        return "last backward"
    return collective.overlap


def _rooms(sums: Sums, micro_batches: int) -> dict[_Window, float]:
    backward = sums.backward + sums.recomputation
    return {
        "exposed": 0.0, "forward": sums.forward, "backward": backward, "last backward": backward / micro_batches,
    }  # fmt: skip


def _covered(collective: Collective) -> float:
    """Return the share of a collective that begins while its phase computes."""
    return 1 - collective.tail / collective.payload if collective.payload else 1.0


def _exposed(report: Report, sent: list[Timed]) -> tuple[float, float, float]:
    """Return the exposed seconds inside forwards, inside backwards, and once in a step."""
    forward = backward = once = 0.0
    for collective, item in zip(report.collectives, sent, strict=True):
        left = item.seconds - item.hidden
        if collective.axis == "dp" or collective.phase == "step":
            once += left
        elif collective.phase == "forward":
            forward += left
        else:
            backward += left
    return forward, backward, once
