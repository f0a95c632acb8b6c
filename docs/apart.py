"""The section of docs/accuracy.md about Megatron-LM's records that are far from the estimate, and why."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from megatron_functional_tests_apart import REASONS, records_apart

_TEXT = """
#### Records that are more than 5 % away

Of the other records of the functional tests, those of jobs that load a checkpoint, of releases and of older containers, these
are more than 5 % from the estimate (tests/megatron_functional_tests_apart.json). A record stays as it is while arguments,
containers and Megatron-LM change, so some are of another job than their case's arguments tell now. The last column is the error
of an estimate for what the job was, where that is known. Records of several containers that are equal have one line.

| reason | records | error | what the job was |
|---|---|---|---|
"""


def lines() -> list[str]:
    """Each reason of errors above 5 % among the other records, with its errors, and the records."""
    table, texts = [], []
    for key, reason in REASONS.items():
        of_it = [record for record in records_apart() if record.reason == key]
        files = sum(len(record.records) for record in of_it)
        explained = [error for record in of_it if (error := record.explained()) is not None]
        table.append(
            f"| {key} | {files} | {_spread([record.error() for record in of_it])} | {_spread(explained) if explained else ''} |"
        )
        texts += textwrap.wrap(f"- **{key}**: {reason.text}.", 125, subsequent_indent="  ", break_on_hyphens=False)
        for record in of_it:
            texts += textwrap.wrap(
                f"  - {record.name}: {100 * record.error():+.1f} %",
                125,
                subsequent_indent="    ",
                break_on_hyphens=False,
            )
    return [*_TEXT.splitlines(), *table, "", *texts]


def _spread(errors: list[float]) -> str:
    least, most = 100 * min(errors), 100 * max(errors)
    return f"{least:+.1f} %" if f"{least:+.1f}" == f"{most:+.1f}" else f"{least:+.1f} to {most:+.1f} %"
