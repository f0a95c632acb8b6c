"""The pipeline of Megatron-LM's arguments: model chunks of a rank, and layers of a stage.

Source: validate_args of megatron/training/arguments.py, get_num_layers_to_build of
core/transformer/transformer_block.py, core/transformer/pipeline_parallel_layer_layout.py.
"""

from __future__ import annotations

import re
from typing import Final

from memcalc.formats.found import Value
from memcalc.formats.megatron_section import Arguments
from memcalc.megatron.schedules import ends_of, layers_of_chunks

_LAYOUT: Final = "--pipeline-model-parallel-layout"
_FIRST: Final = "--decoder-first-pipeline-num-layers"
_LAST: Final = "--decoder-last-pipeline-num-layers"
_WITH_EMBEDDING: Final = "--account-for-embedding-in-pipeline-split"
_WITH_LOSS: Final = "--account-for-loss-in-pipeline-split"
_GROUP: Final = "--microbatch-group-size-per-virtual-pipeline-stage"
_DEFERS: Final = "--defer-embedding-wgrad-compute"
_LIMIT: Final = "--wgrad-deferral-limit"
_MOST_LAYERS: Final = 10_000


def stages_of(a: Arguments) -> dict[str, Value]:
    """Return the schedule, the chunks of a rank, and the layers of the stages that are not equal. Raises InputError."""
    out = _divided(a)
    group = a.whole(_GROUP, 1, 10**6)
    if group is not None and "virtual_stages" in out:
        out["microbatch_group_size"] = a.value(_GROUP, group)
    if a.on(_DEFERS):
        limit = a.whole(_LIMIT, 0, 10**6)
        out["wgrad_deferral_limit"] = a.value(_DEFERS if limit is None else _LIMIT, limit or 0)
    return out


def _divided(a: Arguments) -> dict[str, Value]:
    pp = a.whole("--pipeline-model-parallel-size", 1) or 1
    if _LAYOUT in a:
        return _of_layout(a, pp)
    chunks, key = _chunks(a, pp)
    out: dict[str, Value] = {}
    if chunks > 1:
        out = {"schedule": a.value(key, "interleaved"), "virtual_stages": a.value(key, chunks)}
    for option, name in (("first_stage_layers", _FIRST), ("last_stage_layers", _LAST)):
        layers = a.whole(name, 1)
        if layers is not None and pp > 1:
            out[option] = a.value(name, layers)
    if pp > 1 and chunks == 1 and not {"first_stage_layers", "last_stage_layers"} & out.keys():
        out |= _accounted(a, pp)
    return out


def _chunks(a: Arguments, pp: int) -> tuple[int, str]:
    """Return the model chunks of a pipeline rank, and the option that says it."""
    by_rank, by_chunk = "--num-virtual-stages-per-pipeline-rank", "--num-layers-per-virtual-pipeline-stage"
    chunks, each = a.whole(by_rank, 1, 10**6), a.whole(by_chunk, 1, 10**6)
    if chunks is not None and each is not None:
        a.refuse(by_rank, f"Megatron refuses it beside {by_chunk}; allowed: one of them")
    if chunks is not None:
        return chunks, by_rank
    layers = a.whole("--num-layers", 1)
    if each is None or layers is None:
        return 1, by_chunk
    counted = layers + a.on(_WITH_EMBEDDING) + a.on(_WITH_LOSS)
    if counted % (pp * each):
        why = (
            f"{counted} layers (the embedding and the loss counted, if they are) do not make chunks of it on {pp} ranks"
        )
        a.refuse(by_chunk, f"{why}; allowed: a divisor of {counted} / {pp}")
    return counted // (pp * each), by_chunk


def _accounted(a: Arguments, pp: int) -> dict[str, Value]:
    """Return the layers of the first stage if the embedding alone counts as a layer. Layers that do not divide have the
    loss, or both, counted without an option that says it."""
    layers = a.whole("--num-layers", 1)
    embedding, loss = a.on(_WITH_EMBEDDING), a.on(_WITH_LOSS)
    if layers is None or not embedding or loss or (layers + 1) % pp:
        return {}
    fewer = (layers + 1) // pp - 1
    return {"first_stage_layers": a.value(_WITH_EMBEDDING, fewer)} if fewer else {}


