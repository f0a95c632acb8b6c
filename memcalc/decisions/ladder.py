"""`memcalc fit --ladder`: what people change, one after the other, when a step does not fit a GPU.

The order is that of the guides of DeepSpeed and transformers: recompute first, then share out more, then move to the host,
and last to files. Each rung keeps those below it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

from memcalc.core.collector import without_collections
from memcalc.core.dims import numel
from memcalc.errors import InputError
from memcalc.estimation.estimate import estimate
from memcalc.formats.given import with_files
from memcalc.inputs.model import load_model
from memcalc.report.document import (
    SCHEMA_VERSION,
    fit_document,
    memory_document,
    model_document,
    setup_document,
)
from memcalc.report.time import time_document
from memcalc.timing.kernels import Unknown

if TYPE_CHECKING:
    from memcalc.estimation.report import Report

RUNGS: Final[tuple[tuple[str, Mapping[str, Any]], ...]] = (
    ("recompute in backward", {"recompute": "full"}),
    ("share out gradients", {"zero": 2}),
    ("optimizer on the host", {"offload_optimizer": "cpu"}),
    ("share out weights", {"zero": 3}),
    ("weights on the host", {"offload_params": "cpu"}),
    ("optimizer in files", {"offload_optimizer": "nvme"}),
    ("weights in files", {"offload_params": "nvme"}),
)
"""A name of each rung, and the options that it sets."""
_ENGINES: Final = ("none", "ddp", "deepspeed")
"""The engines of a setup from which DeepSpeed's stages are the next step."""
_NOTHING: Final[Mapping[str, Any]] = {}
_BUFFER: Final = 100_000_000
"""DeepSpeed's buffer_size for weights in files, in elements."""
EXAMPLE: Final = "memcalc fit llama-7b --gpus 8 --gpu a100-80gb --ladder"


@dataclass(frozen=True)
class Rung:
    """One rung. `report` is None if it is refused, and `error` is the reason; the rungs above then do without it."""

    name: str
    adds: Mapping[str, Any]
    """The options that it sets; empty for the setup as it was given."""
    flags: Mapping[str, Any]
    """All options that differ from the given ones, up to this rung."""
    report: Report | None
    error: str | None
    saves: int | None
    """Bytes that it saves over the rung before; negative if it needs more. None for a refused or the first one."""
    saves_of: Literal["device", "allocated"]
    """The number that `saves` compares: `device`, or `allocated` where the fragments of one of both alone are assumed."""
    takes: float | None
    """The time of a step over that of the setup as given; None where one of both is not known."""

    def to_dict(self) -> dict[str, Any]:
        """Return the rung for JSON. The sub-documents are those of `memcalc.estimate`; null for a refused rung."""
        one = self.report
        return {
            "name": self.name,
            "adds": dict(self.adds),
            "flags": dict(self.flags),
            "setup": None if one is None else setup_document(one),
            "memory": None if one is None else memory_document(one),
            "time": None if one is None else time_document(one),
            "fit": None if one is None else fit_document(one),
            "saves": self.saves,
            "saves_of": self.saves_of,
            "takes": self.takes,
            "error": self.error,
        }


@dataclass(frozen=True)
class Ladder:
    rungs: tuple[Rung, ...]

    @property
    def first_fit(self) -> int | None:
        """Return the place of the lowest rung that fits; None if none does."""
        fits = (place for place, rung in enumerate(self.rungs) if rung.report is not None and rung.report.fits)
        return next(fits, None)

    @without_collections()
    def to_dict(self) -> dict[str, Any]:
        """Return the JSON document."""
        first = self.rungs[0].report
        assert first is not None
        rungs = [rung.to_dict() for rung in self.rungs]
        return {
            "schema_version": SCHEMA_VERSION,
            "model": model_document(first),
            "first_fit": self.first_fit,
            "ladder": rungs,
        }


@without_collections()
def ladder(model: Any = None, *, params: Any = None, **options: Any) -> Ladder:
    """Return the setup as given, and each rung above it that the given options do not have already.

    Give `model` and `options` as for `memcalc.estimate`. Raise InputError if the setup itself is refused, without a GPU or a
    model, and for an engine that has no such rungs.
    """
    model, options, _ = with_files(model, options)
    if model is None or params is not None:
        raise InputError(f"--ladder: needs --model, whose step is recomputed and moved; as in: {EXAMPLE}")
    given = {name: value for name, value in options.items() if value is not None}
    if given.get("gpu") is None:
        raise InputError(f"--gpu: missing; --ladder needs the GPU that the setup has to fit; as in: {EXAMPLE}")
    loaded = load_model(model)
    first = estimate(loaded, **given)
    if first.setup.engine not in _ENGINES:
        why = f"engine {first.setup.engine} has other rungs than DeepSpeed's"
        raise InputError(f"--ladder: {why}; allowed: with --engine {', '.join(_ENGINES)}")
    return Ladder(tuple(_climbed(loaded, given, first)))


