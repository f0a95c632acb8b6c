"""A setup's pipeline as the keys of torchtitan's [parallelism].

Source: torchtitan/distributed/pipeline_parallel.py of v0.2.2.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import TYPE_CHECKING, Any, Final

from memcalc.formats.torchtitan_pipeline import ends_of, layers_of_stages
from memcalc.pipelining.programs import divided

if TYPE_CHECKING:
    from memcalc.setup.setup import Setup

_SCHEDULES: Final = {
    "1f1b": "1F1B", "gpipe": "GPipe", "interleaved": "Interleaved1F1B", "zero-bubble": "InterleavedZeroBubble",
}  # fmt: skip
LOOPED: Final = ("interleaved", "zero-bubble")
_BY_DEFAULT: Final = (1, 1)
"""The layers that the embedding and the head count as."""


def stage_keys(setup: Setup, layers: int) -> dict[str, Any]:
    """Return the keys of a pipeline; none without one."""
    if setup.pp == 1:
        return {}
    keys: dict[str, Any] = {}
    if setup.schedule != "1f1b":
        keys["pipeline_parallel_schedule"] = _SCHEDULES[setup.schedule]
    if setup.micro_batch_size > 1:
        keys["pipeline_parallel_microbatch_size"] = setup.micro_batch_size
    counts = _counts(setup, layers)
    by_default = setup.pp * (2 if setup.schedule in LOOPED else 1)
    return {**keys, **next(_ways(counts, by_default))}


def ends_that_stages_say(setup: Setup, layers: int) -> tuple[int | None, int | None]:
    """Return the layers of the first and the last stage that the keys give, as memcalc's options."""
    if setup.pp == 1:
        return None, None
    return ends_of(_counts(setup, layers), is_looped=setup.schedule in LOOPED) or (None, None)


def _counts(setup: Setup, layers: int) -> list[int]:
    return divided(layers, setup.pp * setup.virtual_stages, setup.first_stage_layers, setup.last_stage_layers)


def _ways(counts: list[int], by_default: int) -> Iterator[dict[str, Any]]:
    """Yield the keys that make these stages, the shortest first: numbers, or the names of all modules."""
    layers, number = sum(counts), len(counts)
    for ends in (_BY_DEFAULT, *product(range(layers // number + 2), repeat=2)):
        each = -(-(layers + sum(ends)) // number)
        makes_so_many = number == by_default or -(-(layers + sum(ends)) // each) == number
        if makes_so_many and layers_of_stages(layers, number, *ends) == counts:
            keys = {
                f"pipeline_parallel_{end}_stage_less_layers": n for end, n in zip(("first", "last"), ends, strict=True)
            }
            of_stage = {} if number == by_default else {"pipeline_parallel_layers_per_stage": each}
            yield of_stage if ends == _BY_DEFAULT else {**of_stage, **keys}
    yield {"module_fqns_per_model_part": _modules(counts)}


def _modules(counts: list[int]) -> list[list[str]]:
    parts: list[list[str]] = []
    begin = 0
    for count in counts:
        parts.append([f"layers.{i}" for i in range(begin, begin + count)])
        begin += count
    parts[0].insert(0, "tok_embeddings")
    parts[-1] += ["norm", "output"]
    return parts
