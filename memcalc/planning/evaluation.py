"""The numbers of one layout: from a probe, from its own run, and from the verdict on it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from memcalc.core.collector import without_collections
from memcalc.device.verdict import outside, sure
from memcalc.errors import InputError
from memcalc.estimation.estimate import estimate
from memcalc.estimation.report import Report
from memcalc.inputs.gpu import load_gpu
from memcalc.planning.after_passes import least_after_passes
from memcalc.planning.bounds import NO_BOUND, Bound, Floors
from memcalc.planning.layouts import LIMITS
from memcalc.planning.probes import NO_PROBE, Probe, probe, probe_key
from memcalc.planning.refusals import Refusals, refusals_of
from memcalc.setup.resolved import resolve
from memcalc.timing.kernels import Unknown

if TYPE_CHECKING:
    from collections.abc import Mapping

    from memcalc.inputs.gpu import GPU
    from memcalc.inputs.model import Model
    from memcalc.inputs.options import Options
    from memcalc.planning.layouts import Degrees, Layout

_LARGEST: Final = LIMITS["micro_batch_size"]
ALONE, FLOOR, SHARED, UNRECOMPUTED, PROBED, SENT, EXACT, JUDGED = range(8)
"""How much is known: first of all layouts of the same degrees together, then of a layout."""


class Group(NamedTuple):
    """Layouts of the same degrees."""

    degrees: Degrees
    refusals: Refusals
    bound: Bound
    """The bound of all of them."""


class Member(NamedTuple):
    """A layout of a group: its place among all of its degrees, and its bound."""

    place: int
    layout: Layout
    bound: Bound


class Exact(NamedTuple):
    """The numbers of a layout's own run. `fits` is False if the peak alone is above the GPU's memory."""

    seconds: float
    nbytes: int
    """The bytes of the peak and of what the process holds besides."""
    fits: bool
    row: str
    why_not: str = ""
    """The line with which the run or its time is refused; '' if it is not."""


class Judged(NamedTuple):
    """The verdict of a layout, and the parts of its report's document that a plan shows."""

    fits: bool
    needs: int
    """The bytes of the peak and of what the process holds besides: without what the allocator reserves more."""
    document: Mapping[str, Any]


