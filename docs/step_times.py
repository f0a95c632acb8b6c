"""The section of docs/accuracy.md on step times, and memcalc/timing/errors.json, both from tests/published_step_times.json."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import mean, median
from textwrap import wrap
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from published_step_times import PublishedTime, published_times

HEAD = """## Step time

Step times that others have published, beside the estimate of the same setup ([how a time is made](step-time.md)). The
setups are in tests/published_step_times.json. The shares of a GPU's speed that an estimate takes come from the first
five sources together; the runs of fms-acceleration were not used for them. A row that leaves open its micro-batch or
its chunks is not here.

| measured by | GPUs | runs | mean error | median | worst | bias |
|---|---|---|---|---|---|---|
"""
DETAIL = """
### Every run

| run | measured, s | memcalc, s | error |
|---|---|---|---|
"""


def section() -> list[str]:
    """Return the section's lines."""
    rows = published_times()
    lines = HEAD.splitlines()
    for name in dict.fromkeys(row.measured_by for row in rows):
        for gpu in dict.fromkeys(row.setup["gpu"] for row in rows if row.measured_by == name):
            own = [row for row in rows if (row.measured_by, row.setup["gpu"]) == (name, gpu)]
            lines.append(f"| {name} | {_gpus(own)} {gpu} | {_errors(own)} |")
    lines.append(f"| all | | {_errors(rows)} |")
    lines += [*DETAIL.splitlines(), *map(_line, rows), "", "Notes on the sources:", ""]
    for name in dict.fromkeys(row.measured_by for row in rows):
        notes = dict.fromkeys(part for row in rows if row.measured_by == name for part in row.notes.split("; ") if part)
        if notes:
            lines += wrap(f"- {name}: {'; '.join(notes)}.", 118, subsequent_indent="  ", break_on_hyphens=False)
    return [*lines, ""]


def _gpus(rows: Iterable[PublishedTime]) -> str:
    counts = sorted({row.setup["gpus"] for row in rows})
    return str(counts[0]) if len(counts) == 1 else f"{counts[0]}–{counts[-1]}"


def _errors(rows: Sequence[PublishedTime]) -> str:
    errors = [row.error for row in rows]
    sizes = [abs(error) for error in errors]
    worst = max(errors, key=abs)
    return f"{len(rows)} | {mean(sizes):.1%} | {median(sizes):.1%} | {worst:+.1%} | {mean(errors):+.1%}"


def _line(row: PublishedTime) -> str:
    return f"| {row.id} | {row.seconds_per_step:.4g} | {row.predicted:.4g} | {row.error:+.1%} |"


def errors() -> str:
    """Return memcalc/timing/errors.json: how far measured times lie from estimates, by engine and architecture."""
    return json.dumps({"schema_version": 1, "kinds": list(_kinds(published_times()))}, indent=1) + "\n"


def _kinds(rows: Sequence[PublishedTime]) -> Iterable[dict[str, Any]]:
    from memcalc.inputs.gpu import named_gpu

    found: dict[tuple[str, str, bool], list[float]] = {}
    for row in rows:
        setup = row.estimate().setup
        key = setup.engine, named_gpu(str(setup.gpu)).architecture, setup.pp > 1
        found.setdefault(key, []).append(row.seconds_per_step / row.predicted)
    for (engine, architecture, pipeline), ratios in sorted(found.items()):
        low, high = round(min(1.0, *ratios), 3), round(max(1.0, *ratios), 3)
        where = {"engine": engine, "architecture": architecture, "pipeline": pipeline}
        yield {**where, "rows": len(ratios), "low": low, "high": high}
