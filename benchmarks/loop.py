"""How many estimates of one model a Python loop makes per second on one core.

    python benchmarks/loop.py [model] [seconds]

The loop varies what a planner varies: GPUs, ZeRO stage, micro-batch, sequence length, recompute. Every report's peak and
phases are read. The first pass, which makes the profiles, is timed apart.
"""

from __future__ import annotations

import itertools
import sys
import time

import memcalc

GRID = {
    "gpus": (1, 2, 4, 8, 16, 24, 64, 256),
    "zero": (0, 1, 2, 3),
    "micro_batch_size": (1, 2, 3, 4, 8),
    "seq_len": (512, 1000, 2048, 3000, 8192),
    "recompute": ("none", "full"),
}


def once(model: memcalc.Model) -> int:
    """One pass over the grid; the number of estimates."""
    count = 0
    for values in itertools.product(*GRID.values()):
        options = dict(zip(GRID, values, strict=True))
        if options["gpus"] == 1 and options["zero"]:
            continue  # refused: one GPU has none to shard with
        report = memcalc.estimate(model, **options)
        assert report.peak == max(report.phases.values())
        count += 1
    return count


def main() -> None:
    model = memcalc.load_model(sys.argv[1] if len(sys.argv) > 1 else "llama-7b")
    seconds = float(sys.argv[2]) if len(sys.argv) > 2 else 3.0
    start = time.process_time()
    count = once(model)
    first = time.process_time() - start
    start = time.process_time()
    total = 0
    while time.process_time() - start < seconds:
        total += once(model)
    rate = total / (time.process_time() - start)
    print(
        f"{model.name}: first pass {count / first:,.0f} estimates/s, then {rate:,.0f} estimates/s (CPU time, one core)"
    )


if __name__ == "__main__":
    main()
