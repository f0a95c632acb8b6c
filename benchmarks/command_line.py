"""CPU time of `memcalc estimate` over that of importing the libraries it is made of, same interpreter.

    python benchmarks/command_line.py [runs]

The aim is at most 1.5. Install memcalc first: it is the installed one that is measured (`-P`), with its bytecode.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys

BASE = [sys.executable, "-P", "-c", "import typer, rich.table, pydantic"]
ESTIMATES = (
    "--model llama-7b --zero 3 --gpus 8",
    "--model gpt2 --recompute full --json",
    "--model gemma-2-27b --gpus 16 --zero 2",
    "--model qwen3-32b --gpus 64 --zero 3 --gpu h100-80gb",
)
LARGE = (
    "--model llama-3.1-405b --zero 3 --gpus 512 --gpu h100-80gb",
    "--model llama-3.1-405b --engine fsdp2 --zero 3 --gpus 512 --gpu h100-80gb",
    "--model llama-3.1-405b --engine fsdp2 --zero 2 --gpus 512 --pp 8 --tp 8 --schedule interleaved --virtual-stages 2"
    " --global-batch-size 128",
    "--model gemma-3-27b --zero 3 --gpus 16 --gpu h100-80gb",
    "--model qwen3-235b-a22b --zero 3 --gpus 64 --gpu h100-80gb",
    "--model deepseek-v3 --zero 3 --gpus 256 --gpu h100-80gb",
)
"""Run once each; the aim is at most 8."""


def cpu_seconds(command: list[str]) -> float:
    """User and system time of one run."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=os.environ)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Runs the commands in turn, so that a machine whose speed drifts slows them alike; the least of each counts."""
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 15
    entry = "from memcalc.cli.main import entry_point; entry_point()"
    commands = [BASE, *([sys.executable, "-P", "-c", entry, "estimate", *options.split()] for options in ESTIMATES)]
    base, *estimates = (
        min(column) for column in zip(*([cpu_seconds(c) for c in commands] for _ in range(runs)), strict=True)
    )
    print(f"importing typer, rich.table and pydantic: {1000 * base:.0f} ms of CPU")
    for options, seconds in zip(ESTIMATES, estimates, strict=True):
        print(f"memcalc estimate {options}: {1000 * seconds:.0f} ms of CPU, {seconds / base:.2f} times that")
    for options in LARGE:
        seconds = cpu_seconds([sys.executable, "-P", "-c", entry, "estimate", *options.split()])
        print(f"memcalc estimate {options}: {seconds:.1f} s of CPU, {seconds / base:.0f} times that")


if __name__ == "__main__":
    main()
