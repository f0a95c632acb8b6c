"""The JSON document, `schema_version` 1. Sizes are integer bytes of the reported rank, by default the worst."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Final

from memcalc.core.rows import COMPONENTS, Item
from memcalc.hardware.cost import Cost, Unknown, step_time
from memcalc.report.advice_document import advice_document
from memcalc.report.all_ranks import rank_document
from memcalc.report.defaults import default_lines
from memcalc.report.host import host_document
from memcalc.report.notes import notes
from memcalc.report.per_layer import Share, shares
from memcalc.report.time import time_document, time_notes
from memcalc.report.verdict import why

if TYPE_CHECKING:
    from memcalc.estimation.compute import Computed
    from memcalc.estimation.report import Report
    from memcalc.layout.collectives import Collective

SCHEMA_VERSION = 1


def document(report: Report) -> dict[str, Any]:
    """Return the document. It always has every key."""
    return {
        "schema_version": SCHEMA_VERSION,
        "model": model_document(report),
        "setup": setup_document(report),
        "memory": memory_document(report),
        "communication": communication_document(report),
        "compute": _compute(report),
        "time": time_document(report),
        "fit": fit_document(report),
        "advice": advice_document(report),
        "notes": [*default_lines(report), *notes(report), *time_notes(report)],
    } | _layers(report)


def _layers(report: Report) -> dict[str, Any]:
    """Return the layers of a network of a file; {} for other models."""
    if report.model.model_type != "layers":
        return {}
    from memcalc.estimation.layers import layer_rows

    return {"layers": [row.to_dict() for row in layer_rows(report)]}


def setup_document(report: Report) -> dict[str, Any]:
    return report.setup._asdict() | {"pp_rank": report.rank.number}


def model_document(report: Report) -> dict[str, Any]:
    model = report.model
    return {
        "name": model.name,
        "model_type": model.model_type,
        "parameters": model.num_parameters,
        "active_parameters": model.active_parameters,
        "trainable_parameters": model.trainable_parameters,
        "layers": model.layers,
    }


def memory_document(report: Report) -> dict[str, Any]:
    at_peak: dict[str, int] = dict.fromkeys(COMPONENTS, 0)
    for item in report.items:
        at_peak[item.component] += item.at_peak
    return {
        **{component: report.total(component) for component in COMPONENTS[:-1]},
        "phases": dict(report.phases),
        "peak_phase": report.peak_phase,
        "rollout": _rollout(report),
        "peak": report.peak,
        "allocated": report.allocated,
        "reserved": report.reserved,
        "device": report.device,
        "at_peak": at_peak,
        "rank": {"pp": report.rank.number} | ({} if report.rank.cp is None else {"cp": report.rank.cp}),
        "ranks": [rank_document(one) for one in report.each_rank()],
        "items": [item_document(item) for item in [*report.items, *report.overheads]],
        **host_document(report),
    }


def _rollout(report: Report) -> dict[str, Any] | None:
    """Return the peaks before a step that trains on generated text; None for all other steps."""
    rollout = report.rollout
    if rollout is None:
        return None
    return {
        "peak": rollout.peak,
        "peak_phase": rollout.highest.name,
        "phases": [{"name": name, "peak": peak} for name, peak in rollout.peaks.items()],
        "held": rollout.base,
        "items": [
            {"name": row.name, "nbytes": row.nbytes, "dtype": row.dtype.name, "basis": row.basis, "source": row.source}
            for row in sorted(rollout.highest.rows, key=lambda row: -row.nbytes)
        ],
    }


def item_document(item: Item) -> dict[str, Any]:
    return {
        "component": item.component,
        "name": item.name,
        "nbytes": item.nbytes,
        "at_peak": item.at_peak,
        "shape": [[dim, size] for dim, size in item.shape],
        "dtype": item.dtype,
        "life": item.life,
        "formula": item.formula,
        "basis": item.basis,
        "source": item.source,
    }


def communication_document(report: Report) -> dict[str, Any]:
    layer_payload, layer_wire = report.per_layer()
    return {
        "per_step": {
            "payload": sum(c.payload for c in report.collectives),
            "wire": sum(c.wire for c in report.collectives),
            "seconds": _step_seconds(report),
        },
        "per_layer": {"payload": layer_payload, "wire": layer_wire},
        "per_layer_items": [_share(share) for share in shares(report)],
        "items": [
            {**item, "overlap": c.overlap, **_time(cost)}
            for item, c, cost in zip_longest(_collectives(report.collectives), report.collectives, report.costs)
        ],
        "textbook": _collectives(report.textbook),
    }


def _share(share: Share) -> dict[str, Any]:
    """Return a layer's part of a collective.

    `layers`: how many of the rank's layers have this part; 0 for a send between stages. `calls` is a fraction if one call is
    for several layers.
    """
    c = share.collective
    return {
        "axis": c.axis,
        "collective": c.collective,
        "name": c.name,
        "phase": c.phase,
        "layers": share.layers,
        "calls": share.calls,
        "payload": share.payload,
        "wire": share.wire,
        "formula": share.formula,
    }


def _compute(report: Report) -> dict[str, Any] | None:
    """Return FLOPs and matrix products; None for a bare number of parameters."""
    if not report.rank.profiles:
        return None
    return {
        "per_step": report.flops,
        "items": [_product(item) for item in report.computed],
        "seconds_at_peak": report.seconds_at_peak,
    }


_FOR_TIME: Final = ("sizes", "groups", "is_causal")
"""Fields of a product that its time needs; its formula names the sizes."""


def _product(item: Computed) -> dict[str, Any]:
    """Return a product as the document has it."""
    return {name: value for name, value in item._asdict().items() if name not in _FOR_TIME}


def _step_seconds(report: Report) -> dict[str, float] | None:
    """Return the seconds that are exposed and that can hide behind forward and backward; None without a GPU or if a link is not
    known."""
    time = step_time(report.collectives, report.costs) if report.gpu is not None else None
    return None if time is None else {**time._asdict(), "total": time.total}


def _time(cost: Cost | Unknown | None) -> dict[str, Any]:
    """Return a collective's time, with nulls if it is not known. `seconds_formula` says what is missing if a link is not
    known."""
    if isinstance(cost, Cost):
        return {"seconds": cost.seconds, "link": cost.link, "seconds_formula": cost.formula}
    return {"seconds": None, "link": None, "seconds_formula": None if cost is None else cost.missing}


def _collectives(collectives: Iterable[Collective]) -> list[dict[str, Any]]:
    return [
        {
            "axis": c.axis,
            "collective": c.collective,
            "name": c.name,
            "phase": c.phase,
            "layer": c.layer,
            "dtype": c.dtype,
            "group_size": c.group_size,
            "calls": c.calls,
            "payload": c.payload,
            "wire": c.wire,
            "formula": c.formula,
            "basis": c.basis,
            "source": c.source,
        }
        for c in collectives
    ]


def fit_document(report: Report) -> dict[str, Any] | None:
    verdict = report.verdict
    if report.gpu is None or verdict is None:
        return None
    return {
        "gpu": report.gpu.name,
        "capacity": verdict.capacity,
        "fits": verdict.fits,
        "headroom": report.headroom,
        "margin": verdict.report.margin,
        "rank": verdict.report.rank.number,
        "answer": verdict.answer,
        "needs": verdict.needs,
        "why": why(report),
    }
