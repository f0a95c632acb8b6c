"""The run of a suite. Every case's document is recorded when it is done, and recorded cases are not run again."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, cast

from memcalc.errors import InputError, one_line
from memcalc.inputs.files import read_json_object
from memcalc.units import MIB, show_bytes
from memcalc.validate import as_trained, run
from memcalc.validate.server import Server
from memcalc.validate.suites import Case, cases_of
from memcalc.validate.versions import others

_LARGEST: Final = 64 * MIB  # bytes of a record; a case has some ten KiB
FINAL: Final = ("measured", "out of memory")
"""The outcomes that another run would not change."""

_ROW: Final = {"name", "predicted", "measured"}
"""The keys that a row of a measured case needs."""


def run_suite(
    cases: Sequence[Case], backend: str, record: Path | None, tell: Callable[[str], None], *, speaks: bool = True
) -> list[dict[str, Any]]:
    """Return every case's document, in order.

    Cases that `record` has measured are not run again. Cases that failed are run after all others, so a run that is
    ended early has made progress. The record is rewritten after every case. With several ranks, all but one have
    `speaks` False: they run the same cases, but do not report or write.
    """
    done = _recorded(record)
    before = {key for key, made in done.items() if made["outcome"] in FINAL}
    keys = [_key(case, backend) for case in cases]
    with runner(backend) as ask:
        if record is not None and speaks and not done:
            _write(record, [])
        out: dict[int, dict[str, Any]] = {}
        for i in sorted(range(len(cases)), key=lambda i: keys[i] in done and keys[i] not in before):
            key, case = keys[i], cases[i]
            recorded = key in before
            if not recorded:
                done[key] = {"case": dict(case), "backend": backend, **ask(case)}
                before |= {key} if done[key]["outcome"] in FINAL else set()
                if record is not None and speaks:
                    _write(record, list(done.values()))
            out[i] = done[key]
            if speaks:
                tell(f"{i + 1}/{len(cases)} {name_of(case)}: {_said(out[i])}{', as recorded' if recorded else ''}")
        made = [out[i] for i in range(len(cases))]
        if speaks:
            tell(_summed_up(made))
        return made


def runner(backend: str) -> Server | InThisProcess:
    """Return the runner of cases. On a GPU each case has its own process: nothing of the last one is on the device, and
    none can end the suite. torchrun's ranks stay one process each, so that they meet."""
    alone = backend == "cuda" and "RANK" not in os.environ and hasattr(os, "fork")
    return Server(backend) if alone else InThisProcess(backend)


class InThisProcess:
    """A runner of cases one after the other, in this process."""

    def __init__(self, backend: str) -> None:
        self.backend = backend

    def __enter__(self) -> Callable[[Case], dict[str, Any]]:
        run.measurer(self.backend)
        return lambda case: as_trained.outcome(case, self.backend)

    def __exit__(self, *_: object) -> None: ...


def name_of(case: Case) -> str:
    """Return a case in one line: its model, and its options as given."""
    model = case["model"]
    named = model if isinstance(model, str) else cast("dict[str, Any]", model).get("model_type", "config")
    return " ".join([one_line(named), *(f"{k}={v}" for k, v in case.items() if k != "model")])


def _said(made: dict[str, Any]) -> str:
    if made["outcome"] != "measured":
        return f"{made['outcome']}: {made['why']}"
    peak = next(row for row in made["memory"] if row["name"] == "peak")
    off = [
        row["name"] for part in ("memory", "communication") for row in made[part] if row["predicted"] != row["measured"]
    ]
    error = (peak["predicted"] - peak["measured"]) / peak["measured"]
    rows = (
        f"{len(off)} row{'s' if len(off) > 1 else ''} differ{'' if len(off) > 1 else 's'}" if off else "all rows agree"
    )
    return f"peak predicted {show_bytes(peak['predicted'])}, measured {show_bytes(peak['measured'])} ({error:+.2%}), {rows}"


def _summed_up(made: Sequence[Mapping[str, Any]]) -> str:
    """Return the number of cases of each outcome, and the case with the largest error of its peak."""
    outcomes = ", ".join(f"{n} {outcome}" for outcome, n in Counter(one["outcome"] for one in made).items())
    errors = {
        name_of(one["case"]): row["predicted"] / row["measured"] - 1
        for one in made if one["outcome"] == "measured" for row in one["memory"] if row["name"] == "peak"
    }  # fmt: skip
    told = [f"{len(made)} case{'s' if len(made) > 1 else ''}: {outcomes}"]
    if errors:
        worst = max(errors, key=lambda name: abs(errors[name]))
        told.append(f"largest error of a peak {errors[worst]:+.2%}{f' ({worst})' if errors[worst] else ''}")
    return "; ".join([*told, *dict.fromkeys(filter(None, (others(one.get("environment", {})) for one in made)))])


def _key(case: Case, backend: str) -> str:
    return json.dumps([case, backend], sort_keys=True)


def read_record(record: Path) -> list[dict[str, Any]]:
    """Return the cases of a record. Raises InputError for a file that is none."""
    document = read_json_object(record, "--record", "a new file, or the record of a suite", _LARGEST)
    if document.get("schema_version") != 1 or not isinstance(document.get("cases"), list):
        raise InputError(f"--record {one_line(record)}: is no record of a suite; allowed: a new file, or one")
    if not document["cases"]:
        return []
    cases = cases_of(record, "--record")
    if not all(map(_is_recorded, cases)):
        raise InputError(f"--record {one_line(record)}: holds cases that no suite has recorded; allowed: a new file")
    return cases


def _is_recorded(made: Mapping[str, Any]) -> bool:
    """Tell whether a document is a case that a suite has written."""
    if not isinstance(made.get("case"), dict) or "model" not in made["case"] or "backend" not in made:
        return False
    if made.get("outcome") != "measured":
        return isinstance(made.get("outcome"), str) and isinstance(made.get("why"), str)
    return isinstance(made.get("environment"), dict) and all(
        isinstance(made.get(part), list) and all(isinstance(row, dict) and row.keys() >= _ROW for row in made[part])
        for part in ("memory", "communication")
    )


def _recorded(record: Path | None) -> dict[str, dict[str, Any]]:
    if record is None or not record.exists():
        return {}
    return {_key(made["case"], made["backend"]): made for made in read_record(record)}


def _write(record: Path, cases: list[dict[str, Any]]) -> None:
    """Write the whole record or nothing: a run that is killed while it writes leaves the last record."""
    text = json.dumps({"schema_version": 1, "cases": cases}, indent=1, ensure_ascii=False) + "\n"
    text = re.sub(r"\[[\d\s,]+\]", lambda found: " ".join(found[0].split()), text)  # a timeline is one line
    beside = record.with_name(record.name + ".new")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(record)
    except OSError as error:
        raise InputError(
            f"--record {one_line(record)}: cannot be written ({one_line(error.strerror or error)})"
        ) from None
