"""The bytes that a step with offload sends between ranks and copies between host and GPU, estimated and of a real run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from deepspeed_oracle import SIZES

import memcalc
from memcalc.engines.transfers import transfers


def payloads(sent: Mapping[tuple[str, str, int], int]) -> Counter[tuple[str, str]]:
    """The bytes of a real run's collectives by kind and dtype. `sent`: calls by kind, torch's dtype and elements."""
    out: Counter[tuple[str, str]] = Counter()
    for (collective, name, elements), calls in sent.items():
        dtype, itemsize = SIZES[name]
        out[collective, dtype] += calls * elements * itemsize
    return out


def estimated_payloads(report: memcalc.Report) -> Counter[tuple[str, str]]:
    out: Counter[tuple[str, str]] = Counter()
    for one in report.collectives:
        out[one.collective, one.dtype] += one.payload
    return out


def estimated_copies(report: memcalc.Report) -> Counter[tuple[str, str]]:
    """The bytes copied between host and GPU by phase and direction."""
    out: Counter[tuple[str, str]] = Counter()
    for one in transfers(report.model, report.setup, report.rank):
        out[one.phase, one.way] += one.nbytes
    return out