def _climbed(model: Any, given: Mapping[str, Any], first: Report) -> Iterator[Rung]:
    below = first
    yield Rung("as given", {}, {}, first, None, None, "device", None)
    flags: dict[str, Any] = {}
    for name, adds in RUNGS:
        if not _is_new(adds, below):
            continue
        adds = _with_engine(_of_all_layers(adds, below), below, given)
        asked = {**flags, **adds}
        report, more, error = _first_that_runs(model, {**given, **asked}, below, adds)
        if report is None:
            yield Rung(name, adds, asked, None, error, None, "device", None)
            continue
        adds, asked = {**adds, **more}, {**asked, **more}
        flags, of = asked, _alike(below, report)
        saved = below.device - report.device if of == "device" else below.allocated - report.allocated
        yield Rung(name, adds, asked, report, None, saved, of, _longer(report, first))
        below = report


def _alike(below: Report, report: Report) -> Literal["device", "allocated"]:
    """Return the largest number that both reports have by the same rule: fragments that are assumed here and played or measured
    there are no saving."""
    return "device" if _fragments(below) == _fragments(report) else "allocated"


def _fragments(report: Report) -> tuple[str, ...]:
    return tuple(item.basis for item in report.overheads if item.component == "reserved")


def _first_that_runs(
    model: Any, options: Mapping[str, Any], below: Report, adds: Mapping[str, Any]
) -> tuple[Report | None, Mapping[str, Any], str | None]:
    """Return the report of a rung, the options that it takes besides, and why it is refused without these."""
    error: str | None = None
    tried = _buffers(below) if adds.get("offload_params") == "nvme" else iter([_NOTHING])
    for more in tried:
        try:
            report = estimate(model, **{**options, **more})
            _ = report.phases  # DeepSpeed's own refusals of its buffers come while a step is played
        except InputError as refused:
            error = error or str(refused)
        else:
            return report, more, error
    return None, _NOTHING, error


def _buffers(below: Report) -> Iterator[Mapping[str, Any]]:
    """Yield options with which DeepSpeed has the buffers for weights in files: its defaults, and then larger and more ones for
    modules that gather their weights when they begin, and keep none."""
    shards = below.setup.gpus
    largest = max(-(-numel(weight.shape)[0] // shards) for weight in below.model.program.weights())
    size: Mapping[str, Any] = {"nvme_buffer_size": largest} if largest > _BUFFER else {}
    yield _NOTHING
    alone = {"prefetch_bucket_size": 0, "max_reuse_distance": 0}
    yield from ({**size, **alone, **count} for count in ({}, {"nvme_buffer_count": 16}, {"nvme_buffer_count": 64}))


def _is_new(adds: Mapping[str, Any], below: Report) -> bool:
    """Return False for a rung that a setup has already: a higher stage has the lower one, and files come after the host."""
    setup = below.setup
    return _of_all_layers(adds, below) != adds or not all(
        getattr(setup, name) in (value, "nvme") or (name == "zero" and setup.zero > value)
        for name, value in adds.items()
    )


def _of_all_layers(adds: Mapping[str, Any], below: Report) -> Mapping[str, Any]:
    """Return the options of a rung, of which recomputation means all layers."""
    some = "recompute" in adds and below.setup.recompute_layers is not None
    return {**adds, "recompute_layers": None} if some else adds


def _with_engine(adds: Mapping[str, Any], below: Report, given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the options of a rung, with DeepSpeed as the engine of its own ones, unless a stage alone means it."""
    own = "recompute" not in adds
    implied = given.get("engine") is None and adds.get("zero") and below.setup.gpus > 1
    if own and below.setup.engine != "deepspeed" and not implied:
        return {"engine": "deepspeed", **adds}
    return adds


def _longer(report: Report, first: Report) -> float | None:
    time, before = report.time, first.time
    if isinstance(time, Unknown) or isinstance(before, Unknown):
        return None
    return time.seconds / before.seconds
