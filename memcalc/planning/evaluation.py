"""The numbers of one layout: from a probe, from its own run, and from the verdict on it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from memcalc.core.collector import without_collections
from memcalc.device.verdict import outside
from memcalc.errors import InputError
from memcalc.estimation.estimate import estimate
from memcalc.estimation.report import Report
from memcalc.inputs.gpu import load_gpu
from memcalc.planning.after_passes import least_after_passes
from memcalc.planning.bounds import Bound, Floors
from memcalc.planning.probes import NO_PROBE, Probe, probe, probe_key
from memcalc.setup.resolved import resolve
from memcalc.timing.kernels import Unknown

if TYPE_CHECKING:
    from collections.abc import Mapping

    from memcalc.inputs.gpu import GPU
    from memcalc.inputs.model import Model
    from memcalc.inputs.options import Options
    from memcalc.planning.layouts import Layout

_ALIKE: Final = ("--tp ", "--cp ", "--ep ", "--zero ", "--engine ")
"""The options whose refusals depend on no micro-batch, shard group or number of chunks."""


FLOOR, PROBED, SENT, EXACT, JUDGED = range(5)
"""How much is known of a layout."""


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
    """The bytes of the device that the run takes on a GPU with room, with the stated error."""
    document: Mapping[str, Any]


class Evaluator:
    """The runs of one model, which share what they have in common."""

    def __init__(self, model: Model, base: Options, given: Mapping[str, Any]) -> None:
        """Evaluate layouts of `model`. `base`: the checked options that all layouts have; `given`: the same as given."""
        self.model, self.base, self._given = model, base, given
        self._probes: dict[tuple[Any, ...], Probe] = {}
        self._refused: dict[Layout, str] = {}
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

    def look(self, known: int, layout: Layout) -> Bound | Exact | Judged:
        """Return what is to be known next of a layout."""
        if known == FLOOR:
            return self.probed(layout)
        if known == PROBED:
            return self.sent(layout)
        return self.exact(layout) if known == SENT else self.judged(layout)

    @without_collections()
    def probed(self, layout: Layout) -> Bound:
        """Return the bound from a run without a pipeline."""
        key = probe_key(layout)
        if key not in self._probes:
            try:
                self._probes[key] = probe(self.model, self.base, layout)
            except InputError:
                self._probes[key] = NO_PROBE
        return self._floors_of(layout).probed(layout, self._probes[key])

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
            return f"--global-batch-size {self.base.global_batch_size}: does not divide by dp · micro-batch"
        alike = layout._replace(micro_batch_size=1, shard_group=None, virtual_stages=min(layout.virtual_stages, 2))
        if alike in self._refused:
            return self._refused[alike]
        try:
            resolve(self.base._replace(**layout._asdict()), self.model)
        except InputError as error:
            line = str(error)
            if line.startswith(_ALIKE):
                self._refused[alike] = line
            return line
        return ""

    @without_collections()
    def exact(self, layout: Layout) -> Exact:
        """Return the peak and the time of a layout's own run."""
        try:
            report = Report(self.model, resolve(self.base._replace(**layout._asdict()), self.model))
            nbytes = report.peak + outside(report)
        except InputError as error:
            return Exact(0.0, 0, False, "", str(error))
        if nbytes > self.gpu(layout).capacity:
            return Exact(0.0, nbytes, False, f"the peak in {report.peak_phase}")
        time = report.time
        if isinstance(time, Unknown):
            return Exact(0.0, nbytes, False, "", time.missing)
        return Exact(time.seconds, nbytes, True, "")

    @without_collections()
    def judged(self, layout: Layout) -> Judged:
        """Return the verdict of a layout, with the numbers that `memcalc.estimate` gives for it."""
        report = estimate(self.model, **self.setup_options(layout))
        verdict = report.verdict
        assert verdict is not None
        return Judged(bool(verdict.fits), report.device + report.margin, document_of(report) if verdict.fits else {})


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
