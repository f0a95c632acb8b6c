"""torchtitan's pipelines: the schedule, the stages of a rank and their layers, and the micro-batches of a local batch.

Source: torchtitan/distributed/pipeline_parallel.py of v0.2.2, distributed/pipeline.py of v0.1.0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple, NoReturn, cast

from memcalc.formats.found import Value
from memcalc.formats.section import Section
from memcalc.formats.torchtitan_config import TitanConfig
from memcalc.pipelining.programs import divided

_SCHEDULES: Final[Mapping[str, str]] = {
    "1f1b": "1f1b",
    "gpipe": "gpipe",
    "interleaved1f1b": "interleaved",
    "interleaved_1f1b": "interleaved",
    "flexibleinterleaved1f1b": "interleaved",
    "flexible_interleaved_1f1b": "interleaved",
    "interleavedzerobubble": "zero-bubble",
}
_OTHER_SCHEDULES: Final = ("loopedbfs", "zbvzerobubble", "dualpipev", "pipelineschedulesingle", "pipelineschedulemulti")
_ALLOWED: Final = "allowed: 1F1B, GPipe, Interleaved1F1B, InterleavedZeroBubble"
_OF_STAGES: Final = ("parallelism.{0}", "experimental.{0}")


class Batches(NamedTuple):
    """The micro-batches of a local batch."""

    size: Value
    number: Value


class Stages(NamedTuple):
    """The keys of a file on its pipeline."""

    options: Mapping[str, Value]
    number: int
    """The chunks of all ranks together."""
    notes: tuple[str, ...]


def stages(config: TitanConfig, pp: int, layers: int | None) -> Stages:
    """Return the options of a pipeline over `pp` ranks; `layers` are the model's, None if they are not known. Raises
    InputError for a schedule that is not modelled, and for stages that torchtitan refuses."""
    schedule = _schedule(config)
    is_looped = schedule.value in ("interleaved", "zero-bubble")
    number, counts, where = _layers_of_stages(config, pp, layers, is_looped=is_looped)
    _check_number(where, number, pp, is_looped=is_looped)
    options = {"schedule": schedule}
    if is_looped:
        options["virtual_stages"] = where.value(number // pp)
    if counts is None or layers is None:
        return Stages(options, number, ())
    if min(counts) < 1 or sum(counts) != layers:
        where.refuse(
            f"{layers} layers do not make {number} stages with a layer in each; allowed: another number of them"
        )
    uneven, notes = _uneven(where, counts, layers, is_looped=is_looped)
    return Stages(options | uneven, number, notes)


def batches(config: TitanConfig, local_batch: Value, number_of_stages: int) -> Batches:
    """Return how a local batch is cut. Raises InputError if the micro-batches do not divide it.

    Until April 2025 files gave the number of micro-batches, by default that of all stages; since then their size.
    """
    sequences: int = local_batch.value
    number = config.whole(number_of_stages, *_paths("pipeline_parallel_microbatches"))
    if number.is_given or config.has_old_degrees:
        section, key = config.at(*_paths("pipeline_parallel_microbatches"))
        if sequences % number.value:
            section.refuse(key, f"{number.value} micro-batches do not divide a local batch of {sequences}")
        return Batches(number._replace(value=sequences // number.value), number)
    size = config.whole(1, "parallelism.pipeline_parallel_microbatch_size")
    if sequences % size.value:
        section, key = config.at("parallelism.pipeline_parallel_microbatch_size")
        section.refuse(key, f"does not divide a local batch of {sequences}; allowed: a divisor of {sequences}")
    return Batches(size, local_batch._replace(value=sequences // size.value))


class _Where(NamedTuple):
    """The key that decides the stages."""

    section: Section
    key: str

    def value(self, value: Any) -> Value:
        here = self.key in self.section
        return self.section.value(self.key, value) if here else self.section.default(self.key, value)

    def refuse(self, why: str) -> NoReturn:
        self.section.refuse(self.key, why)


def _paths(key: str) -> list[str]:
    return [path.format(key) for path in _OF_STAGES]


def _schedule(config: TitanConfig) -> Value:
    csv, csv_key = config.at(*_paths("pipeline_parallel_schedule_csv"))
    if csv.text(csv_key):
        csv.refuse(csv_key, "a schedule of one's own is not modelled; allowed: leave it out")
    section, key = config.at(*_paths("pipeline_parallel_schedule"))
    name = section.text(key)
    if name is None:
        return section.default(key, "1f1b")
    word = name.strip().lower()
    if word in _OTHER_SCHEDULES:
        section.refuse(key, f"is not modelled; {_ALLOWED}")
    if word not in _SCHEDULES:
        section.refuse(key, _ALLOWED)
    return section.value(key, _SCHEDULES[word])


def _layers_of_stages(
    config: TitanConfig, pp: int, layers: int | None, *, is_looped: bool
) -> tuple[int, list[int] | None, _Where]:
    """Return the number of stages, the layers of each (None if the model's are not known), and the key that says so."""
    parallelism = config.section("parallelism")
    if "module_fqns_per_model_part" in parallelism:
        where = _Where(parallelism, "module_fqns_per_model_part")
        counts = [sum(name.startswith("layers.") for name in part) for part in _parts(where)]
        return len(counts), counts, where
    where = _Where(*config.at(*_paths("pipeline_parallel_split_points")))
    points = [point for point in where.section.words(where.key) or () if point]
    if points:
        return len(points) + 1, _between(where, points, layers), where
    weights = tuple(
        config.whole(1, f"parallelism.pipeline_parallel_{end}_stage_less_layers", least=0).value
        for end in ("first", "last")
    )
    each = parallelism.whole("pipeline_parallel_layers_per_stage", 1)
    where = _Where(parallelism, "pipeline_parallel_layers_per_stage")
    if each is None:
        degree = _Where(*config.at(*_paths("pipeline_parallel_degree"), "training.pipeline_parallel_degree"))
        number = pp * (2 if is_looped else 1)
        return number, _counts(degree, number, layers, *weights), degree
    if layers is None:
        where.refuse("needs the number of layers of the model, which the file does not tell; allowed: leave it out")
    number = -(-(layers + sum(weights)) // each)
    return number, _counts(where, number, layers, *weights), where


def _counts(where: _Where, number: int, layers: int | None, first: int, last: int) -> list[int] | None:
    if layers is None:
        return None
    counts = layers_of_stages(layers, number, first, last)
    if counts is None:
        where.refuse(f"{layers} layers are too few for {number} stages")
    return counts


def layers_of_stages(layers: int, number: int, first: int, last: int) -> list[int] | None:
    """Return the layers of each stage (generate_llm_fqn_per_model_part); None if they are too few. The embedding and the
    head count as `first` and `last` layers, and the first stages have one more."""
    if number == 1:
        return [layers]
    each, more = divmod(layers + first + last, number)
    if each == 0 or max(first, last) > each:
        return None
    counts = [each + (i < more) for i in range(number)]
    counts[0] -= first
    counts[-1] -= last
    return counts


def ends_of(counts: list[int], *, is_looped: bool) -> tuple[int | None, int | None] | None:
    """Return the first and the last stage's layers that memcalc has to be given to make these stages, None for an end that
    it makes by itself; None if it does not make them."""
    first, last = counts[0], counts[-1]
    choices = ((None, None),) if is_looped else ((None, None), (first, None), (None, last), (first, last))
    return next((ends for ends in choices if _divided(sum(counts), len(counts), *ends) == counts), None)


def _parts(where: _Where) -> list[list[str]]:
    parts: Any = where.section.raw(where.key)
    if not isinstance(parts, list) or not all(
        isinstance(part, list) and all(isinstance(name, str) for name in cast("list[object]", part))
        for part in cast("list[object]", parts)
    ):
        where.refuse("allowed: a list of lists of names")
    return cast("list[list[str]]", parts)


def _between(where: _Where, points: list[str], layers: int | None) -> list[int] | None:
    """Return the layers between points such as "layers.8", at each of which a stage begins."""
    numbers = [point.removeprefix("layers.") for point in points]
    bounds = [int(number) for number in numbers if number.isascii() and number.isdigit() and len(number) < 8]
    if len(bounds) < len(points) or bounds != sorted(set(bounds)):
        where.refuse("allowed: ascending names of layers, such as layers.8")
    if layers is None:
        return None
    return [end - begin for begin, end in zip([0, *bounds], [*bounds, layers], strict=True)]


def _check_number(where: _Where, number: int, pp: int, *, is_looped: bool) -> None:
    if number % pp or (number == pp) == is_looped:
        wanted = f"2 or more for each of {pp} ranks" if is_looped else f"one for each of {pp} ranks"
        where.refuse(f"makes {number} stages; allowed with this schedule: {wanted}")


def _uneven(
    where: _Where, counts: list[int], layers: int, *, is_looped: bool
) -> tuple[dict[str, Value], tuple[str, ...]]:
    """Return the options that make memcalc's stages those of torchtitan, and a note if none do."""
    ends = ends_of(counts, is_looped=is_looped)
    if ends is not None:
        named = {"first_stage_layers": ends[0], "last_stage_layers": ends[1]}
        return {name: where.value(count) for name, count in named.items() if count is not None}, ()
    even = _divided(layers, len(counts))
    first_and_last = {"first_stage_layers": where.value(counts[0]), "last_stage_layers": where.value(counts[-1])}
    options, assumed = ({}, even) if even else (first_and_last, _divided(layers, len(counts), counts[0], counts[-1]))
    if assumed is None or (is_looped and options):
        where.refuse(f"stages of {_short(counts)} layers are not modelled; allowed: an even split")
    note = f"{where.section.where(where.key)} makes stages of {_short(counts)} layers: {_short(assumed)} are assumed"
    return options, (note,)


def _divided(layers: int, number: int, first: int | None = None, last: int | None = None) -> list[int] | None:
    """Return memcalc's stages; None if one would have no layer."""
    try:
        return divided(layers, number, first, last)
    except ValueError:
        return None


def _short(counts: list[int]) -> str:
    shown = ", ".join(str(count) for count in counts[:8])
    return shown if len(counts) <= 8 else f"{shown}, …"
