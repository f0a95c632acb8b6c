"""The JSON document of `memcalc infer`. It always has every key."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memcalc.timing.kernels import Unknown

if TYPE_CHECKING:
    from memcalc.inference.report import Inferred

SCHEMA_VERSION = 1


def _time(inferred: Inferred) -> dict[str, Any]:
    """Return the seconds of a prefill and of a decode step, and their rows; null where they are not known."""
    found = inferred.times
    if isinstance(found, Unknown):
        known: dict[str, Any] = dict.fromkeys(("prefill_seconds", "decode_seconds", "tokens_per_second"))
        return {**known, "items": [], "unknown": found.missing}
    return {
        "prefill_seconds": found.prefill,
        "decode_seconds": found.decode,
        "tokens_per_second": found.tokens_per_second,
        "items": [item._asdict() for item in found.items],
        "unknown": None,
    }


def _host(inferred: Inferred) -> dict[str, Any] | None:
    """Return what ZeRO-Inference keeps on the host, in bytes by kind, and copies from it in a forward."""
    needs = inferred.zero_inference
    if needs is None:
        return None
    from memcalc.offload.host import host_items, totals

    items = host_items(needs.host)
    return {**totals(items), "copied_per_forward": needs.per_forward, "items": [item._asdict() for item in items]}


def document(inferred: Inferred) -> dict[str, Any]:
    model, fit = inferred.model, inferred.fit
    return {
        "schema_version": SCHEMA_VERSION,
        "model": {
            "name": model.name,
            "model_type": model.model_type,
            "parameters": model.num_parameters,
            "active_parameters": model.active_parameters,
            "layers": model.layers,
        },
        "setup": inferred.asked._asdict(),
        "weights": inferred.weights,
        "kv_cache": inferred.kv_cache,
        "kv_bytes_per_token": inferred.kv_bytes_per_token(),
        "kv_bytes_per_token_all_gpus": inferred.kv_bytes_per_token_all_gpus,
        "state_cache": inferred.state_cache,
        "prefill_peak": inferred.prefill_peak,
        "decode_peak": inferred.decode_peak,
        "total": inferred.total,
        "fit": None if fit is None else fit._asdict(),
        "max_sequences": inferred.max_sequences,
        "time": _time(inferred),
        "quantization": None if inferred.method is None else inferred.method.name,
        "serving": None if inferred.serving is None else inferred.serving.to_dict(),
        "host": _host(inferred),
        "rule_of_thumb": inferred.rule_of_thumb,
        "items": [{**item._asdict(), "shape": [list(dim) for dim in item.shape]} for item in inferred.items],
        "notes": inferred.notes,
    }