def layers_of(a: Arguments) -> int | None:
    """Return the layers of the largest chunk; None if it is not known."""
    options, layers = stages_of(a), a.whole("--num-layers", 1)
    if layers is None:
        return None
    chunks = options["virtual_stages"].value if "virtual_stages" in options else 1
    names = ("first_stage_layers", "last_stage_layers", "stage_layers")
    ends = (options[name].value if name in options else None for name in names)
    try:
        return max(layers_of_chunks(layers, chunks * (a.whole("--pipeline-model-parallel-size", 1) or 1), *ends))
    except ValueError:
        return None


# --- a layout that is written out


def _of_layout(a: Arguments, pp: int) -> dict[str, Value]:
    """Return the stages of a written layout, if memcalc has it: equal ones but for the first and the last."""
    text = a.text(_LAYOUT) or ""
    try:
        stages = _expanded(re.sub(r"[\s,]", "", text)).split("|")
    except (ValueError, RecursionError):
        a.refuse(_LAYOUT, "allowed: stages of E, t, L with |, such as E|(t|)*3L")
    if set("".join(stages)) - set("EtmL"):
        a.refuse(_LAYOUT, "other layers are not modelled; allowed: E, t, m, L")
    _check_predictions(a, stages)
    layers = a.whole("--num-layers", 1)
    counts = [stage.count("t") for stage in stages]
    if len(stages) % pp:
        a.refuse(_LAYOUT, f"its {len(stages)} stages are not divisible by pp {pp}")
    if layers is not None and sum(counts) != layers:
        a.refuse(_LAYOUT, f"it has {sum(counts)} layers, and --num-layers is {layers}")
    chunks = len(stages) // pp
    ends = ends_of(counts, whole=chunks > 1 or pp == 1)
    if ends is None:
        written = {"stage_layers": a.value(_LAYOUT, ",".join(map(str, counts)))}
        return written | (_interleaved(a, chunks) if chunks > 1 else {})
    names = ("first_stage_layers", "last_stage_layers")
    given = {name: a.value(_LAYOUT, count) for name, count in zip(names, ends, strict=True) if count is not None}
    return given | (_interleaved(a, chunks) if chunks > 1 else {})


def _interleaved(a: Arguments, chunks: int) -> dict[str, Value]:
    return {"schedule": a.value(_LAYOUT, "interleaved"), "virtual_stages": a.value(_LAYOUT, chunks)}


def _check_predictions(a: Arguments, stages: list[str]) -> None:
    """Raise InputError for layers of multi-token prediction that are not those of `--mtp-num-layers`, or before the last
    stage (Megatron allows a stage of their own there, whose hidden states are longer)."""
    found, wanted = sum(stage.count("m") for stage in stages), a.whole("--mtp-num-layers", 0, 1000) or 0
    if found != wanted:
        a.refuse(_LAYOUT, f"it has {found} m, and --mtp-num-layers is {wanted}")
    if found and "m" in "".join(stages[:-1]):
        a.refuse(_LAYOUT, "layers of multi-token prediction before the stage with L are not modelled; allowed: mL")


def _expanded(text: str) -> str:
    """Return a layout without "(...)*3" and "t*3". Raises ValueError."""
    repeated = re.compile(r"\(([^()]*)\)\*(\d{1,6})|([^()*|])\*(\d{1,6})")
    while (match := repeated.search(text)) is not None:
        part, times = match[1] if match[1] is not None else match[3], int(match[2] or match[4])
        if len(part) * times + len(text) > 4 * _MOST_LAYERS:
            raise ValueError("too many layers")
        text = text[: match.start()] + part * times + text[match.end() :]
    if re.search(r"[()*]", text):
        raise ValueError("brackets")
    return text
