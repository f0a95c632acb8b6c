"""Figures from the records of GPUs: the memory that a process holds outside torch, and shares for engines whose rules
are farther off than the measured share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import ceil
from statistics import median
from typing import Any, Final, NamedTuple

from memcalc.estimation.report import Report
from memcalc.hardware.figures import CONTEXT, NCCL, WORKSPACES, Error, Figures, Fragmentation, Size, using
from memcalc.validate.comparison import predicted_memory
from memcalc.validate.run import on_gpu
from memcalc.validate.suites import model_of, options_of


class Case(NamedTuple):
    """A measured case with today's report of it."""

    report: Report
    measured: Mapping[str, int]
    environment: Mapping[str, str]
    real_ranks: bool

    @property
    def ranks(self) -> int:
        return self.report.setup.gpus if self.real_ranks else 1

    @property
    def outside(self) -> int | None:
        """Return the bytes that the device holds beyond torch's segments; None if it did not say."""
        return self.measured["device"] - self.measured["reserved"] if "device" in self.measured else None


def figures_of(cases: Iterable[Mapping[str, Any]]) -> Figures:
    """Return the figures of all records together. A GPU that memcalc does not know has no sizes, because it cannot be
    named."""
    measured = [made for made in cases if made["outcome"] == "measured" and made["backend"] == "cuda"]
    with using(Figures()):
        sizes = tuple(_sizes([case for case in map(_read, measured) if case.report.gpu is not None]))
    with using(Figures(sizes)):
        fragmentation = tuple(_fragmentation(list(map(_read, measured))))
    with using(Figures(sizes, fragmentation)):
        return Figures(sizes, fragmentation, tuple(_errors(list(map(_read, measured)))))


def _read(made: Mapping[str, Any]) -> Case:
    report = on_gpu(model_of(made["case"]), options_of(made["case"]), made["environment"]["gpu"])
    rows = {row["name"]: row["measured"] for row in made["memory"]}
    return Case(report, rows, made["environment"], made["real_ranks"])


# --- sizes


def _sizes(cases: Sequence[Case]) -> list[Size]:
    out: list[Size] = []
    for gpu in dict.fromkeys(_gpu(case) for case in cases):
        own = [case for case in cases if _gpu(case) == gpu]
        workspaces = [(case, case.measured[WORKSPACES]) for case in own if WORKSPACES in case.measured]
        alone = [(case, case.outside) for case in own if case.ranks == 1 and case.outside is not None]
        out += [_size(name, gpu, 1, found) for name, found in ((WORKSPACES, workspaces), (CONTEXT, alone)) if found]
        if not alone:
            continue
        context = round(median(size for _, size in alone))
        for ranks in sorted({case.ranks for case in own if case.ranks > 1}):
            found = [(c, c.outside - context) for c in own if c.ranks == ranks and c.outside is not None]
            if found:
                out.append(_size(NCCL, gpu, ranks, found))
    return out


def _gpu(case: Case) -> str:
    assert case.report.gpu is not None
    return case.report.gpu.name


def _size(name: str, gpu: str, ranks: int, found: Sequence[tuple[Case, int]]) -> Size:
    sizes = [size for _, size in found]
    source = f"{_where([case for case, _ in found])}, {min(sizes)} to {max(sizes)} B"
    return Size(name, gpu, ranks, round(median(sizes)), source)


def _where(cases: Sequence[Case]) -> str:
    """Return where and how often a size was measured."""
    names = ("gpu", "driver", "cuda", "torch")
    places = dict.fromkeys(
        ", ".join(
            case.environment[n] if n == "gpu" else f"{n} {case.environment[n]}" for n in names if n in case.environment
        )
        for case in cases
    )
    return f"{'; '.join(places)}: {len(cases)} case{'s' if len(cases) > 1 else ''}"


# --- the allocator's fragmentation


_FEWEST: Final = 5
"""The fewest cases that a share is taken from: a choice. Of fewer, a median is chance."""


def _fragmentation(cases: Sequence[Case]) -> list[Fragmentation]:
    """Return the fragmentation of engines whose median share is nearer to the reserved bytes than the allocator's
    rules, or for which the rules have nothing to play."""
    out: list[Fragmentation] = []
    for engine in dict.fromkeys(case.report.setup.engine for case in cases):
        own = [case for case in cases if case.report.setup.engine == engine and "reserved" in case.measured]
        if len(own) < _FEWEST:
            continue
        share = median(case.measured["reserved"] / case.measured["allocated"] - 1 for case in own)
        by_share = [case.report.allocated * (1 + share) / case.measured["reserved"] - 1 for case in own]
        by_rules = [case.report.reserved / case.measured["reserved"] - 1 for case in own]
        if median(map(abs, by_share)) < median(map(abs, by_rules)):
            out.append(Fragmentation(engine, round(share, 4), _where(own)))
    return out


def _errors(cases: Sequence[Case]) -> list[Error]:
    """Return the margin that a verdict needs: the largest shortfall, as a share of the used bytes or of a quarter of
    the GPU, whichever is more.

    Verdicts are asked for runs that fill a GPU. A small run's fixed bytes are a larger share of it than of these.
    """
    out: list[Error] = []
    for engine in dict.fromkeys(case.report.setup.engine for case in cases):
        own = [case for case in cases if case.report.setup.engine == engine and "device" in case.measured]
        if own:
            low = max(_shortfall(case) for case in own)
            out.append(Error(engine, max(0, ceil(100 * low)), _where(own)))
    return out


_PART: Final = 4
"""A run that uses less than one part in this many of a GPU counts as if it used one part: a choice, as nothing is
recorded yet."""


def _shortfall(case: Case) -> float:
    predicted = _device(case)
    return (case.measured["device"] - predicted) / max(predicted, int(case.environment["memory"]) // _PART)


def _device(case: Case) -> int:
    return predicted_memory(case.report, "cuda", case.environment, real_ranks=case.real_ranks)["device"]
