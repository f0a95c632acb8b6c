"""The time to the first token and the tokens a second of a run on its GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from memcalc.core.dims import numel
from memcalc.hardware.cost import INSIDE, SOURCE
from memcalc.hardware.speed import speed_of
from memcalc.inference.heights import On
from memcalc.inference.options import DTYPES
from memcalc.inference.time import SERVED, TRANSFORMERS, Item, Part, Run, Stored, seconds_in, step_items
from memcalc.inference.weights import rows_by_weight
from memcalc.inference.zero_inference import seconds_of_copies
from memcalc.timing.kernels import Rates, Unknown

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memcalc.inference.report import Inferred
    from memcalc.inference.weights import Method
    from memcalc.inference.zero_inference import Needs
    from memcalc.inputs.gpu import GPU
    from memcalc.inputs.model import Model

_KERNELS: Final = "flash-attn 2"
_COPIED: Final = frozenset({"nf4", "fp4"})
"""The methods that copy a weight to 16 bits for a product of several rows (MatMul4Bit)."""


class Times(NamedTuple):
    """The time of a run. Decode steps grow with the tokens before them: `decode` is the mean of the first and the last one."""

    prefill: float
    decode: float | None
    """The seconds of a decode step; None without new tokens."""
    tokens_per_second: float | None
    """The new tokens of all sequences in a second of decoding."""
    items: tuple[Item, ...]
    """The rows of the prefill, and of the last decode step."""


def times_of(inferred: Inferred, method: Method | None, *, served: bool) -> Times | Unknown:
    """Return the time of a run on its GPU; Unknown if a part of it is not known."""
    gpu, asked = inferred.gpu, inferred.asked
    if gpu is None:
        return Unknown("no GPU is given")
    if not gpu.dense_flops_per_second:
        return Unknown(f"only the memory of {gpu.full_name} is known; give a GPU of `memcalc gpus`")
    per_token, experts = inferred.model.program.routed
    run = Run(
        Rates(gpu, speed_of(gpu.name), _KERNELS, asked.prompt_len or 0),
        SERVED if served else TRANSFORMERS,
        asked.batch_size,
        inferred.scale().nbytes,
        stored(inferred.model, method, asked.dtype, has_fp8="fp8" in gpu.dense_flops_per_second),
        per_token / experts,
        asked.tp,
    )
    prefill: list[Item] = []
    decodes: list[list[Item]] = [[] for _ in inferred.run.decodes]
    for stage in inferred.run.stages:
        found = step_items("prefill", On(inferred.run.prefill, stage), run)
        if isinstance(found, Unknown):
            return found
        prefill += found
        for step, items in zip(inferred.run.decodes, decodes, strict=True):
            found = step_items("decode", On(step, stage), run)
            if isinstance(found, Unknown):
                return found
            items += found
    if inferred.zero_inference is not None:
        for part, items in _parts(prefill, decodes):
            copied = _copied(part, items, inferred.zero_inference, asked.zero_inference, gpu)
            if isinstance(copied, Unknown):
                return copied
            items += copied
    seconds = [seconds_in(items) for items in decodes]
    mean = sum(seconds) / len(seconds) if seconds else None
    rate = None if mean is None else asked.batch_size / mean
    return Times(seconds_in(prefill), mean, rate, (*prefill, *(decodes[-1] if decodes else ())))


def _parts(prefill: list[Item], decodes: list[list[Item]]) -> Iterator[tuple[Part, list[Item]]]:
    yield "prefill", prefill
    for items in decodes:
        yield "decode", items


def _copied(part: Part, items: list[Item], needs: Needs, place: str, gpu: GPU) -> list[Item] | Unknown:
    """Return the time that a forward waits for weights from the host: they are copied while it computes."""
    if place != "cpu":
        return Unknown("how fast weights come from NVMe is not known")
    whole = seconds_of_copies(needs.per_forward, gpu)
    if isinstance(whole, Unknown):
        return whole
    seconds = whole - seconds_in(items)
    if seconds <= 0:
        return []
    formula = f"{needs.per_forward} B / ({INSIDE:g} of the link) = {whole:.4g} s less what the kernels take"
    return [Item(part, "weights come from the host", seconds, "link", 0, formula, "assumed", SOURCE)]


def stored(model: Model, method: Method | None, dtype: str, *, has_fp8: bool) -> dict[str, Stored]:
    """Return how products read the weights that a method quantises, by their modules' paths with * for the layer."""
    if method is None:
        return {}
    of = DTYPES[dtype]
    found: dict[str, list[int]] = {}
    for weight, row in rows_by_weight(model, of, method):
        if row.name == weight.name and row.dtype is of:
            continue
        path = weight.name.removesuffix(".weight")
        sizes = found.setdefault(path, [0, 0])
        sizes[0] += row.nbytes
        if sizes[1] == 0 or row.dtype is not of:
            sizes[1] = max(sizes[1], numel(weight.shape)[0] * of.itemsize)
    layers = {path: _copies(model, path) for path in found}
    computes = "fp8" if method.name == "fp8" and has_fp8 else None
    return {
        path: Stored(nbytes / (layers[path] * whole), computes, method.name in _COPIED)
        for path, (nbytes, whole) in found.items()
        if whole
    }


def _copies(model: Model, path: str) -> int:
    return sum(model.copies(w) for w in model.weight_classes if w.name.removesuffix(".weight") == path)
