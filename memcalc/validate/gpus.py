"""memcalc's name for the GPU of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from memcalc.errors import InputError
from memcalc.inputs.gpu import load_gpu

if TYPE_CHECKING:
    from memcalc.estimation.report import Report


def known(name: str) -> str | None:
    """Return memcalc's name of a GPU by torch's, such as "NVIDIA H200"; None if it has none."""
    for gpu in (name, name.removeprefix("NVIDIA ").replace(" ", "-")):  # torch's name of it, and the short one
        try:
            return load_gpu(gpu).name
        except InputError:
            continue
    return None


def another_gpu(report: Report, environment: Mapping[str, str]) -> str:
    """Return a sentence if the run was on another GPU than the estimate's; else ''."""
    there = environment.get("gpu")
    if there is None or (report.gpu is not None and report.gpu.name == known(there)):
        return ""
    if report.gpu is not None:
        return f"estimated for {report.gpu.name}, measured on {there}"
    return f"memcalc does not know {there}: estimated without its attention kernels, workspaces and capacity"
