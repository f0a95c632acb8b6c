"""How many distinct layouts of three models are estimated per second on one core, each for the first time.

    python benchmarks/layouts.py [most]

The layouts are what a planner enumerates: DDP, ZeRO 1 to 3, FSDP2 and Megatron with tensor and pipeline parallelism, over rank
counts, micro-batches, sequence lengths and recomputation. What an engine refuses is counted apart.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Iterator
from typing import Any

import memcalc

MODELS = ("llama-3.1-70b", "mixtral-8x7b", "qwen2.5-7b")
ENGINES: tuple[dict[str, Any], ...] = (
    {"engine": "ddp"},
    *({"engine": "deepspeed", "zero": zero} for zero in (1, 2, 3)),
    *({"engine": "fsdp2", "zero": zero} for zero in (2, 3)),
    *(
        {"engine": "megatron", "tp": tp, "pp": pp, "zero": 1}
        for tp, pp in itertools.product((1, 2, 4, 8), (1, 2, 4, 8))
    ),
)
GPUS = (8, 16, 24, 32, 64, 128, 256, 512)
BATCHES = ((1, 4096), (2, 2048), (4, 8192))
RECOMPUTE = ("none", "full")


def layouts() -> Iterator[tuple[str, dict[str, Any]]]:
    """Every layout, engine by engine within a model."""
    for name, engine, gpus, (batch, seq), recompute in itertools.product(MODELS, ENGINES, GPUS, BATCHES, RECOMPUTE):
        if engine.get("tp", 1) * engine.get("pp", 1) <= gpus:
            yield name, {**engine, "gpus": gpus, "micro_batch_size": batch, "seq_len": seq, "recompute": recompute}


def main() -> None:
    most = int(sys.argv[1]) if len(sys.argv) > 1 else 3000
    models = {name: memcalc.load_model(name) for name in MODELS}
    spent: dict[str, float] = {}
    counts: dict[str, int] = {}
    refused = 0
    for name, options in itertools.islice(layouts(), most):
        start = time.process_time()
        try:
            _ = memcalc.estimate(models[name], **options).peak
        except memcalc.InputError:
            refused += 1
            continue
        engine = options["engine"]
        spent[engine] = spent.get(engine, 0.0) + time.process_time() - start
        counts[engine] = counts.get(engine, 0) + 1
    for engine, seconds in spent.items():
        print(f"{engine}: {counts[engine]} layouts, {counts[engine] / seconds:,.0f} a second")
    total = sum(counts.values())
    print(
        f"in all: {total} layouts, {total / sum(spent.values()):,.0f} a second (CPU time, one core); {refused} refused"
    )


if __name__ == "__main__":
    main()