class Evaluator:
    """The runs of one model, which share what they have in common."""

    def __init__(self, model: Model, base: Options, given: Mapping[str, Any]) -> None:
        """Evaluate layouts of `model`. `base`: the checked options that all layouts have; `given`: the same as given."""
        self.model, self.base, self._given = model, base, given
        self._probes: dict[tuple[Any, ...], Probe] = {}
        self._floors: dict[str, Floors] = {}

    def gpu(self, layout: Layout) -> GPU:
        return load_gpu(layout.gpu)

    def floor(self, layout: Layout) -> Bound:
        """Return the bound from the model alone."""
        return self._floors_of(layout).bound(layout)

    def _floors_of(self, layout: Layout) -> Floors:
        if layout.gpu not in self._floors:
            self._floors[layout.gpu] = Floors(self.model, self.base._replace(gpu=layout.gpu), self.gpu(layout))
        return self._floors[layout.gpu]

    def group(self, degrees: Degrees) -> Group:
        """Return the layouts of some degrees with their refusals and the bound from the model alone."""
        refusals = refusals_of(degrees, self.refusal)
        return Group(
            degrees, refusals, self._floors_of(degrees.first).of_degrees(degrees) if refusals.valid() else NO_BOUND
        )

    def members(self, group: Group) -> list[Member]:
        """Return the layouts of a group that are not refused, each with its bound from the model alone."""
        layouts = enumerate(group.degrees.layouts())
        return [Member(place, one, self.floor(one)) for place, one in layouts if not group.refusals.line(one)]

    def look(self, known: int, of: Layout | Group) -> Bound | list[Member] | Exact | Judged:
        """Return what is to be known next of a layout or of a group."""
        if isinstance(of, Group):
            return self.members(of)
        looks = {
            FLOOR: self.shared, SHARED: self.unrecomputed, UNRECOMPUTED: self.probed, PROBED: self.sent, SENT: self.exact,
            EXACT: self.judged,
        }  # fmt: skip
        return looks[known](of)

    @without_collections()
    def shared(self, layout: Layout) -> Bound:
        """Return the bound from a run that several layouts share: without a pipeline and recomputation, with whole sequences and
        the largest micro-batch. A micro-batch of one sequence has a run of its own, in which some kernels are not there."""
        own = layout.micro_batch_size
        batch = _LARGEST if own > 1 and _LARGEST % own == 0 else own
        return self._of_another(layout, layout._replace(cp=1, micro_batch_size=batch))

    @without_collections()
    def unrecomputed(self, layout: Layout) -> Bound:
        """Return the bound from the run without a pipeline and without recomputation."""
        return self._of_another(layout, layout)

    def _of_another(self, layout: Layout, other: Layout) -> Bound:
        run = self._probe(other._replace(recompute=self._given.get("recompute") or "none"))
        bound, seconds = self.floor(layout), self._floors_of(layout).shared(layout, run, other)
        return bound._replace(seconds=max(bound.seconds, seconds))

    @without_collections()
    def probed(self, layout: Layout) -> Bound:
        """Return the bound from a run without a pipeline."""
        return self._floors_of(layout).probed(layout, self._probe(layout))

    def _probe(self, layout: Layout) -> Probe:
        key = probe_key(layout)
        if key not in self._probes:
            try:
                self._probes[key] = probe(self.model, self.base, layout)
            except InputError:
                self._probes[key] = NO_PROBE
        return self._probes[key]

    def sent(self, layout: Layout) -> Bound:
        """Return the bound from a run without a pipeline, with what follows the forwards and backwards."""
        bound = self.probed(layout)
        setup = resolve(self.base._replace(**layout._asdict()), self.model)
        return bound._replace(seconds=bound.seconds + least_after_passes(self.model, setup, self.gpu(layout)))

    def setup_options(self, layout: Layout) -> dict[str, Any]:
        """Return the options of a layout as `memcalc.estimate` takes them."""
        return {**self._given, **{name: value for name, value in layout._asdict().items() if value is not None}}

    def refusal(self, layout: Layout) -> str:
        """Return the line with which a layout is refused before it is run; '' if it is not refused."""
        if layout.dp and (self.base.global_batch_size or 1) % (layout.dp * layout.micro_batch_size):
            return f"--global-batch-size {self.base.global_batch_size}: is not divisible by dp · micro-batch"
        try:
            resolve(self.base._replace(**layout._asdict()), self.model)
        except InputError as error:
            return str(error)
        return ""

    @without_collections()
    def exact(self, layout: Layout) -> Exact:
        """Return the peak and the time of a layout's own run. The first stage of a pipeline holds most, so it comes
        first, then those of which one can hold more."""
        try:
            setup = resolve(self.base._replace(**layout._asdict()), self.model)
            if layout.pp > 1:
                first = self._too_large(Report(self.model, setup._replace(pp_rank=0)))
                first = first or self._too_large(Report(self.model, setup, fullest=True))
                if first is not None:
                    return first
            report = Report(self.model, setup)
            too_large = self._too_large(report)
            if too_large is not None:
                return too_large
        except InputError as error:
            return Exact(0.0, 0, False, "", str(error))
        time, nbytes = report.time, report.peak + outside(report)
        if isinstance(time, Unknown):
            return Exact(0.0, nbytes, False, "", time.missing)
        return Exact(time.seconds, nbytes, True, "")

    def _too_large(self, report: Report) -> Exact | None:
        """Return the numbers of a run whose peak is above the GPU's memory; None if it is not."""
        assert report.gpu is not None
        nbytes = report.peak + outside(report)
        return Exact(0.0, nbytes, False, f"the peak in {report.peak_phase}") if nbytes > report.gpu.capacity else None

    @without_collections()
    def judged(self, layout: Layout) -> Judged:
        """Return the verdict of a layout, with the numbers that `memcalc.estimate` gives for it."""
        report = estimate(self.model, **self.setup_options(layout))
        least = report.peak + outside(report)
        # a first look that is no fit never becomes one, and more than a run may take needs no look
        if least > sure(self.gpu(layout).capacity) or not (report.first_look and report.first_look.fits):
            return Judged(False, least, {})
        verdict = report.verdict
        assert verdict is not None
        return Judged(bool(verdict.fits), least, document_of(report) if verdict.fits else {})


def document_of(report: Report) -> dict[str, Any]:
    """Return the parts of a report's document that a plan shows."""
    from memcalc.report.document import fit_document, setup_document
    from memcalc.report.time import time_document

    return {
        "setup": setup_document(report),
        "memory": {"peak": report.peak, "reserved": report.reserved, "device": report.device},
        "fit": fit_document(report),
        "time": time_document(report),
    }
