"""What a reader of an inference report has to know, one sentence each."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memcalc.inference.report import Inferred


def notes(inferred: Inferred) -> list[str]:
    asked, out = inferred.asked, list(inferred.model.notes)
    out.append(
        f"prompts of equal length without padding; each of the {asked.new_tokens} new tokens goes through the model once, and "
        "`generate` leaves its last one out"
    )
    if not inferred.has_peaks:
        what = "with a static cache" if asked.cache == "static" else f"of a {inferred.model.model_type} with a cache"
        out.append(f"the forward {what} is not modelled: peaks and the total are not known, weights and caches are")
    if asked.ep > 1:
        out.append("temporaries are those of a rank whose experts get all tokens: less if they are shared evenly")
    if asked.pp > 1:
        out.append("one batch is in the pipeline; more micro-batches in flight have caches of their own")
    if asked.kv_dtype != "auto":
        out.append("a kernel reads keys and values in their dtype, as vLLM's do; transformers' own caches make copies")
    return out
