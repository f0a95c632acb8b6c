"""How long `memcalc.plan` takes on one core, and how many layouts it decides in a second.

    python benchmarks/plan.py [name ...]

Everything is free: engines, degrees, chunks, shard groups, recomputation and micro-batches. Every layout is counted that was
enumerated: refused, too large by a bound or exactly, slower by a bound, or estimated. For scale, on one core: Calculon
evaluates some 600 layouts a second, SimuMax 20.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import memcalc

TRILLION: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 25600, "intermediate_size": 102400, "num_hidden_layers": 96,
    "num_attention_heads": 160, "num_key_value_heads": 16, "vocab_size": 51200, "max_position_embeddings": 8192,
}  # fmt: skip
"""About 10^12 parameters in Llama's shape."""
QUESTIONS: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama-7b": ("llama-7b", {"gpus": 8, "gpu": "a100-80gb", "global_batch_size": 64, "seq_len": 2048}),
    "mixtral-8x7b": ("mixtral-8x7b", {"gpus": 64, "gpu": "h100-80gb", "global_batch_size": 256, "seq_len": 4096}),
    "llama-3.1-405b": (
        "llama-3.1-405b",
        {"gpus": 1024, "gpu": "h100-80gb", "global_batch_size": 1024, "seq_len": 8192},
    ),
    "trillion": (TRILLION, {"gpus": 10_000, "gpu": "h100-80gb", "global_batch_size": 10_000, "seq_len": 4096}),
}


def main() -> None:
    for name in sys.argv[1:] or QUESTIONS:
        model, question = QUESTIONS[name]
        start = time.process_time()
        found = memcalc.plan(model, **question)
        spent = time.process_time() - start
        counts = found.to_dict()["layouts"]
        best = f"{found.plans[0].seconds:.3g} s a step" if found.plans else "nothing fits"
        rate = f"{counts['enumerated'] / spent:,.0f} a second"
        print(
            f"{name}: {counts['enumerated']:,} layouts in {spent:.1f} s of CPU time, {rate}; "
            f"{counts['evaluated']} estimated, best {best}",
            flush=True,
        )


if __name__ == "__main__":
    main()
