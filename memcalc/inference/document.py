"""The JSON document of `memcalc infer`. It always has every key."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memcalc.inference.report import Inferred

SCHEMA_VERSION = 1


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
        "time": {"prefill_seconds": None, "tokens_per_second": None},
        "rule_of_thumb": inferred.rule_of_thumb,
        "items": [{**item._asdict(), "shape": [list(dim) for dim in item.shape]} for item in inferred.items],
        "notes": inferred.notes,
    }
