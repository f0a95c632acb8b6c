"""The batch sizes of a step, where files say some of micro-batch, accumulation, whole batch and GPUs, and each follows from
the others: batch = micro-batch · accumulation steps · data-parallel ranks.

Source: deepspeed/runtime/config.py (_set_batch_related_parameters, _batch_assertion).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from memcalc.errors import InputError
from memcalc.formats.found import ACCUMULATION, REPLICAS, Value

_MICRO: Final = "micro_batch_size"
_BATCH: Final = "global_batch_size"


def with_batches(given: Mapping[str, Any], said: Mapping[str, Value]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the options that files say, and where each was found, with the batch of a step for accumulation steps.

    `given`: the options of the command line, which win. Raises InputError if the sizes contradict each other.
    """
    values = {name: value for name, value in said.items() if name not in given}
    _complete(given, values)
    _share(given, values)
    steps = values.pop(ACCUMULATION, None)
    if steps is not None and not given.get(_BATCH) and _BATCH not in values:
        ranks = _ranks(given, values)
        micro = _of(_MICRO, given, values) or 1
        if ranks:
            values[_BATCH] = Value(micro * steps.value * ranks, f"{steps.where} {steps.value}", steps.is_given)
    return {name: one.value for name, one in values.items()}, {name: one.where for name, one in values.items()}


def _complete(given: Mapping[str, Any], values: dict[str, Value]) -> None:
    """Put in what a whole batch in a file leaves open: the GPUs, or the micro-batch. Raises InputError if it does not
    divide."""
    batch, steps, micro = values.get(_BATCH), values.get(ACCUMULATION), _of(_MICRO, given, values)
    if batch is None:
        return
    if micro and steps is not None and _of("gpus", given, values) is None:
        _check(batch, micro * steps.value)
        gpus = batch.value // (micro * steps.value) * _degrees(given, values)
        values["gpus"] = Value(gpus, f"{batch.where} {batch.value} / (micro-batch {micro} · {steps.value} steps)")
    ranks = _ranks(given, values)
    if not ranks:
        return
    is_micro_said = _MICRO in given or (_MICRO in values and values[_MICRO].is_given)
    if not is_micro_said:
        per_rank = ranks * (steps.value if steps is not None else 1)
        _check(batch, per_rank)
        values[_MICRO] = Value(batch.value // per_rank, f"{batch.where} {batch.value} / {per_rank}")
    elif steps is not None and _MICRO not in given and batch.value != values[_MICRO].value * steps.value * ranks:
        micro = values[_MICRO].value
        raise InputError(
            f"{batch.where} {batch.value}: is not {_MICRO} {micro} · {ACCUMULATION} {steps.value} · {ranks} data-parallel "
            f"ranks = {micro * steps.value * ranks}; --global-batch-size replaces it"
        )


def _share(given: Mapping[str, Any], values: dict[str, Value]) -> None:
    """Put in the GPUs of a shard group where a file says the number of groups. Raises InputError if they do not divide."""
    replicas = values.pop(REPLICAS, None)
    ranks = _ranks(given, values) * (_of("cp", given, values) or 1)
    if replicas is None or not ranks or "shard_group" in given:
        return
    if ranks % replicas.value:
        gpus = _of("gpus", given, values) or 1
        why = f"leaves dp·cp = {ranks}, which {replicas.where} {replicas.value} does not divide"
        raise InputError(f"--gpus {gpus}: {why}; allowed: a multiple of {replicas.value * _degrees(given, values)}")
    if replicas.value > 1:
        values["shard_group"] = Value(ranks // replicas.value, f"{replicas.where} {replicas.value}", replicas.is_given)


def _check(batch: Value, parts: int) -> None:
    if batch.value % parts or batch.value < parts:
        raise InputError(
            f"{batch.where} {batch.value}: is not divisible by {parts}, what the other sizes make; allowed: a multiple"
        )


def _of(name: str, given: Mapping[str, Any], values: Mapping[str, Value]) -> Any:
    return given.get(name, values[name].value if name in values else None)


def _degrees(given: Mapping[str, Any], values: Mapping[str, Value]) -> int:
    product = 1
    for axis in ("tp", "pp", "cp"):
        degree = _of(axis, given, values)
        product *= degree if isinstance(degree, int) else 1
    return product


def _ranks(given: Mapping[str, Any], values: Mapping[str, Value]) -> int:
    """Return the data-parallel ranks; 0 if they do not follow, as for a range of GPUs."""
    gpus = _of("gpus", given, values)
    if gpus is None:
        gpus = 1
    return gpus // _degrees(given, values) if isinstance(gpus, int) and not isinstance(gpus, bool) else 0
