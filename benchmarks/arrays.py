"""How many setups of one model `memcalc.many` evaluates per second on one core.

    python benchmarks/arrays.py [model] [setups]

Of each engine one question: rank counts, micro-batches, sequence lengths and global batches, as a planner asks it for a layout.
The first time, which makes the profiles, is timed apart. Peaks of all phases, and bytes and times of collectives are in the
answer; what is refused counts as a setup, as it has to be found.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import numpy as np

import memcalc

ENGINES: tuple[dict[str, Any], ...] = (
    {"engine": "none"},
    {"engine": "ddp"},
    *({"engine": "deepspeed", "zero": zero} for zero in (0, 1, 2, 3)),
    *({"engine": "fsdp2", "zero": zero} for zero in (2, 3)),
    {"engine": "fsdp2", "tp": 2},
    {"engine": "megatron", "tp": 2, "zero": 1},
    {"engine": "megatron", "tp": 2, "pp": 4, "zero": 1},
)
GPUS = (8, 16, 24, 32, 64, 128, 256, 512)


def arrays(count: int, engine: str) -> dict[str, Any]:
    """So many setups, mixed; a run that is of them all would find the same profiles."""
    random = np.random.default_rng(0)
    gpus = random.choice(GPUS, count) if engine != "none" else np.ones(count, int)
    batch, steps = random.integers(1, 17, count), random.integers(1, 33, count)
    seq = 128 * random.integers(1, 65, count)
    return {"gpus": gpus, "micro_batch_size": batch, "seq_len": seq, "global_batch_size": gpus * batch * steps}


def timed(model: memcalc.Model, options: dict[str, Any]) -> tuple[float, memcalc.Many]:
    """CPU seconds of one answer, and the answer."""
    start = time.process_time()
    found = memcalc.many(model, **options)
    return time.process_time() - start, found


def main() -> None:
    model = memcalc.load_model(sys.argv[1] if len(sys.argv) > 1 else "llama-7b")
    count = int(sys.argv[2]) if len(sys.argv) > 2 else 100_000
    for engine in ENGINES:
        options = {"gpu": "h100-80gb", **arrays(count, engine["engine"]), **engine}
        (first, _), (again, found) = timed(model, options), timed(model, options)
        name = " ".join(str(value) if key == "engine" else f"{key} {value}" for key, value in engine.items())
        rates = f"first {count / first:,.0f} setups/s, then {count / again:,.0f} setups/s"
        print(f"{model.name}, {name}: {rates} (CPU time, one core); {found.refused.mean():.0%} refused")


if __name__ == "__main__":
    main()
